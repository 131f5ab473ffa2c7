"""Which of our states a dumped one is, and what lies between the two when it is none.

Errors are relative: the l2 norm of the difference over that of ours, all tokens and columns together. A rotation that
is the same for every token leaves the angles between tokens as they are, so it shows in them. Source: derived here;
rotated streams are those of QuaRot (arXiv 2404.00456) and SpinQuant (arXiv 2405.16406).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.parity.dumped.boundaries import relative_error

NOISE_RELATIVE, NOISE_COSINE = 0.25, 0.97  # the residual streams of 8-bit and 4-bit weights lie below and above
SCALE_APART = 0.03  # from 1, beyond which a factor is one
ROTATED_APART = 0.1  # of the angles between tokens, and of the lengths, of a rotated stream
ROTATED_COSINE = 0.5  # of the two as they are, which a rotation of the whole space leaves near 0
LEAST_TOKENS = 4  # of which angles say anything


@dataclass(frozen=True)
class Fit:
    """How a dumped state lies to one of ours.

    Attributes:
        stage: which of ours. relative: error over ours. cosine: of both as flat vectors.
    """

    stage: str
    relative: float
    cosine: float


def fits(values: Tensor, ours: Mapping[str, Tensor]) -> list[Fit]:
    """Fits of `values: [T, E]` to every boundary, the best first."""
    theirs = values.double()
    found = []
    for stage, tensor in ours.items():
        mine = tensor.double()
        relative = relative_error(theirs, mine)
        cosine = float(torch.nn.functional.cosine_similarity(theirs.flatten(), mine.flatten(), dim=0))
        found.append(Fit(stage, relative, cosine))
    return sorted(found, key=lambda fit: fit.relative if fit.relative == fit.relative else float("inf"))


def relation(values: Tensor, ours: Tensor) -> str:
    """What a state that does not agree is to ours: "scaled", "noise" or "other"."""
    theirs, mine = values.double(), ours.double()
    factor = float((theirs * mine).sum() / (mine * mine).sum())
    left = relative_error(theirs, factor * mine)
    relative = relative_error(theirs, mine)
    cosine = float(torch.nn.functional.cosine_similarity(theirs.flatten(), mine.flatten(), dim=0))
    if abs(factor - 1) > SCALE_APART and left < min(NOISE_RELATIVE, 0.5 * relative):
        return "scaled"
    return "noise" if relative <= NOISE_RELATIVE and cosine >= NOISE_COSINE else "other"


def rotated_from(values: Tensor, ours: Mapping[str, Tensor]) -> str | None:
    """The stage of ours of which `values: [T, E]` are a rotation, by lengths and angles; None for none."""
    theirs = values.double()
    if len(theirs) < LEAST_TOKENS or not bool(theirs.isfinite().all()):
        return None
    apart = {stage: _angles_apart(theirs, mine.double()) for stage, mine in ours.items()}
    nearest = min(apart, key=lambda stage: apart[stage])
    # A stream that is nearly the same in the same directions is another layer's, or a damaged one, and not rotated.
    cosine = torch.nn.functional.cosine_similarity(theirs.flatten(), ours[nearest].double().flatten(), dim=0)
    return nearest if apart[nearest] <= ROTATED_APART and abs(float(cosine)) <= ROTATED_COSINE else None


def _angles_apart(theirs: Tensor, mine: Tensor) -> float:
    """How far lengths and angles of tokens differ, as a share; 0 for a rotation of the whole space."""
    lengths = theirs.norm(dim=1), mine.norm(dim=1)
    if float(lengths[0].min()) == 0 or float(lengths[1].min()) == 0:
        return float("inf")
    by_length = float(((lengths[0] - lengths[1]) / lengths[1]).abs().max())
    angles = [side @ side.T for side in (theirs / lengths[0][:, None], mine / lengths[1][:, None])]
    between = ~torch.eye(len(mine), dtype=torch.bool)
    apart = (angles[0] - angles[1])[between].square().mean().sqrt()
    return max(by_length, float(apart / angles[1][between].square().mean().sqrt().clamp_min(1e-9)))
