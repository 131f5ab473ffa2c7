"""One stage judged: exact for ids and positions, by tolerance for everything else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lab.parity.names import is_integer_stage, kind_of
from lab.parity.tolerance import stage_tolerance

Status = Literal["pass", "fail", "missing"]
TOP_K = 5


@dataclass(frozen=True)
class StageCell:
    """One stage of one pass of one prompt.

    Attributes:
        prompt, pass_name, kind, stage: where; `kind` is the pass without its step number.
        order: place in execution order within the prompt.
        status: "missing" fails the run like "fail" does.
        reason: why it did not pass, in words.
        max_abs, mean_abs: absolute error against the truth, or against the recorded reference where there is one.
        cosine: of the two tensors as flat vectors; relative: l2 error over l2 norm.
        reference_max_abs: error of plain torch at this stage (`lab.parity.tolerance.PlainErrors`).
        tolerance: the largest `max_abs` that passes; ratio: `max_abs` over it.
        top_k_overlap, argmax_agreement: of logits, mean over rows; None for other stages.
    """

    prompt: int
    pass_name: str
    kind: str
    stage: str
    order: int
    status: Status
    reason: str = ""
    max_abs: float | None = None
    mean_abs: float | None = None
    cosine: float | None = None
    relative: float | None = None
    reference_max_abs: float | None = None
    tolerance: float | None = None
    ratio: float | None = None
    top_k_overlap: float | None = None
    argmax_agreement: float | None = None


class Triple(NamedTuple):
    """One stage three times: ours, what it is compared with, and the truth that sets the tolerance."""

    ours: Tensor
    wanted: Tensor
    truth: Tensor


@dataclass(frozen=True)
class Place:
    """Where a stage stands: prompt, pass, stage name, and its number in execution order."""

    prompt: int
    pass_name: str
    stage: str
    order: int

    @property
    def kind(self) -> str:
        """The pass without its step number."""
        return kind_of(self.pass_name)

    def cell(self, status: Status, reason: str, values: Mapping[str, float | None] | None = None) -> StageCell:
        """A cell at this place; `values` are the measured fields of `StageCell`."""
        measured = values or {}
        return StageCell(self.prompt, self.pass_name, self.kind, self.stage, self.order, status, reason, **measured)


def judge_stage(
    place: Place, triple: Triple, reference_error: float, dtype: torch.dtype, allowed: float = 1.0
) -> StageCell:
    """The cell of one stage: exact for ids and positions, by tolerance for everything else.

    Args:
        place: which stage.
        triple: the three tensors.
        reference_error: largest error of plain torch at this stage.
        dtype: under test.
        allowed: how many tolerances the two may be apart.
    """
    ours, wanted, truth = triple
    if not ours.shape == wanted.shape == truth.shape:
        return place.cell("fail", f"shape {tuple(ours.shape)} where {tuple(wanted.shape)} is expected")
    if ours.numel() == 0:
        return place.cell("missing", "holds no rows")
    if is_integer_stage(place.stage):
        return _judge_integers(place, ours, wanted)
    if not (bool(ours.isfinite().all()) and bool(wanted.isfinite().all())):
        return place.cell("fail", "holds NaN or infinity", {"max_abs": math.inf, "ratio": math.inf})
    tolerance = allowed * stage_tolerance(truth, reference_error, dtype)
    values = error_values(ours, wanted, is_logits=place.stage.endswith(".head"))
    largest = values["max_abs"] or 0.0
    values |= {"reference_max_abs": reference_error, "tolerance": tolerance, "ratio": _ratio(largest, tolerance)}
    if largest <= tolerance:
        return place.cell("pass", "", values)
    return place.cell("fail", f"largest error {largest:.3g} over the tolerance {tolerance:.3g}", values)


def _judge_integers(place: Place, ours: Tensor, wanted: Tensor) -> StageCell:
    differing = (ours.long() != wanted.long()).flatten().nonzero().flatten().tolist()
    wrong = float(bool(differing))
    values: dict[str, float | None] = {"max_abs": wrong, "tolerance": 0.0, "ratio": _ratio(wrong, 0.0)}
    if not differing:
        return place.cell("pass", "", values)
    first = differing[0]
    got, want = int(ours.flatten()[first]), int(wanted.flatten()[first])
    reason = f"{len(differing)} of {ours.numel()} entries differ, entry {first} is {got} where {want} is expected"
    return place.cell("fail", reason, values)


def _ratio(error: float, tolerance: float) -> float:
    if tolerance > 0:
        return error / tolerance
    return math.inf if error else 0.0


def error_values(ours: Tensor, wanted: Tensor, *, is_logits: bool) -> dict[str, float | None]:
    """Differences of two tensors of one shape `[T, ...]`, taken in fp64; for logits also overlaps of the largest."""
    a, b = ours.double(), wanted.double()
    difference = (a - b).abs()
    norms = float(a.norm() * b.norm())
    norm = float(b.norm())
    values: dict[str, float | None] = {
        "max_abs": float(difference.max()),
        "mean_abs": float(difference.mean()),
        "cosine": float((a * b).sum()) / norms if norms else float(torch.equal(a, b)),
        "relative": float((a - b).norm()) / norm if norm else float((a - b).norm()),
    }
    if is_logits:
        k = min(TOP_K, a.shape[-1])
        top_a, top_b = a.topk(k, dim=-1).indices, b.topk(k, dim=-1).indices
        shared = (top_a[:, :, None] == top_b[:, None, :]).any(dim=-1).double().mean()
        values |= {
            "top_k_overlap": float(shared),
            "argmax_agreement": float((a.argmax(-1) == b.argmax(-1)).double().mean()),
        }
    return values
