"""The states between the target's layers along given tokens: ours, and Hugging Face's for the tolerance.

A boundary is the residual stream that a layer reads: number 0 is the embedding, number i what layer i - 1 leaves, and
number n, of a target of n layers, what the final norm reads. `NORMED` is what that norm gives.
Source: docs/checkpoints.md, which layers the draft reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.errors import ExperimentError
from lab.parity.hf_target import TargetReference
from lab.parity.recording import PairUnderTest, record
from lab.parity.replay import Replay
from lab.parity.tolerance import PlainErrors, plain_errors

PASS, NORMED = "prefill", "target.norm"
# How the engine is recorded: its prefill is all that is needed, and all of that.
RECORDED: dict[str, Any] = {"k": 0, "steps": 1, "last_states": True}


@dataclass(frozen=True)
class Boundaries:
    """Boundaries along every sequence.

    Attributes:
        ours, truth: a dictionary a sequence, of [T, E] by stage name, in order.
        errors: largest errors of plain torch. relative: its l2 errors over the l2 norm of the truth, by stage.
    """

    ours: list[dict[str, Tensor]]
    truth: list[dict[str, Tensor]]
    errors: PlainErrors
    relative: dict[str, float]


def stage_of(boundary: int) -> str:
    """The stage that gives a boundary."""
    return f"target.{boundary - 1}.mlp" if boundary else "target.embed"


def words_of(stage: str) -> str:
    """A stage in words: "boundary 3 (output of layer 2)"."""
    if stage == NORMED:
        return "the final norm's output"
    if stage == stage_of(0):
        return "boundary 0 (the embedding)"
    layer = int(stage.split(".")[1])
    return f"boundary {layer + 1} (output of layer {layer})"


def boundaries_along(pair: PairUnderTest, sequences: Sequence[Sequence[int]]) -> Boundaries:
    """Teacher-forced states of the engine and of the references.

    Raises:
        ExperimentError: an id that the target has not, or a sequence of fewer than two tokens.
    """
    plain = _reference(pair, pair.torch_dtype, "eager")
    _check_ids(sequences, plain.vocab_size)
    stages = [*map(stage_of, range(plain.n_layers + 1)), NORMED]
    runs = [_stages(plain, tokens, stages) for tokens in sequences]
    truth, again = runs, runs
    if pair.dtype != "float64":
        exact = _reference(pair, pair.truth_dtype, "eager")
        truth = [_stages(exact, tokens, stages) for tokens in sequences]
        reordered = _reference(pair, pair.torch_dtype, "sdpa")
        again = [_stages(reordered, tokens, stages) for tokens in sequences]
    both = [*runs, *again], [*truth, *truth]
    errors = plain_errors(*map(_replays, both))
    relative = {stage: max(map(relative_error, *([run[stage] for run in side] for side in both))) for stage in stages}
    ours = [_engine_stages(one.tensors, stages, plain) for one in record(pair, sequences, **RECORDED)]
    return Boundaries(ours, truth, errors, relative)


def relative_error(values: Tensor, wanted: Tensor) -> float:
    """The l2 norm of the difference over that of `wanted`, all rows and columns together."""
    length = wanted.double().norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float((values.double() - wanted.double()).norm() / length)


def _reference(pair: PairUnderTest, compute_dtype: torch.dtype, attention: str) -> TargetReference:
    return TargetReference(
        pair.target,
        dtype=pair.torch_dtype,
        compute_dtype=compute_dtype,
        device=pair.torch_device,
        attention=attention,
    )


def _check_ids(sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
    wrong = [token for tokens in sequences for token in tokens if not 0 <= token < vocab_size]
    if wrong:
        raise ExperimentError(
            f"the dumps hold token id {wrong[0]}", f"ids 0..{vocab_size - 1} of this target", "name the dump's target"
        )


def _stages(reference: TargetReference, tokens: Sequence[int], stages: Sequence[str]) -> dict[str, Tensor]:
    seen = reference.run(tokens)
    return {stage: seen[stage.removeprefix("target.")].cpu() for stage in stages}


def _replays(runs: Sequence[dict[str, Tensor]]) -> list[Replay]:
    return [Replay({f"{PASS}/{stage}": value for stage, value in run.items()}) for run in runs]


@torch.no_grad()
def _engine_stages(tensors: dict[str, Tensor], stages: Sequence[str], reference: TargetReference) -> dict[str, Tensor]:
    """What the engine recorded; of its last stream the norm, which it makes for the sampled token alone."""
    kept = {stage: tensors[f"{PASS}/{stage}"] for stage in stages if stage != NORMED}
    last = kept[stage_of(reference.n_layers)].to(reference.device, reference.dtype)
    return {**kept, NORMED: reference.model.model.norm(last).cpu()}
