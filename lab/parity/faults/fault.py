"""What a planted bug is, and the ways to write one down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3core.checkpoint import DraftCheckpoint
from eagle3core.kernels import Call
from eagle3core.kernels.gemm import pack_weight, unpack_weight
from eagle3core.step import after_all
from eagle3core.weights import PackedDraft, PackedLinear, PackedTarget

PLANTED = "planted"  # op name of the calls that a bug adds


@dataclass(frozen=True)
class Place:
    """Where a call stands in its program.

    Attributes:
        stage: name of its stage.
        scope: pass that it belongs to, as in the names of taps: "" in a prompt's programs and before a step's passes.
        batch: sequences of the step; 0 where a prompt is read.
    """

    stage: str
    scope: str
    batch: int

    @property
    def level(self) -> int:
        """Of a chained draft pass, from 1; 0 for any other pass."""
        return int(self.scope.removeprefix("chain")) if self.scope.startswith("chain") else 0


Change = Callable[[Place, Call], Sequence[Call]]


@dataclass(frozen=True)
class Fault:
    """One bug: other weights, other programs, or both.

    Attributes:
        name: how it is asked for.
        what: the bug, in words.
        stage, kind: the stage and kind of pass (`lab.parity.names.kind_of`) at which parity must name it.
        needs: what a run must have for the bug to change anything; empty when every run shows it.
        target, draft: the model with the bug in it.
        misread: the head as a loader with the bug gives it, of the head as it is read.
        change: the calls that take a call's place; itself alone where nothing is wrong. Kernels stay: a bug adds calls
            before or after the one it spoils, in plain torch that a CUDA graph can hold.
        remember: makes such a `change`, with a memory of its own that lasts from request to request.
    """

    name: str
    what: str
    stage: str
    kind: str
    needs: str = ""
    target: Callable[[PackedTarget], PackedTarget] | None = None
    draft: Callable[[PackedDraft], PackedDraft] | None = None
    misread: Callable[[DraftCheckpoint], DraftCheckpoint] | None = None
    change: Change | None = None
    remember: Callable[[], Change] | None = None


def planted(edit: Callable[[], object]) -> Call:
    """A call that spoils tensors in place."""

    def meaning() -> None:
        edit()

    return Call(PLANTED, {}, meaning)


def before(call: Call, edit: Callable[[], object]) -> list[Call]:
    """The call, on what `edit` has made of its operands."""
    return [planted(edit), *after_all([call])]


def after(call: Call, edit: Callable[[], object]) -> list[Call]:
    """The call, and what `edit` makes of its results."""
    return [call, planted(edit)]


def around(call: Call, first: Callable[[], object], then: Callable[[], object]) -> list[Call]:
    """The call between two edits."""
    return [planted(first), *after_all([call]), planted(then)]


def edited(m: PackedLinear, change: Callable[[Tensor], Tensor]) -> PackedLinear:
    """The map with `change` of its matrix `[rows, k]`, in the order in which it was stored."""
    if not m.is_packed:
        return replace(m, weight=change(m.weight).contiguous())
    matrix = change(unpack_weight(m.weight, m.epilogue, m.k))
    return replace(m, weight=pack_weight(matrix.contiguous(), m.epilogue))


def entries_of(pages: Tensor, slots: Tensor) -> Tensor:
    """Which entries of a cache `[n_blocks, K, block, D]` the rows of `slots` lie in: `[n_blocks, 1, block, 1]` bool."""
    n_blocks, _, block, _ = pages.shape
    hit = torch.zeros(n_blocks * block + 1, dtype=torch.bool, device=pages.device)
    hit.index_fill_(0, slots.where(slots >= 0, n_blocks * block).long(), True)
    return hit[:-1].view(n_blocks, 1, block, 1)


def rolled_rows(n: int) -> Callable[[Tensor], Tensor]:
    """The first `n` rows of a matrix one further down, the last of them first; padding rows stay."""

    def change(matrix: Tensor) -> Tensor:
        made = matrix.clone()
        made[:n] = matrix[:n].roll(1, dims=0)
        return made

    return change
