"""A notebook's processes end with the night that started them, however it ends.

kill -9 runs no handler, so the kernel of the operating system is asked: a process that called `end_with` gets SIGKILL
when its parent dies. Source: prctl(2), PR_SET_PDEATHSIG (Linux; elsewhere nothing is asked).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """From now on this process dies with its parent, process `parent`; at once if that is gone already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
