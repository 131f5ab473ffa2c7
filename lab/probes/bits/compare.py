"""Two runs' hashes side by side: the first position and stage whose bits differ, and how many do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.errors import NotComparable
from lab.probes.bits.hashes import Hashes

EQUAL, DIFFERS, ABSENT = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Strip:
    """One request in two runs.

    Attributes:
        stages: that both have, in order.
        cells: `[stages, positions]` of `EQUAL`, `DIFFERS`, and `ABSENT` where a run has no such row; positions end
            where the runs' tokens part, since from there on the rows are those of other texts.
        n_prompt: tokens of the prompt. n_equal_tokens: generated ones before the runs' first difference.
        n_tokens: generated ones that were compared.
    """

    stages: tuple[str, ...]
    cells: Tensor
    n_prompt: int
    n_equal_tokens: int
    n_tokens: int

    @property
    def first(self) -> tuple[int, str] | None:
        """Position and stage of the first difference: the earliest position, there the earliest stage."""
        where = (self.cells == DIFFERS).T.nonzero()
        return (int(where[0, 0]), self.stages[int(where[0, 1])]) if len(where) else None

    @property
    def n_compared(self) -> int:
        """Cells that both runs have."""
        return int((self.cells != ABSENT).sum())

    @property
    def n_different(self) -> int:
        """Cells whose bits differ."""
        return int((self.cells == DIFFERS).sum())


def strip_of(one: Hashes, other: Hashes) -> Strip:
    """Both runs of a prompt.

    Raises:
        NotComparable: they are of different prompts, or have no stage in common.
    """
    if one.prompt != other.prompt:
        raise NotComparable("the runs are of different prompts", "the same token ids", "record both from one file")
    stages = tuple(stage for stage in one.stages if stage in other.stages)
    if not stages:
        raise NotComparable("the runs have no stage in common", "two of one target", "record both from one target")
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    n_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    # The row at position P + i is that of generated token i, and its logits choose the next one.
    n = len(one.prompt) + n_equal
    rows = []
    for stage in stages:
        a, b = (run.table[run.stages.index(stage), :n] for run in (one, other))
        rows.append(torch.where((a == 0) | (b == 0), ABSENT, (a != b).long()))
    return Strip(stages, torch.stack(rows), len(one.prompt), n_equal, len(pairs))


def strips_of(one: Sequence[Hashes], other: Sequence[Hashes]) -> list[Strip]:
    """Both runs, prompt by prompt.

    Raises:
        NotComparable: as `strip_of`, or another number of prompts.
    """
    if len(one) != len(other):
        raise NotComparable(f"{len(one)} and {len(other)} prompts", "the same prompts", "record both from one file")
    return [strip_of(a, b) for a, b in zip(one, other, strict=True)]


def sentences(strips: Sequence[Strip], one: str, other: str) -> list[str]:
    """What was found, in words."""
    n, n_tokens = (sum(getattr(strip, name) for strip in strips) for name in ("n_compared", "n_tokens"))
    stages = len(strips[0].stages)
    lines = [f"{one} beside {other}: {len(strips)} prompts, {n_tokens} tokens, {n} rows of {stages} stages"]
    strip = worst(strips)
    if strip.first is None:
        return [*lines, "no bit of any stage differs"]
    position, stage = strip.first
    place = f"generated token {position - strip.n_prompt}" if position >= strip.n_prompt else "in the prompt"
    lines.append(f"the bits part first at position {position} ({place}) of prompt {strips.index(strip)}, at {stage}")
    before = strip.stages[: strip.stages.index(stage)]
    if before:
        lines.append(f"there the stages before it are equal: {', '.join(before)}")
    parted = sum(strip.first is not None for strip in strips)
    lines.append(f"{sum(strip.n_different for strip in strips)} rows differ, in {parted} of {len(strips)} prompts")
    wrong = sum(strip.n_equal_tokens < strip.n_tokens for strip in strips)
    return [*lines, f"{wrong} of {len(strips)} prompts come to another token" if wrong else "no token differs"]


def worst(strips: Sequence[Strip]) -> Strip:
    """The prompt whose bits part first; the first prompt where none do."""
    found = [strip for strip in strips if strip.first is not None]
    return min(found, key=lambda strip: strip.first[0] if strip.first else 0, default=strips[0])
