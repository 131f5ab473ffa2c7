"""Gates inside a night, for notebook 42_perf_gates: runs or stored rows, judged as `eagle3lab gates` judges them.

The state file lies in the run folder unless another is named, so that a full run in a later part of the night finds the
micro runs of an earlier one, and the archive between parts carries it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
from matplotlib import pyplot as plt

from lab.errors import RunFailed
from lab.figures import INK, Drawing, look_of
from lab.night.experiment import Experiment
from lab.options.proofs import GatesFeasibleOptions
from lab.probes.gates.config import GatesConfig, RunKind, load_gates, packaged_gates
from lab.probes.gates.feasible import Possible, Steps
from lab.probes.gates.feasible_command import found as found_feasible
from lab.probes.gates.history import append, entry_of, green_row, key_of, read, require_green
from lab.probes.gates.judging import judge_run, listing, outcome
from lab.probes.gates.measure import Runs, Tell, check_device
from lab.rows.gates import GateResult, bare_name, gates_of
from lab.rows.store import Row, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATE = "gates.jsonl"
# The bounds of a threshold in words, "at least 1 and at most 2"; a bare number is the most that is allowed.
BOUND = re.compile(r"(?:^|\b(least|most) )(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
SMALL = 8.5  # points, of names and numbers where there are many
TEXT_ROOM = 2.6  # of the scale beyond the longest bar, for the words at its end
RATIOS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 8, 12)  # ticks of the scale where it spans less than NARROW decades
NARROW, MOST_POWERS = 1.4, 6  # decades; powers of ten on a scale that spans more of them


@dataclass(frozen=True)
class GateRuns:
    """What runs of one kind came to.

    Attributes:
        rows: of the bench, every run's. results: gates of the last run.
        n_runs: how many ran. n_green: newest micro runs in a row that were green, None where no state is known.
        reason: why nothing was judged; empty if something was.
    """

    rows: tuple[Row, ...] = ()
    results: tuple[GateResult, ...] = ()
    n_runs: int = 0
    n_green: int | None = None
    reason: str = ""


def configuration(path: str, geometry: str) -> GatesConfig:
    """The configuration named, or the packaged one, for its own geometry or another."""
    return load_gates(Path(path) if path else packaged_gates(geometry), geometry or None)


def run_gates(exp: Experiment, config: GatesConfig, kind: str, repeat: int, state: str, tell: Tell) -> GateRuns:
    """Runs one after the other until one is not green; each has its line in the state file."""
    which, path = cast(RunKind, kind), Path(state) if state else exp.run_dir / STATE
    key = key_of(config, exp.environment)
    tell(str(key))
    rows: list[Row] = []
    results: list[GateResult] = []
    number = 0
    try:
        if which == "full":
            tell(str(require_green(path, key, config.green_in_a_row)))
        check_device(config)
    except RunFailed as error:
        return GateRuns(reason=error.what)
    runs = Runs(config, exp.environment, tell=tell)
    for number in range(1, repeat + 1):
        try:
            own = runs.run(which, f"gates-{kind}-{number}")
        except Exception as error:  # whatever ends a run, it was not green
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            append(path, entry_of(key, which, "broke", [why], exp.environment.fingerprint))
            raise
        results = judge_run(config, which, own)
        rows += own
        word, not_passed = outcome(results), [gate.name for gate in results if gate.word != "pass"]
        append(path, entry_of(key, which, word, not_passed, exp.environment.fingerprint))
        tell(f"{kind} run {number} of {repeat}: {word}")
        print(listing(results))
        if word != "green":
            break
    row = green_row(read(path), key, config.green_in_a_row)
    return GateRuns(tuple(rows), tuple(results), number, row.n_green)


def stored_gates(path: Path, kind: str) -> GateRuns:
    """Rows and gates that `eagle3lab gates micro|full --out` wrote; of several runs the last one's gates."""
    rows = [row for row in read_rows(path) if row.parameters.get("run_kind") == kind]
    gates = list({row.name: row for row in rows if row.kind == "gate"}.values())
    reason = "" if gates else f"{path.name} has no gates of {kind} runs"
    return GateRuns(tuple(row for row in rows if row.kind == "bench"), tuple(gates_of(gates)), reason=reason)


def feasible(config: GatesConfig, gpu: str) -> tuple[list[Steps], list[Possible]]:
    """What bytes allow on a GPU of that name, whatever was run."""
    return found_feasible(GatesFeasibleOptions(gpu=gpu), config)


def write(exp: Experiment, found: GateRuns, config: GatesConfig, kind: str, repeat: int) -> None:
    """Rows and gates as the notebook's own."""
    for number, row in _numbered(found.rows):
        exp.carry(row, run_number=number)
    if found.reason:
        exp.gate(f"{kind} gates", None, detail=found.reason)
    for gate in found.results:
        passed = None if gate.word == "missing" else gate.word == "pass"
        exp.gate(f"{kind}: {gate.name}", passed, value=gate.value, threshold=gate.threshold, detail=gate.detail)
    if kind == "micro" and found.n_green is not None and repeat >= config.green_in_a_row:
        least = config.green_in_a_row
        detail = f"{found.n_runs} of {repeat} runs made"
        exp.gate(
            "micro runs green in a row", found.n_green >= least, value=found.n_green, threshold=least, detail=detail
        )


def _numbered(rows: tuple[Row, ...]) -> list[tuple[int, Row]]:
    """Each row with the number of its run, from 1, so that runs are told apart."""
    names = list(dict.fromkeys(row.run for row in rows))
    return [(names.index(row.run) + 1, row) for row in rows]


def gates_table(found: GateRuns) -> pd.DataFrame:
    """gate, verdict, value, threshold, room: value over a bound it must reach, or bound over value; 1 just holds."""
    lines = []
    for gate in found.results:
        value = gate.value if isinstance(gate.value, (int, float)) else None
        ratio = _nearest_bound(value, "" if gate.threshold is None else str(gate.threshold))
        lines.append(
            {"gate": gate.name, "verdict": gate.word, "value": value, "threshold": gate.threshold, "room": ratio}
        )
    return pd.DataFrame(lines, columns=["gate", "verdict", "value", "threshold", "room"])


def _nearest_bound(value: float | None, threshold: str) -> float | None:
    """The room over the bound that is nearest, of "at least 1 and at most 2" the smaller; None where there is none."""
    bounds = [(side, float(bound)) for side, bound in BOUND.findall(threshold)]
    rooms = [value / bound if side == "least" else bound / value for side, bound in bounds if value and bound]
    return min(rooms, default=None)


def room(table: pd.DataFrame, source: str) -> Drawing:
    """How far each gate's value is from its threshold, as a ratio on a logarithmic scale: beyond 1 it holds.

    A panel a mode, all on one scale. A mark ends each bar, so that room of a tenth of a per cent is seen too; value and
    threshold stand where the bar ends.

    Args:
        source: what was run, for the caption.
    """
    shown = table[table["room"].notna()]
    panels = {mode: own.to_dict("records") for mode, own in shown.groupby(shown["gate"].map(_mode), sort=False)}
    counts = [len(gates) for gates in panels.values()]
    figure, sides = plt.subplots(
        len(panels), 1, figsize=(7.2, 0.27 * sum(counts) + 0.55 * len(panels) + 0.8), sharex=True, height_ratios=counts,
        squeeze=False,
    )  # fmt: skip
    for axes, (mode, gates) in zip(sides[:, 0], panels.items(), strict=True):
        _panel(axes, str(mode), gates)
    axes = sides[-1, 0]
    least, most = float(shown["room"].min()), float(shown["room"].max())
    axes.set_xlim(min(least, 1.0) / 1.15, max(most, 1.0) * TEXT_ROOM)
    axes.set_xscale("log")
    marks = ratio_ticks(min(least, 1.0) / 1.15, max(most, 1.0) * 1.2)
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks], fontsize=SMALL)
    for each in sides[:, 0]:
        each.minorticks_off()
    axes.set_xlabel("times the threshold; left of 1 a gate fails", fontsize=SMALL)
    tightest = table.loc[table["room"].idxmin()]
    alt = (
        f"Bars of {len(table)} gates by their room over the threshold. Tightest: {tightest['gate']}, "
        f"{tightest['room']:.3f}."
    )
    return Drawing(figure, table, alt, f"{source}. Counts that must be 0 are in the table only.")


def ratio_ticks(low: float, high: float) -> list[float]:
    """Marks of a logarithmic scale from `low` below 1 to `high` above it, few enough that no label meets another."""
    decades = math.log10(high / low)
    each = math.ceil(decades / MOST_POWERS)  # powers of ten from one mark to the next; 1 is always one
    powers = [10.0 ** (each * n) for n in range(-math.ceil(decades), math.ceil(decades) + 1)]
    return [mark for mark in (RATIOS if decades < NARROW else powers) if low <= mark <= high]


def _mode(gate: str) -> str:
    """What a gate's name begins with: the mode, `single32k` of `single32k spec: speed-up`."""
    return bare_name(gate).partition(" ")[0] if ": " in bare_name(gate) else "of the runs"


def _panel(axes: Axes, mode: str, gates: list[dict[Any, Any]]) -> None:
    for place, gate in enumerate(gates):
        look = look_of("ours" if gate["verdict"] == "pass" else "bad")
        axes.hlines(place, *sorted((1.0, gate["room"])), color=look["color"], linewidth=5)
        axes.plot([gate["room"]], [place], marker=look["marker"], color=look["color"], linestyle="none")
        note = "" if gate["verdict"] == "pass" else f", {gate['verdict']}"
        axes.annotate(
            f"{gate['value']:.4g} ({gate['threshold']}){note}", (max(gate["room"], 1.0), place), xytext=(7, 0),
            textcoords="offset points", va="center", fontsize=SMALL,
        )  # fmt: skip
    axes.axvline(1.0, color=INK, linewidth=1)
    names = [bare_name(gate["gate"]).removeprefix(f"{mode} ") for gate in gates]
    axes.set_yticks(range(len(gates)), names, fontsize=SMALL)
    axes.set_ylim(len(gates) - 0.4, -0.6)
    axes.set_title(f"Room over the thresholds, {mode}", fontsize=10)
    axes.grid(visible=False, axis="y")
