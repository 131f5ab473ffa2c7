"""Parity of the kernels' path with Hugging Face, stage by stage, by the 2x rule of `lab.parity`.

The engine runs the kernels stage by stage and its tensors are put under the names of docs/engine.md; what a name means
on this path where it differs (`lab.parity.derived.DERIVED`) is asked of the reference as well, so equals are compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.pairs.planted import PlantedGeometry, PlantedPair
from lab.pairs.planted.disk import write_pair
from lab.pairs.planted.weights import PlantedWeights
from lab.parity.derived import DERIVED
from lab.parity.recording import PairUnderTest, record_from
from lab.parity.stages import StageReport, report_of
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.subject import Setting, Subject

PART = "parity"
LAYERS = 2  # of the wide random target: its widths are what a stage's error depends on
TARGET_STAGES = ("embed", "attn", "mlp", "taps", "norm", "head")
DRAFT_STAGES = (
    "tokens", "positions", "taps", "feedback_in", "fc", "concat", "qkv", "rope", "attn", "mlp", "feedback", "norm",
    "head",
)  # fmt: skip
OTHER_STAGES = ("prompt_ids", "first_token", "tree.tokens", "tree.parents", "accept.tokens")
STAGES = (
    *(f"target.{stage}" for stage in TARGET_STAGES), *(f"draft.{stage}" for stage in DRAFT_STAGES), *OTHER_STAGES
)  # fmt: skip


@dataclass(frozen=True)
class ParityPlan:
    """What is compared: drafts a step, steps, prompts of a session."""

    k: int = 3
    steps: int = 3

    def setting(self, longest: int) -> Setting:
        """The engine that prompts of at most `longest` tokens need."""
        return Setting(self.k, 1, longest + (self.steps + 2) * (self.k + 1) + 8)


class KernelParity:
    """Checks of one pair: one a stage.

    Args:
        pair: the checkpoints that Hugging Face reads.
        subject: the same pair, packed.
    """

    def __init__(
        self, pair: PairUnderTest, subject: Subject, prompts: Sequence[Sequence[int]], plan: ParityPlan
    ) -> None:
        self.pair, self.subject, self.prompts, self.plan = pair, subject, [list(p) for p in prompts], plan
        self._report: StageReport | None = None

    def checks(self) -> list[Check]:
        """One for each stage there is; a stage that nothing was compared for is missing."""
        shared = {"pair": self.subject.name, "spec_k": self.plan.k, "n_prompts": len(self.prompts)}
        return [
            Check(PART, f"{self.subject.name} {stage}", {**shared, "stage": stage}, partial(self._judge, stage))
            for stage in STAGES
        ]

    @property
    def report(self) -> StageReport:
        """All cells, computed once."""
        if self._report is None:
            self._report = self._compared()
        return self._report

    def _compared(self) -> StageReport:
        engine = self.subject.engine(self.plan.setting(max(map(len, self.prompts))))
        ours = record_from(engine, self.prompts, k=self.plan.k, steps=self.plan.steps)
        del engine
        return report_of(self.pair, ours, self.prompts)

    def _judge(self, stage: str) -> Verdict:
        return judge_stage_of(self.report, stage)


def judge_stage_of(report: StageReport, stage: str) -> Verdict:
    """The verdict over all passes of one stage; of a target's layers, over all of them."""
    known_as = "draft.feedback" if stage == "draft.mlp" else stage
    head, _, part = known_as.partition(".")
    pattern = re.compile(rf"{head}\.(\d+\.)?{part}$" if part else rf"{head}$")
    cells = [cell for cell in report.cells if pattern.match(cell.stage)]
    compared = [cell for cell in cells if cell.status != "missing"]
    how = f"; {DERIVED[stage]}" if stage in DERIVED else ""
    if not compared:
        reasons = {cell.reason for cell in cells}
        return Verdict(None, f"no tensor of {stage} was compared {'; '.join(sorted(reasons))}".strip())
    kinds = list(dict.fromkeys(cell.kind for cell in compared))
    worst = max(compared, key=lambda cell: cell.ratio if cell.ratio is not None else float("inf"))
    bad = [cell for cell in cells if cell.status != "pass"]
    values = {
        "n_cells": len(cells), "kinds": kinds, "max_abs": worst.max_abs, "tolerance": worst.tolerance,
        "tolerance_ratio": worst.ratio, "n_bad": len(bad), "how": DERIVED.get(stage, "tapped"),
    }  # fmt: skip
    if bad:
        where = f"{bad[0].stage} in {bad[0].pass_name or 'the run'} of prompt {bad[0].prompt}"
        return Verdict(False, f"{len(bad)} of {len(cells)} differ, first {where}: {bad[0].reason}{how}", values)
    return Verdict(
        True, f"{len(cells)} in {', '.join(kinds)}, at most {worst.ratio or 0:.2f} of the tolerance{how}", values
    )


class RandomWeights(PlantedWeights):
    """Every matrix random, nothing planted: what a stage has to be right for is its arithmetic alone."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, its rows of length 1, a table's of length sqrt(E)."""
        shape = self.shapes[name]
        if name.endswith("embed_tokens.weight"):
            return self.table()
        return self._gain(name, shape) if len(shape) == 1 else self._normal(name, shape, shape[1] ** -0.5)


def wide_pair(folder: Path, geometry: PlantedGeometry, device: torch.device) -> PairUnderTest:
    """A pair of `LAYERS` random layers and a random draft of a geometry's widths, on disk for Hugging Face."""
    target = replace(geometry.target, n_layers=LAYERS)
    draft = replace(geometry.draft, taps=tuple(range(len(geometry.draft.taps))))
    made = PlantedPair(PlantedGeometry(f"{geometry.name} layers", target, draft), share=1.0, device=device)
    common: dict[str, Any] = {"seed": 4, "dtype": torch.bfloat16, "device": device}
    for side in ("target", "draft"):
        setattr(made, f"{side}_weights", RandomWeights(made.geometry, made.tokens, **common, side=side))
    on_disk = write_pair(folder, made)
    return PairUnderTest(on_disk.target, on_disk.draft, "bfloat16", device.type)
