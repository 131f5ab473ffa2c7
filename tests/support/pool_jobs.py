"""Jobs for pools of processes: small ones that need no compiler, some of which go wrong."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def write(folder: Path, name: str) -> None:
    """Leaves a file with the number of the process that wrote it, and prints, which is nobody's line."""
    print("a job prints")
    (folder / name).write_text(str(os.getpid()))


def refuse(folder: Path, name: str) -> None:
    """Refuses the name "odd", else as `write`."""
    if name == "odd":
        raise ValueError(f"{name} is \N{LATIN SMALL LETTER E WITH ACUTE} " + "very long " * 1000)
    write(folder, name)


def be_killed(folder: Path, name: str) -> None:
    """Kills its own process, as the system does where memory ends, at the name "odd"; else as `write`."""
    if name == "odd":
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, name)


def last_long(folder: Path, name: str) -> None:
    """Says that it began, and goes on for a minute."""
    write(folder, name)
    time.sleep(60)
