"""What the lamps may look at: one pair, some prompts, and what has been measured of them, each thing once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lab.pairs.prompts import Prompt


@dataclass
class Case:
    """A head under examination.

    Attributes:
        target, draft: checkpoint directories.
        prompts: what the target continues; empty in the fast part, which runs nothing.
        k: drafts a step that acceptance lengths are of.
        max_new_tokens: tokens a prompt that the target continues it by.
        device: "auto", "cpu" or "cuda".
        fault: name of a bug to plant in every engine (`lab.parity.faults`); empty plants none.
    """

    target: Path
    draft: Path
    prompts: tuple[Prompt, ...] = ()
    k: int = 3
    max_new_tokens: int = 64
    device: str = "auto"
    fault: str = ""
