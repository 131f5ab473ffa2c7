"""The verdict on dumped states: every layer judged by the 2x rule, the first that diverges named, and what it may be.

Two systems may each be off by their own allowance, so a layer passes within twice the tolerance of a stage. One large
error decides that; noise over all of a layer is smaller than it and is held to the same rule by its l2 norm.
Source: docs/metrics.md, parity; docs/checkpoints.md, which layers the draft reads; docs/requirements.md R-138, R-139.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lab.errors import ExperimentError
from lab.parity.dumped.boundaries import NORMED, PASS, Boundaries, relative_error, stage_of, words_of
from lab.parity.dumped.files import Dump, State
from lab.parity.dumped.fit import Fit, fits, relation, rotated_from
from lab.parity.judge import Place, StageCell, Triple, judge_stage
from lab.parity.recording import DTYPES
from lab.parity.repro import MOST_STAGES, Evidence
from lab.parity.tolerance import FACTOR

WORDS = {
    "noise": "it is ours with noise of {share}, as quantised weights or an 8-bit cache leave",
    "scaled": "it is ours times a factor",
    "rotated": "it is a rotation of ours: tokens keep their lengths and angles, as in QuaRot and SpinQuant",
    "other": "no state of ours is near it: other weights, other tokens, or a fault",
}


@dataclass(frozen=True)
class DumpCell:
    """One dumped layer.

    Attributes:
        dump, state: the file and the tensor's part. claimed: the stage it is said to be; "" where nobody says.
        judged: as `claimed`, or as the stage that fits best, against which everything here is measured.
        best: the stage that fits best. kind: "agrees", "other layer", "noise", "scaled", "rotated" or "other".
        relative: l2 error over the l2 norm of ours. best_relative: the same to `best`.
        relative_allowed: the largest `relative` that passes.
    """

    dump: str
    state: str
    claimed: str
    judged: StageCell
    best: str
    kind: str
    reason: str
    relative: float
    best_relative: float
    relative_allowed: float

    @property
    def passed(self) -> bool:
        """Whether it agrees with the stage it was judged as."""
        return self.judged.status == "pass"

    def row_values(self) -> dict[str, Any]:
        """What is stored of it."""
        values = asdict(self)
        judged = values.pop("judged")
        kept = ("stage", "status", "max_abs", "mean_abs", "cosine", "tolerance", "ratio")
        return {**values, **{name: judged[name] for name in kept}}


@dataclass(frozen=True)
class DumpReport:
    """Every layer of every dump, in order of the target's layers.

    Attributes:
        evidence: tensors of the first layer that diverges, of some dumps.
    """

    cells: list[DumpCell]
    dtype: str
    evidence: tuple[Evidence, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Whether something was compared and every layer agrees."""
        return bool(self.cells) and all(cell.passed for cell in self.cells)

    @property
    def first_divergent(self) -> DumpCell | None:
        """The first layer of the target at which a dump diverges."""
        return next((cell for cell in self.cells if not cell.passed), None)

    @property
    def verdict(self) -> str:
        """One sentence, and a second where all layers say the same."""
        n, first = len(self.cells), self.first_divergent
        if first is None:
            return f"All {n} dumped layers agree with this engine in {self.dtype}." if n else "Nothing was compared."
        bad = [cell for cell in self.cells if not cell.passed]
        place = f"{words_of(first.judged.stage)}, {first.state} of {first.dump}"
        sentence = f"{len(bad)} of {n} dumped layers diverge in {self.dtype}; the first is {place}: {first.reason}."
        shifts = {_order(cell.best) - _order(cell.claimed) for cell in bad if cell.kind == "other layer"}
        n_moved = sum(cell.kind == "other layer" and NORMED not in (cell.best, cell.claimed) for cell in bad)
        if n_moved == len(bad) and len(shifts) == 1:
            by = next(iter(shifts))
            sentence += f" Every one is {abs(by)} {'later' if by > 0 else 'earlier'} than named: read the ids as "
            sentence += "outputs." if by == 1 else "inputs." if by == -1 else "others."
        return sentence


def claims_of(dump: Dump, taps: Sequence[int] | None, n_layers: int) -> list[str]:
    """The stage that each state of a dump is said to be; "" where nobody says.

    Args:
        taps: boundaries that were dumped, or None for those of the form: SpecForge and speculators have defaults.

    Raises:
        ExperimentError: another number of layers than were dumped, or a layer that the target has not.
    """
    plain = [state for state in dump.states if not state.is_normed]
    if taps is None and dump.form != "vLLM" and n_layers >= 7 and len(plain) in (3, 4):
        taps = (2, n_layers // 2, n_layers - 3)
    if taps is None:
        return [NORMED if state.is_normed else "" for state in dump.states]
    named = [*taps, *([n_layers] if len(plain) == len(taps) + 1 else [])]
    if len(named) != len(plain) or not all(0 <= boundary <= n_layers for boundary in named):
        raise ExperimentError(
            f"{dump.name} holds {len(plain)} layers, and {list(named)} are named",
            f"one id of 0..{n_layers} a layer, or one fewer where the last is what the final norm reads",
            "name them with --capture-layers and --capture-convention",
        )
    boundaries = iter(named)
    return [NORMED if state.is_normed else stage_of(next(boundaries)) for state in dump.states]


def report_of(dumps: Sequence[Dump], claims: Sequence[Sequence[str]], found: Boundaries, dtype: str) -> DumpReport:
    """The dumps judged; `claims` as `claims_of` gives them, a list a dump."""
    cells = []
    for i, (dump, named) in enumerate(zip(dumps, claims, strict=True)):
        side = _Side(i, found, dtype)
        cells += [_cell(side, dump, state, claim) for state, claim in zip(dump.states, named, strict=True)]
    cells.sort(key=lambda cell: (_order(cell.judged.stage), cell.judged.prompt))
    return DumpReport(cells, dtype, tuple(_evidence(cells, dumps, found))[:MOST_STAGES])


def _evidence(cells: Sequence[DumpCell], dumps: Sequence[Dump], found: Boundaries) -> Iterator[Evidence]:
    """The first layer of each dump that diverges; the engine itself makes the final norm of one row only."""
    for i, dump in enumerate(dumps):
        own = [cell for cell in cells if cell.judged.prompt == i and not cell.passed and cell.judged.stage != NORMED]
        if own:
            judged = own[0].judged
            values = next(state.values for state in dump.states if state.name == own[0].state)[: len(dump.tokens)]
            is_by_norm = own[0].relative > own[0].relative_allowed
            relative = own[0].relative_allowed if is_by_norm else None
            yield Evidence(judged, found.ours[i][judged.stage], values, {}, relative)


def _order(stage: str) -> int:
    if stage == NORMED:
        return 1_000_000
    return int(stage.split(".")[1]) + 1 if stage.endswith(".mlp") else 0


@dataclass(frozen=True)
class _Side:
    """Our side of one dump."""

    index: int
    found: Boundaries
    dtype: str

    @property
    def ours(self) -> dict[str, Tensor]:
        return self.found.ours[self.index]

    def relative_allowed(self, stage: str) -> float:
        """Twice, for two systems, what the 2x rule allows: plain torch's error and one rounding."""
        rounding = torch.finfo(DTYPES[self.dtype]).eps / 4  # in l2, of values spread evenly over a power of two
        return FACTOR * FACTOR * (self.found.relative[stage] + rounding)

    def judged(self, values: Tensor, stage: str) -> StageCell:
        """`values` judged as `stage`, by their largest error and by their l2 norm."""
        truth = self.found.truth[self.index][stage]
        place = Place(self.index, PASS, stage, _order(stage))
        error = self.found.errors.at(PASS, stage, truth)
        cell = judge_stage(place, Triple(values, self.ours[stage], truth), error, DTYPES[self.dtype], FACTOR)
        relative, allowed = relative_error(values, self.ours[stage]), self.relative_allowed(stage)
        if cell.status != "pass" or relative <= allowed:
            return cell
        return replace(cell, status="fail", reason=f"relative error {relative:.3g} over the {allowed:.3g} allowed")


def _cell(side: _Side, dump: Dump, state: State, claimed: str) -> DumpCell:
    values = state.values[: len(dump.tokens)]
    ranked = fits(values, side.ours)
    rotated = rotated_from(values, side.ours)
    stage = claimed or rotated or ranked[0].stage
    judged = side.judged(values, stage)
    fit = next(one for one in ranked if one.stage == stage)
    kind, reason = "agrees", ""
    if judged.status != "pass":
        kind = _kind(side, values, fit, ranked[0], rotated)
        other = f"named {words_of(stage)}, it is {words_of(ranked[0].stage)}"
        words = other if kind == "other layer" else WORDS[kind].format(share=f"{fit.relative:.1%}")
        reason = f"{judged.reason}; {words}"
    best, allowed = ranked[0], side.relative_allowed(stage)
    return DumpCell(
        dump.name, state.name, claimed, judged, best.stage, kind, reason, fit.relative, best.relative, allowed
    )


def _kind(side: _Side, values: Tensor, fit: Fit, best: Fit, rotated: str | None) -> str:
    """What a state that does not agree as `fit.stage` is."""
    if best.stage != fit.stage and 2 * best.relative < fit.relative:
        is_other = side.judged(values, best.stage).status == "pass"
        if is_other or relation(values, side.ours[best.stage]) == "noise":
            return "other layer"
    return "rotated" if rotated == fit.stage else relation(values, side.ours[fit.stage])
