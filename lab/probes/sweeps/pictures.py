"""Pictures of a sweep, each with the table it was drawn from; cells that were not measured are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import pandas as pd

from eagle3core.kernels.gemm import Tiling
from lab.figures import Drawing, colour_of
from lab.probes.sweeps.choose import Choice, over_default
from lab.probes.sweeps.confirm import BEST, ranked
from lab.probes.sweeps.joint import joint_orders
from lab.probes.sweeps.rows import MICRO, SCREEN, TILES, Cell, SweepFile

_FULL = 0.25  # of a move against the default, at which a cell has its full colour
_LETTER = 0.068  # inches of a label's letter, on average
_FEW = 6  # cells that a caption names


def setting_text(op: str, setting: Mapping[str, Any]) -> str:
    """A setting, short."""
    if op == "gemm":
        return Tiling(**setting).name
    many = "group" if setting.get("grouped") else "rows"
    kernel = f"{many} {setting['row_warps']}x{setting['groups']}" if setting["row_warps"] else "streams"
    return f"{kernel} u{setting['units']} p{setting['stages']} run {setting['run']}"


def column_text(op: str, setting: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    """A setting as a column of a heat map; of attention by what it changes, since plans have much in common."""
    if op == "gemm":
        return setting_text(op, setting)
    alike = all(setting[name] == default[name] for name in setting if name != "run")
    return f"run {setting['run']:2d}" if alike else f"u{setting['units']} p{setting['stages']} at the default's run"


def families(op: str, rows: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Screened rows by what one heat map shows: rows of x, or a head size."""
    found: dict[str, list[Cell]] = {}
    for row in (row for row in rows if row["op"] == op and row["phase"] == SCREEN):
        key = row["key"]
        name = f"up to {key['rows']} rows" if op == "gemm" else f"head size {key['dim']}"
        found.setdefault(name, []).append(row)
    return found


def cells(op: str, rows: Sequence[Cell]) -> pd.DataFrame:
    """One row a regime and setting: times over its shapes, over the default's, share of the byte floor."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    screened = [row for row in rows if row["phase"] == SCREEN]
    defaults: dict[str, Mapping[str, Any]] = {row["regime"]: row["setting"] for row in screened if row["is_default"]}
    for row in screened:
        name = column_text(op, row["setting"], defaults.get(row["regime"]) or row["setting"])
        groups.setdefault((row["regime"], name), []).append(row)
    return pd.DataFrame(
        {
            "regime": regime, "setting": name, "us": geometric_mean(row["time_us"] for row in own),
            "over_default": over_default(own), "is_default": own[0]["is_default"],
            "share_of_floor": _share(own),
            "bits_equal": all(row["bits_equal"] for row in own), "n_shapes": len(own),
        }
        for (regime, name), own in groups.items()
    )  # fmt: skip


def _share(rows: Sequence[Cell]) -> float | None:
    """Share of the byte floor over some shapes; None where no read rate was known to make a floor of."""
    shares = [row["floor_us"] / row["time_us"] for row in rows if row["floor_us"] is not None]
    return geometric_mean(shares) if shares else None


def heat_map(title: str, table: pd.DataFrame, source: str) -> Drawing:
    """Time over the default's by regime and setting; the cells that were not measured are in the caption.

    Args:
        table: of `cells`. source: where the rows come from, for the caption.
    """
    from matplotlib import pyplot as plt

    regimes, settings = list(dict.fromkeys(table["regime"])), sorted(set(table["setting"]))
    known = {(row["regime"], row["setting"]): row for row in table.to_dict("records")}
    labels = max(map(len, regimes)) * _LETTER
    fig, axes = plt.subplots(figsize=(1 + labels + 0.62 * max(len(settings), 6), 1.9 + 0.42 * len(regimes)))
    for y, regime in enumerate(regimes):
        for x, name in enumerate(settings):
            cell = known.get((regime, name))
            if cell is None:
                axes.annotate("-", (x + 0.5, y + 0.5), ha="center", va="center", fontsize=7.5)
                continue
            _draw(axes, x, y, cell)
    axes.set(xlim=(0, len(settings)), ylim=(len(regimes), 0), title=title)
    axes.set_xticks([x + 0.5 for x in range(len(settings))], settings, rotation=60, ha="right", fontsize=7.5)
    axes.set_yticks([y + 0.5 for y in range(len(regimes))], regimes, fontsize=7.5)
    axes.grid(visible=False)
    best = table.loc[table["over_default"].idxmin()]
    alt = (
        f"Heat map of {len(settings)} settings in {len(regimes)} regimes, {title}. Fastest against its default: "
        f"{best['setting']} in {best['regime']}, {best['over_default']:.3f}."
    )
    left_out = unmeasured(missing_cells(table), table)
    return Drawing(fig, table, alt, f"Medians over alternating graph replays. {left_out} {source}.")


def missing_cells(table: pd.DataFrame) -> list[str]:
    """Regimes and settings of a table of `cells` that were not measured together."""
    known = set(zip(table["regime"], table["setting"], strict=True))
    regimes, settings = dict.fromkeys(table["regime"]), sorted(set(table["setting"]))
    return [f"{regime}: {name}" for regime in regimes for name in settings if (regime, name) not in known]


def unmeasured(missing: Sequence[str], table: pd.DataFrame) -> str:
    """A sentence about the cells with a dash: their names, or how many where they are more than a few."""
    if not missing:
        return "Every cell was measured."
    if len(missing) <= _FEW:
        return f"Not measured: {'; '.join(missing)}."
    n_cells = table["regime"].nunique() * table["setting"].nunique()
    few = "a regime tries what fits it, one of little weight few"
    return f"A dash: not measured, {len(missing)} of {n_cells} cells; {few}."


def _draw(axes: Any, x: int, y: int, cell: Mapping[str, Any]) -> None:
    """A cell: one hue where it is faster than the default, another where slower, stronger the further off."""
    from matplotlib.patches import Rectangle

    move = cell["over_default"] - 1.0
    colour, strength = colour_of("ours" if move <= 0 else "bad"), min(1.0, abs(move) / _FULL)
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="none", alpha=0.08 + 0.47 * strength))
    text = "default" if cell["is_default"] else f"{cell['over_default']:.3f}" + ("" if cell["bits_equal"] else " bits")
    axes.annotate(text, (x + 0.5, y + 0.5), ha="center", va="center", fontsize=7)


def best_table(op: str, rows: Sequence[Cell]) -> pd.DataFrame:
    """The default and the five fastest of every regime."""
    regimes: dict[str, list[Cell]] = {}
    for row in rows:
        if row["op"] == op and row["phase"] == SCREEN:
            regimes.setdefault(row["regime"], []).append(row)
    made = []
    for name, own in regimes.items():
        for rank, setting in enumerate(ranked(own)[: BEST + 1]):
            same = [row for row in own if row["setting"] == setting]
            made.append(
                {"regime": name, "rank": rank or "default", "setting": setting_text(op, setting),
                 "us": geometric_mean(row["time_us"] for row in same), "over_default": over_default(same)}
            )  # fmt: skip
    return pd.DataFrame(made)


def choices_table(choices: Sequence[Choice]) -> pd.DataFrame:
    """What every regime gets, and how near that is to the best found."""
    return pd.DataFrame(
        {
            "regime": one.regime, "chosen": setting_text(one.op, one.setting),
            "was the default": one.is_default, "us": one.baked_us, "best_us": one.best_us, "default_us": one.default_us,
            "over_best": one.within, "settings": one.n_settings, "reason": one.reason,
        }
        for one in choices
    )  # fmt: skip


def joint_frame(sweep: SweepFile) -> pd.DataFrame:
    """Orders of sums that were tried, over all regimes."""
    return pd.DataFrame(
        {"head size": one.dim, "order": f"{one.splits}x{one.streams}", "over_present": one.ratio, "worst": one.worst,
         "worst regime": one.worst_regime, "regimes": one.n_regimes} for one in joint_orders(sweep.cells)
    )  # fmt: skip


def micro_frame(op: str, sweep: SweepFile) -> pd.DataFrame:
    """Micro runs of the best five and the default."""
    return pd.DataFrame(
        {"run": row["regime"], "rank": row["setting"]["rank"] or "default", "step_us": row["time_us"],
         "tokens_per_s": row["tokens_per_s"], "acceptance_length": row["acceptance_length"], "wrong": row["n_wrong"]}
        for row in sweep.of(op, MICRO)
    )  # fmt: skip


def tiles_frame(sweep: SweepFile) -> pd.DataFrame:
    """Counted tiles of attention."""
    return pd.DataFrame({"regime": row["regime"], **row["tiles"]} for row in sweep.of("attention", TILES))
