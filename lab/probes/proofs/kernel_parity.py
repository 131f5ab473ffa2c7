"""Parity of the kernels' path with Hugging Face, stage by stage, by the 2x rule of `lab.parity`.

The engine runs the kernels stage by stage and its tensors are put under the names of docs/taps.md; what a name means on
this path where it differs (`kernel_taps.DERIVED`) is asked of the reference as well, so equals are compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lab.parity.recording import PairUnderTest, Recording, record_from, split_name
from lab.parity.replay import Replay
from lab.parity.stages import StageReport, compare, replay_all
from lab.parity.tolerance import plain_errors
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.kernel_taps import DERIVED, TappingReplayer
from lab.probes.proofs.subject import Setting, Subject

PART = "parity"
# Of a prompt the draft's keys and values are all that is needed, so the kernels compute nothing past them.
NOT_COMPUTED = ("prefill/draft.attn", "prefill/draft.mlp", "prefill/draft.feedback")
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
        setting = self.plan.setting(max(map(len, self.prompts)))
        engine = self.subject.engine(setting, through=TappingReplayer)
        recorded = record_from(engine, self.prompts, k=self.plan.k, steps=self.plan.steps)
        ours = [replace(one, tensors=self._named(one.tensors)) for one in recorded]
        del engine
        pair, dtype = self.pair, self.pair.torch_dtype
        plain, truth, reordered = (
            [as_kernels_have_it(one) for one in replay_all(pair, ours, self.prompts, *how)]
            for how in ((dtype,), (pair.truth_dtype,), (dtype, "sdpa"))
        )
        errors = plain_errors([*plain, *reordered], [*truth, *truth])
        ours = [replace(one, tensors=without_extras(one, exact)) for one, exact in zip(ours, truth, strict=True)]
        cells = compare(ours, plain, truth, None, errors, dtype=dtype)
        return StageReport(cells, pair.dtype, "Hugging Face")

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        target, draft = self.subject.target.geometry, self.subject.draft.geometry
        widths = {"target.head": target.vocab_size, "draft.head": draft.draft_vocab_size}
        return with_derived(tensors, draft.taps, widths)

    def _judge(self, stage: str) -> Verdict:
        return judge_stage_of(self.report, stage)


def with_derived(tensors: dict[str, Tensor], taps: Sequence[int], widths: dict[str, int]) -> dict[str, Tensor]:
    """A recording of the kernels under the names of docs/taps.md.

    Args:
        taps: layers whose input the draft reads. widths: columns of logits that are no padding.
    """
    named = {}
    for name, value in tensors.items():
        pass_name, stage = split_name(name)
        if stage in widths:
            value = value[:, : widths[stage]]
        if stage == "accept.tokens":
            value = value[value >= 0]
        named[name] = value
        if stage == "draft.fc" and "/chain" in pass_name:
            named[f"{pass_name}/draft.feedback_in"] = value
    for pass_name in dict.fromkeys(split_name(name)[0] for name in tensors):
        streams = [f"{pass_name}/target." + (f"{layer - 1}.mlp" if layer else "embed") for layer in taps]
        if all(stream in tensors for stream in streams):
            named[f"{pass_name}/target.taps"] = torch.cat([tensors[stream] for stream in streams], dim=-1)
    return named


def as_kernels_have_it(replay: Replay) -> Replay:
    """The reference's tensors where this path has another one under the same name, or none."""
    tensors = {}
    for name, value in replay.tensors.items():
        pass_name, stage = split_name(name)
        if name in NOT_COMPUTED or stage == "draft.mlp":
            continue
        if stage == "draft.attn":
            value = replay.tensors[f"{pass_name}/draft.fc"] + value
        tensors[name] = value
    return replace(replay, tensors=tensors)


def without_extras(recording: Recording, exact: Replay) -> dict[str, Tensor]:
    """The recording without what the walk along it did not come to, such as a step begun after the last."""
    return {name: value for name, value in recording.tensors.items() if name in exact.tensors or exact.stopped}


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
