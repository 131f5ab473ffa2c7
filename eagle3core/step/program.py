"""A program: what a step or a chunk does, as a list of stages, each a list of calls of ops.

One list serves every executor: one CUDA graph of everything, one graph a stage with ranges around it (profiling), stage
by stage with taps (parity), plain torch on any device and in any dtype, and the emulator.
Stage names are the dotted names of spans and rows; `ranges` are the public ranges around them
(docs/requirements.md R-118, R-119).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from eagle3core.kernels.card import Call, Launch, Variant


@dataclass(frozen=True)
class Tap:
    """A stage's tensor, there to be read once the stage has run.

    Attributes:
        value: `[rows, ...]` padding rows included.
        slots: `[rows]` int32, negative for padding; None: all rows are real.
        scope: prefix of the name it is recorded under, such as "verify".
    """

    value: Tensor
    slots: Tensor | None = None
    scope: str = ""


@dataclass(frozen=True)
class Stage:
    """A named part of a program.

    Attributes:
        name: dotted, e.g. "target.3.attn".
        calls: its ops, in order; none for a stage whose work another one's op does.
        ranges: public ranges around it, outermost first.
        taps: what it leaves behind, by tap name.
    """

    name: str
    calls: tuple[Call, ...]
    ranges: tuple[str, ...] = ()
    taps: Mapping[str, Tap] = field(default_factory=dict)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Its kernels, in order; none where the program was made for no GPU."""
        return tuple(launch for call in self.calls for launch in call.launches)


Program = tuple[Stage, ...]


def calls_of(program: Program) -> list[Call]:
    """Every call of a program, in order."""
    return [call for stage in program for call in stage.calls]


def launches_of(program: Program) -> list[Launch]:
    """Every kernel of a program, in order."""
    return [launch for stage in program for launch in stage.launches]


def variants_of(programs: Sequence[Program]) -> list[Variant]:
    """The distinct compiled kernels that programs need, to be built ahead of time."""
    found = {(v.name, repr(v.constants)): v for p in programs for v in (launch.variant for launch in launches_of(p))}
    return [found[key] for key in sorted(found)]


def after_all(calls: Sequence[Call]) -> list[Call]:
    """The calls, of which the first kernel waits until everything before it is done and visible.

    For the first reader of what a kernel before wrote into operands that are `const` to it: it, and all that follow,
    may then read them early.
    """
    first, *others = calls
    if not first.launches:
        return list(calls)
    launch, *further = first.launches
    return [replace(first, launches=(replace(launch, overlap=False), *further)), *others]


def walk_ranges(program: Program) -> Iterator[tuple[int, tuple[str, ...], Stage]]:
    """(ranges to close, ranges to open, stage) for each stage; neighbours stay in the ranges they have in common."""
    open_now: tuple[str, ...] = ()
    for stage in program:
        common = 0
        for ours, theirs in zip(open_now, stage.ranges, strict=False):
            if ours != theirs:
                break
            common += 1
        yield len(open_now) - common, stage.ranges[common:], stage
        open_now = stage.ranges
