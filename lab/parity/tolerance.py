"""How far from the truth a stage may be.

The 2x rule: our largest error may be twice that of plain torch at the same dtype, plus twice the rounding that one
addition costs there, (truth + 0.3) - 0.3. An fp64 run has no higher truth to compare with, so its allowance is a bound.

A stage of one row is one draw of plain torch's error, and may be a lucky one. So the error of plain torch is the larger
of what it showed in that kind of pass and what it showed, relative to the largest value of a row, in any pass.
Source: the test practice of FlashAttention (arXiv 2205.14135 and successors); docs/requirements.md R-138, R-139; the
pooling is derived here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.parity.names import is_integer_stage, kind_of, split_name
from lab.parity.replay import Replay

FACTOR = 2.0
PROBE = 0.3
# Roundings that an fp64 stage may have piled up: a few thousand terms a dot product, a dozen layers, each 2**-53 at
# worst and mostly cancelling. Any real fault is larger than this by many orders of magnitude.
FLOAT64_ROUNDINGS = 8192


@dataclass(frozen=True)
class PlainErrors:
    """Errors of plain torch, over all prompts and steps of a run.

    Attributes:
        absolute: largest error by (kind of pass, stage).
        relative: largest error of a row over the row's largest value, by stage, over all kinds of pass.
    """

    absolute: dict[tuple[str, str], float]
    relative: dict[str, float]

    def at(self, kind: str, stage: str, truth: Tensor) -> float:
        """The error that plain torch makes at a stage whose truth is `truth: [T, ...]`."""
        scale = float(truth.abs().max()) if truth.numel() else 0.0
        return max(self.absolute.get((kind, stage), 0.0), self.relative.get(stage, 0.0) * scale)


def plain_errors(plain: Sequence[Replay], truth: Sequence[Replay]) -> PlainErrors:
    """What the plain reference got wrong, prompt by prompt, against the truth."""
    absolute: dict[tuple[str, str], float] = defaultdict(float)
    relative: dict[str, float] = defaultdict(float)
    for kind, stage, ours, exact, is_recorded in _pairs(plain, truth):
        error = (ours.double() - exact.double()).abs().flatten(1).amax(dim=1)
        scale = exact.double().abs().flatten(1).amax(dim=1)
        if is_recorded:
            absolute[kind, stage] = max(absolute[kind, stage], float(error.max()))
        relative[stage] = max(relative[stage], float((error / scale.clamp_min(torch.finfo(torch.float32).tiny)).max()))
    return PlainErrors(dict(absolute), dict(relative))


def _pairs(plain: Sequence[Replay], truth: Sequence[Replay]) -> Iterator[tuple[str, str, Tensor, Tensor, bool]]:
    """Kind, stage, plain and true tensor of every stage that holds numbers, and whether the engine records it."""
    for reference, exact in zip(plain, truth, strict=True):
        for mine, its in ((reference.tensors, exact.tensors), (reference.unrecorded, exact.unrecorded)):
            for name, value in mine.items():
                pass_name, stage = split_name(name)
                if not is_integer_stage(stage) and value.numel() and name in its:
                    yield kind_of(pass_name), stage, value, its[name], mine is reference.tensors


def rounding_allowance(truth: Tensor, dtype: torch.dtype) -> float:
    """Largest |((truth + 0.3) - 0.3 computed in dtype) - truth|; `truth` is any wider tensor."""
    if truth.numel() == 0:
        return 0.0
    rounded = (truth.to(dtype) + PROBE) - PROBE
    return float((rounded.double() - truth.double()).abs().max())


def stage_tolerance(truth: Tensor, reference_error: float, dtype: torch.dtype) -> float:
    """Largest absolute error a stage may show at `dtype`.

    Args:
        truth: the stage one precision up.
        reference_error: largest error of plain torch at `dtype` for this stage.
    """
    if dtype == torch.float64:
        scale = float(truth.abs().max()) if truth.numel() else 0.0
        return FLOAT64_ROUNDINGS * 2.0**-53 * max(1.0, scale)
    return FACTOR * reference_error + FACTOR * rounding_allowance(truth, dtype)
