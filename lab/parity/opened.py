"""One stage opened: how large its errors are, where the largest lie, and which stages feed it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from lab.errors import ExperimentError
from lab.figures import Drawing, colour_of
from lab.parity.judge import StageCell
from lab.parity.names import is_integer_stage
from lab.parity.stages import StageReport
from lab.widgets import Control, Picker

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ELEMENTS = 12
BINS_A_DECADE, MOST_DECADES = 4, 9
# Of each stage of a draft, the stages of the same pass that it is computed from (docs/engine.md, "Stages").
FEEDS = {
    "draft.fc": ("draft.taps", "draft.feedback_in"), "draft.concat": ("draft.tokens", "draft.fc"),
    "draft.qkv": ("draft.concat",), "draft.rope": ("draft.qkv", "draft.positions"), "draft.attn": ("draft.rope",),
    "draft.feedback": ("draft.attn", "draft.mlp"), "draft.norm": ("draft.feedback",), "draft.head": ("draft.norm",),
    "target.head": ("target.norm",),
}  # fmt: skip


def stage_controls(report: StageReport) -> dict[str, Control]:
    """The stages that may be opened, in execution order; at first the first that failed, else that with least room."""
    cells = _worst_cells(report)
    if not cells:
        return {}
    first = report.first_divergent
    start = next((label for label, cell in cells.items() if first and _place(cell) == _place(first)), None)
    known = [label for label, cell in cells.items() if cell.ratio is not None]
    tightest = max(known or cells, key=lambda label: cells[label].ratio or 0.0)
    return {"stage": Picker("stage", tuple(cells), start or tightest)}


def open_stage(report: StageReport, *, stage: str) -> Drawing:
    """Errors of the worst prompt and step of a stage, as a histogram beside what is allowed; the largest as a table.

    Args:
        stage: one of `stage_controls`.

    Raises:
        ExperimentError: it is none of them.
    """
    from matplotlib import pyplot as plt

    cells = _worst_cells(report)
    if stage not in cells:
        raise ExperimentError(f"no stage {stage!r}", ", ".join(cells) or "nothing was compared", "choose one of these")
    cell = cells[stage]
    ours, expected = _sides(report, cell)
    fig, axes = plt.subplots()
    words = f"{_where(cell)}: {_verdict(cell)}"
    caption = f"{words} {_fed_words(report, cell)} The table holds the largest errors."
    if ours is None or expected is None or ours.shape != expected.shape or not ours.numel():
        axes.set_axis_off()
        return Drawing(fig, pd.DataFrame([{"stage": cell.stage, "status": cell.status, "reason": cell.reason}]), words,
                       caption)  # fmt: skip
    error = (ours.double() - expected.double()).abs()
    n_equal = int((error == 0).sum())
    if is_integer_stage(cell.stage) or n_equal == error.numel():
        n_other = error.numel() - n_equal
        axes.barh(["equal", "different"], [n_equal, n_other], color=[colour_of("ours"), colour_of("bad")])
        axes.set_xlabel("entries")
    else:
        _histogram(axes, error.flatten(), cell)
    axes.set_title(f"Errors of {cell.stage}, {cell.pass_name or 'the run'}, prompt {cell.prompt}, {report.dtype}")
    return Drawing(fig, _worst_elements(ours, expected, error, cell), f"Histogram of errors of {words}", caption)


def _worst_cells(report: StageReport) -> dict[str, StageCell]:
    """By label, of each stage and kind of pass the cell that did not pass first, else the one with least room."""
    worst: dict[tuple[str, str], StageCell] = {}
    for cell in report.cells:
        held = worst.get((cell.kind, cell.stage))
        if held is None or (held.status == "pass" and (cell.status != "pass" or (cell.ratio or 0) > (held.ratio or 0))):
            worst[cell.kind, cell.stage] = cell
    return {f"{kind}: {stage}{_mark(cell)}": cell for (kind, stage), cell in worst.items()}


def _mark(cell: StageCell) -> str:
    return "" if cell.status == "pass" else f" ({cell.status})"


def _place(cell: StageCell) -> tuple[str, str]:
    return cell.kind, cell.stage


def _sides(report: StageReport, cell: StageCell) -> tuple[Tensor | None, Tensor | None]:
    name = f"{cell.pass_name}/{cell.stage}".removeprefix("/")
    sides = report.sides[cell.prompt]
    return sides.ours.get(name), sides.expected.get(name)


def _histogram(axes: Axes, error: Tensor, cell: StageCell) -> None:
    """Bars of equal width on a logarithmic axis; what is exact, or further down than they reach, is in the first."""
    finite = error[error.isfinite()]
    top = max(float(finite.max()) if len(finite) else 0.0, cell.tolerance or 0.0, 1e-300)
    high = math.ceil(BINS_A_DECADE * math.log10(top)) + 1
    low = high - BINS_A_DECADE * MOST_DECADES
    edges = [10 ** (at / BINS_A_DECADE) for at in range(low, high + 1)]
    counts = torch.histogram(finite.cpu().clamp(min=edges[0]), bins=torch.tensor(edges, dtype=torch.float64)).hist
    middles = [math.sqrt(a * b) for a, b in pairwise(edges)]
    widths = [0.92 * (b - a) for a, b in pairwise(edges)]
    is_over = [cell.tolerance is not None and middle > cell.tolerance for middle in middles]
    axes.bar(middles, counts.tolist(), width=widths, color=[colour_of("bad" if over else "ours") for over in is_over])
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    if cell.tolerance:
        axes.axvline(cell.tolerance, color=colour_of("bound"), linestyle="--", label="allowed")
    if cell.reference_max_abs:
        axes.axvline(cell.reference_max_abs, color=colour_of("plain"), linestyle=":", label="largest of plain torch")
    if cell.tolerance or cell.reference_max_abs:
        axes.legend(fontsize=8.5, loc="upper left")
    axes.set_xlabel(f"absolute error; the first bar holds what is smaller or exact, {int((error == 0).sum())} exact")
    axes.set_ylabel("elements")


def _worst_elements(ours: Tensor, expected: Tensor, error: Tensor, cell: StageCell) -> pd.DataFrame:
    """One row an element, the largest errors first; what is not finite before all others."""
    flat = error.flatten().nan_to_num(torch.inf)
    rows = []
    for at in flat.topk(min(MOST_ELEMENTS, flat.numel())).indices.tolist():
        place = [int(i) for i in torch.unravel_index(torch.tensor(at), error.shape)]
        rows.append({
            "element": ", ".join(map(str, place)), "ours": float(ours.flatten()[at]),
            "expected": float(expected.flatten()[at]), "error": float(error.flatten()[at]),
            "over_tolerance": float(flat[at]) / cell.tolerance if cell.tolerance else None,
        })  # fmt: skip
    return pd.DataFrame(rows)


def _where(cell: StageCell) -> str:
    return f"{cell.stage} in {cell.pass_name or 'the run'} of prompt {cell.prompt}"


def _verdict(cell: StageCell) -> str:
    if cell.status != "pass":
        return f"{cell.reason}."
    return "no difference at all." if not cell.ratio else f"{cell.ratio:.2f} of the tolerance used."


def _fed_words(report: StageReport, cell: StageCell) -> str:
    """The stages it is computed from, and how they fared."""
    own = [other for other in report.cells if other.prompt == cell.prompt]
    fed = fed_by(cell, own)
    if not fed:
        return "Nothing that was compared feeds it."
    told = [f"{other.stage}{'' if other.pass_name == cell.pass_name else f' in {other.pass_name}'} "
            f"({'passed' if other.status == 'pass' else other.status})" for other in fed]  # fmt: skip
    wrong = [other for other in fed if other.status != "pass"]
    return f"Fed by {', '.join(told)}{'; look there first' if wrong else ''}."


def fed_by(cell: StageCell, own: Sequence[StageCell]) -> list[StageCell]:
    """Cells of stages that a stage is computed from: of its own pass by name, else the one recorded before it.

    Args:
        own: the prompt's cells.
    """
    beside = {other.stage: other for other in own if other.pass_name == cell.pass_name}
    layers = [name for name in beside if re.fullmatch(r"target\.\d+\.mlp", name)]
    names = FEEDS.get(cell.stage, ())
    if cell.stage in ("target.taps", "target.norm"):
        names = tuple(layers if cell.stage == "target.taps" else layers[-1:])
    elif found := re.fullmatch(r"target\.(\d+)\.(attn|mlp)", cell.stage):
        layer = int(found[1])
        before = f"target.{layer - 1}.mlp" if layer else "target.embed"
        names = (f"target.{layer}.attn",) if found[2] == "mlp" else (before,)
    known = [beside[name] for name in names if name in beside]
    earlier = [other for other in own if other.order < cell.order]
    return known or sorted(earlier, key=lambda other: other.order)[-1:]
