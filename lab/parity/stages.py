"""Stage parity: every stage of one recorded run against Hugging Face, and the first that goes wrong.

Runs along the same tokens are compared: ours at the dtype under test; plain torch (Hugging Face) at that dtype, in two
summation orders of its attention; and the truth, Hugging Face one precision up with the same rounded weights.
Source: docs/requirements.md R-138..R-140; `lab.parity.tolerance` for the 2x rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from eagle3core.config import TargetFormat
from lab.errors import ExperimentError
from lab.parity.judge import Place, StageCell, Triple, judge_stage
from lab.parity.names import is_integer_stage, split_name
from lab.parity.recording import CHUNK, SLOTS, PairUnderTest, Recording, record
from lab.parity.replay import Reference, Replay
from lab.parity.repro import Evidence, RunAgain, evidence_of
from lab.parity.tolerance import FACTOR, PlainErrors, plain_errors


class Sides(NamedTuple):
    """One prompt's stages, by recorded name."""

    ours: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]


@dataclass(frozen=True)
class StageReport:
    """Every cell of a run, prompt by prompt in execution order.

    Attributes:
        cells, dtype, reference: what was compared, in what, and with whom.
        evidence: tensors of the stages that failed first. again: how to run them, where this module ran the engine.
        sides: what every prompt's stages gave, and what they were compared with, by recorded name.
    """

    cells: list[StageCell]
    dtype: str
    reference: str
    evidence: tuple[Evidence, ...] = field(default=(), repr=False)
    again: RunAgain | None = field(default=None, repr=False)
    sides: tuple[Sides, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Whether something was compared and every stage passed."""
        return bool(self.cells) and all(cell.status == "pass" for cell in self.cells)

    @property
    def first_divergent(self) -> StageCell | None:
        """The first stage, in execution order of the first prompt that has one, that did not pass."""
        return next((cell for cell in self.cells if cell.status != "pass"), None)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.cells:
            return "Nothing was compared, so nothing passed."
        bad = sum(cell.status != "pass" for cell in self.cells)
        first = self.first_divergent
        if first is None:
            return f"All {len(self.cells)} stages agree with {self.reference} in {self.dtype}."
        where = f"{first.stage} in {first.pass_name or 'the run'} of prompt {first.prompt}"
        return f"{bad} of {len(self.cells)} stages disagree in {self.dtype}; the first is {where}: {first.reason}."

    def cells_table(self) -> pd.DataFrame:
        """One row a cell."""
        return pd.DataFrame([asdict(cell) for cell in self.cells])

    def table(self) -> pd.DataFrame:
        """One row a stage and kind of pass, in execution order: the worst over prompts and steps.

        Every column is the worst for itself, but for an error and its tolerance: they are of the largest ratio's cell.

        Columns: kind, stage, cells, status, bad_cells (that did not pass), first_bad (place of the first of them
        in the run, so that the smallest is of the stage that `first_divergent` names; NaN without one), max_abs,
        mean_abs, cosine, relative, reference_max_abs, tolerance, ratio, top_k_overlap, argmax_agreement.
        """
        cells = self.cells_table()
        is_bad = cells["status"] != "pass"
        cells["bad_cells"], cells["first_bad"] = is_bad, cells.index.to_series().astype(float).where(is_bad)
        cells["bad"] = cells["status"].map({"pass": 0, "fail": 1, "missing": 2})
        grouped = cells.groupby(["kind", "stage"], sort=False)
        worst = {"max_abs": "max", "mean_abs": "max", "cosine": "min", "relative": "max", "ratio": "max"}
        others = {"reference_max_abs": "max", "tolerance": "min", "top_k_overlap": "min", "argmax_agreement": "min"}
        counts = {"bad_cells": "sum", "first_bad": "min"}
        table = grouped.agg({"order": "min", "prompt": "size", "bad": "max", **counts, **worst, **others})
        # An error stands beside the tolerance it was judged by: both are of the cell with the least room.
        judged = cells[cells["ratio"].notna()]
        least_room = judged.loc[judged.groupby(["kind", "stage"])["ratio"].idxmax()].set_index(["kind", "stage"])
        table.update(least_room[["max_abs", "reference_max_abs", "tolerance"]])
        table = table.reset_index().rename(columns={"prompt": "cells"}).sort_values("order", kind="stable")
        table.insert(3, "status", table.pop("bad").map({0: "pass", 1: "fail", 2: "missing"}))
        return table.drop(columns="order").reset_index(drop=True)


def run_stage_parity(
    target_dir: str | Path,
    draft_dir: str | Path,
    *,
    prompts: Sequence[Sequence[int]],
    dtype: str = "float32",
    device: str = "auto",
    k: int = 3,
    steps: int = 3,
    slots: int = SLOTS,
    prefill_chunk: int = CHUNK,
    reference: str | Path | None = None,
    stages: Sequence[str] | None = None,
    fault: str | None = None,
    capture_layers: tuple[int, ...] | None = None,
    capture_convention: str | None = None,
    norm_output: str = "",
    target_weights: TargetFormat = "as_stored",
) -> StageReport:
    """Run the engine on `prompts`, and compare what every stage gave with Hugging Face.

    Args:
        target_dir, draft_dir: checkpoint directories.
        prompts: token ids, at least two a prompt.
        dtype: "float32", "bfloat16", "float16" or "float64".
        device: "auto", "cpu" or "cuda".
        k: drafts a step.
        steps: speculative steps to compare, of every prompt.
        slots: prompts decoded side by side; with more prompts than slots, a slot is filled again.
        prefill_chunk: tokens of one prefill pass, a multiple of 64.
        reference: a file of recorded tensors (docs/engine.md) that takes the place of the plain reference.
        stages: compare these stages only, e.g. ("draft.fc", "draft.head"); for recordings that hold no more.
        fault: name of a bug to plant in the engine (`lab.parity.faults`), to see it found.
        capture_layers, capture_convention: explicit tap ids.
        norm_output, target_weights: as of `PairUnderTest`.

    Raises:
        ExperimentError: an unusable prompt, dtype, fault or reference file, or stages that no pass has.
    """
    from lab.parity.taps import read_taps

    taps = (capture_layers, capture_convention)
    pair = PairUnderTest(
        Path(target_dir), Path(draft_dir), dtype, device, *taps, fault=fault or "", norm_output=norm_output,
        target_weights=target_weights,
    )  # fmt: skip
    # Without a file of every token's states, what ships is compared: a prompt's last layer of its last token alone.
    how: dict[str, Any] = {"k": k, "steps": steps, "slots": slots, "prefill_chunk": prefill_chunk,
                           "last_states": reference is not None}  # fmt: skip
    ours = record(pair, prompts, **how)
    recorded = read_taps(reference, prompts, k=k, steps=steps) if reference else None
    report = report_of(pair, ours, prompts, recorded, stages=stages)
    return replace(report, again=RunAgain(pair, prompts, how))


def report_of(
    pair: PairUnderTest,
    ours: Sequence[Recording],
    prompts: Sequence[Sequence[int]],
    recorded: Sequence[dict[str, Tensor]] | None = None,
    *,
    stages: Sequence[str] | None = None,
) -> StageReport:
    """Recordings held against Hugging Face along the same tokens, or against `recorded` tensors.

    Args as `run_stage_parity`; `ours` may be of any engine that runs `pair`.

    Raises:
        ExperimentError: none of `stages` is a stage of any pass.
    """
    plain = replay_all(pair, ours, prompts, pair.torch_dtype)
    if pair.dtype == "float64":  # there is no higher precision to compare with, and the plain reference is exact
        truth, errors = plain, PlainErrors({}, {})
    else:
        truth = replay_all(pair, ours, prompts, pair.truth_dtype)
        reordered = replay_all(pair, ours, prompts, pair.torch_dtype, attention="sdpa")
        errors = plain_errors([*plain, *reordered], [*truth, *truth])
    compared = compare(ours, plain, truth, recorded, errors, dtype=pair.torch_dtype, stages=stages)
    if stages is not None and not compared:
        recordings = [*(one.tensors for one in ours), *(one.tensors for one in plain)]
        known = dict.fromkeys(split_name(name)[-1] for tensors in recordings for name in tensors)
        raise ExperimentError(
            f"no pass has a stage {' or '.join(map(repr, stages)) or 'of no name'}", ", ".join(known),
            "correct the names of stages, or leave them out to compare all",
        )  # fmt: skip
    name = "the recorded reference" if recorded else "Hugging Face"
    expected = recorded or [one.tensors for one in truth]
    evidence = evidence_of(compared, [one.tensors for one in ours], expected)
    sides = tuple(Sides(one.tensors, wanted) for one, wanted in zip(ours, expected, strict=True))
    return StageReport(compared, pair.dtype, name, evidence, sides=sides)


def replay_all(
    pair: PairUnderTest,
    recordings: Sequence[Recording],
    prompts: Sequence[Sequence[int]],
    compute_dtype: torch.dtype,
    attention: str = "eager",
) -> list[Replay]:
    """The reference at one compute dtype along every recording; the models are gone when it returns."""
    reference = Reference(pair, compute_dtype, attention)
    return [reference.replay(recording, prompt) for recording, prompt in zip(recordings, prompts, strict=True)]


def compare(
    ours: Sequence[Recording],
    plain: Sequence[Replay],
    truth: Sequence[Replay],
    recorded: Sequence[dict[str, Tensor]] | None,
    errors: PlainErrors,
    *,
    dtype: torch.dtype,
    stages: Sequence[str] | None = None,
) -> list[StageCell]:
    """Cells of every prompt, in execution order.

    Args:
        ours, plain, truth: the engine, plain torch and the truth, a prompt each.
        recorded: what to compare with in place of the truth, or None.
        errors: of plain torch.
        dtype: under test.
        stages: compare these only, or None for all.
    """
    cells = []
    for i, (recording, replay, exact) in enumerate(zip(ours, plain, (one.tensors for one in truth), strict=True)):
        names = [*replay.tensors, *(name for name in recording.tensors if name not in replay.tensors)]
        because = f", which ends early: {replay.stopped}" if replay.stopped else ""
        for order, name in enumerate(names):
            place = Place(i, *split_name(name), order)
            if stages is not None and place.stage not in stages:
                continue
            wanted = (exact if recorded is None else recorded[i]).get(name)
            sides = {"the engine": recording.tensors.get(name), f"the reference{because}": wanted}
            sides[f"the truth{because}"] = exact.get(name)
            absent = [side for side, tensor in sides.items() if tensor is None]
            if absent:
                cells.append(place.cell("missing", f"not recorded by {absent[0]}"))
                continue
            triple = Triple(*(tensor for tensor in sides.values() if tensor is not None))
            error = 0.0 if is_integer_stage(place.stage) else errors.at(place.kind, place.stage, triple.truth)
            allowed = FACTOR if recorded is not None else 1.0  # two systems may each be off by their own allowance
            cells.append(judge_stage(place, triple, error, dtype, allowed))
    return cells
