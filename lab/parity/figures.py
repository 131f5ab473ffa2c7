"""Pictures of parity: where the error is, how much room it had, and which tokens differ."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from lab.figures import Drawing, colour_of, depth_look, look_of
from lab.parity.stages import StageReport
from lab.parity.tokens import TokenReport

# Cells of a heat map keep their colours on light and dark pages, so their words need fixed inks as well.
DARK_INK, LIGHT_INK, FAILED, MISSING = "#10151a", "#fdfdfd", "#a23a00", "#8a8f96"
ROW_INCHES, COLUMN_INCHES = 0.23, 0.95
# Stages that the first passes do not have, and the stage each is drawn above.
LATE_STAGES = (
    ("first_token", "target.embed"),
    ("draft.feedback_in", "draft.fc"),
    ("draft.norm", "tree.tokens"),
    ("draft.head", "tree.tokens"),
)
KNOWN_AS = {
    "draft.fc": "fc_out",
    "draft.qkv": "qkv",
    "draft.attn": "attn_out",
    "draft.mlp": "ffn_out",
    "draft.norm": "pre_head_hidden",
    "draft.head": "logits",
}


def ratio_grid(report: StageReport) -> pd.DataFrame:
    """Error over tolerance by stage (rows) and kind of pass (columns); NaN where a pass has no such stage.

    Both follow execution, with the stages that only some passes have beside their neighbours, and the two extend passes
    next to each other.
    """
    table = report.table()
    kinds = sorted(dict.fromkeys(table["kind"]), key=_kind_place)
    stages = list(dict.fromkeys(table["stage"]))
    for late, before in LATE_STAGES:
        if late in stages and before in stages:
            stages.remove(late)
            stages.insert(stages.index(before), late)
    grid = table.pivot(index="stage", columns="kind", values="ratio")
    return grid.reindex(index=stages, columns=kinds)


def _kind_place(kind: str) -> tuple[int, str]:
    known = {"run": 0, "prefill": 1, "extend": 2, "after acceptance": 3, "verify": 5, "step": 6}
    return known.get(kind, 4), kind  # chained passes stand between


def heat_map(report: StageReport) -> Drawing:
    """Error over tolerance of every stage in every kind of pass."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    table = report.table()
    grid = ratio_grid(report)
    status = table.set_index(["stage", "kind"])["status"].to_dict()
    size = (2.4 + COLUMN_INCHES * grid.shape[1], 1.1 + ROW_INCHES * grid.shape[0])
    fig, axes = plt.subplots(figsize=size)
    shades = plt.get_cmap("Blues")
    for y, stage in enumerate(grid.index):
        for x, kind in enumerate(grid.columns):
            if (stage, kind) not in status:
                continue
            colour, ink, word = _cell_look(status[stage, kind], float(grid.loc[stage, kind]), shades)
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=LIGHT_INK, linewidth=0.8))
            axes.text(x + 0.5, y + 0.5, word, ha="center", va="center", color=ink, fontsize=8)
    axes.set_xlim(0, grid.shape[1])
    axes.set_ylim(grid.shape[0], 0)
    axes.set_xticks([x + 0.5 for x in range(grid.shape[1])], list(grid.columns))
    axes.set_yticks([y + 0.5 for y in range(grid.shape[0])], list(grid.index), fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(f"Largest error as a share of the tolerance, {report.dtype}", pad=24)
    alt = f"Heat map of largest error over tolerance by stage and pass. {report.verdict}"
    caption = "Share of the tolerance used by each stage; 1 is the limit. 'exact' means no difference at all."
    return Drawing(fig, stage_table(report), alt, caption)


def _cell_look(status: str, ratio: float, shades: Any) -> tuple[Any, str, str]:
    """Colour, ink and word of a heat-map cell."""
    if status == "missing":
        return MISSING, DARK_INK, "missing"
    if status == "fail":
        return FAILED, LIGHT_INK, "fail" if not math.isfinite(ratio) else f"fail {ratio:.2g}x"
    return shades(0.08 + 0.6 * min(ratio, 1.0)), DARK_INK, "exact" if ratio == 0 else f"{ratio:.2f}"


def stage_table(report: StageReport) -> pd.DataFrame:
    """The report's table with each stage's other name (docs/requirements.md R-138)."""
    table = report.table()
    table.insert(2, "known_as", table["stage"].map(KNOWN_AS).fillna(""))
    return table


def has_room(report: StageReport) -> bool:
    """Whether any stage was judged by a tolerance; ids and positions have to be exact and have no room."""
    return any(cell.tolerance for cell in report.cells)


def room(report: StageReport) -> Drawing:
    """By stage, the tolerance that would just have passed beside the one allowed.

    Only of a report that `has_room`. The layers of the target are drawn as one row a part; the row shows its layer and
    pass with the least room.
    """
    from matplotlib import pyplot as plt

    table = report.table()
    table = table[table["tolerance"].fillna(0) > 0].copy()
    table["group"] = table["stage"].str.replace(r"^target\.\d+\.", "target.layer.", regex=True)
    worst = table.loc[table.groupby("group", sort=False)["ratio"].idxmax()]
    worst = worst[["group", "stage", "kind", "max_abs", "reference_max_abs", "tolerance", "ratio"]]
    fig, axes = plt.subplots(figsize=(7.2, 1.2 + 0.3 * len(worst)))
    rows = range(len(worst))
    # A logarithm has no 0: what is exact is drawn at the left edge, below every tolerance.
    errors = pd.concat([worst["max_abs"], worst["tolerance"]])
    least = float(errors[errors > 0].min())
    shown = worst["max_abs"].clip(lower=least / 10)
    axes.hlines(rows, shown, worst["tolerance"], linewidth=1.2, color="#7a7b7c")
    dots = {"linestyle": "none"}
    axes.plot(shown, rows, label="would just have passed (ours)", **{**look_of("ours"), **dots})
    plain = worst["reference_max_abs"].clip(lower=least / 10)
    axes.plot(plain, rows, label="error of plain torch", **{**look_of("plain"), **dots})
    axes.plot(worst["tolerance"], rows, label="allowed", **{**look_of("bound"), **dots})
    axes.set_xscale("log")
    axes.set_yticks(list(rows), list(worst["group"]))
    axes.invert_yaxis()
    axes.set_xlabel("largest absolute error")
    axes.set_title(f"Room under the tolerance, {report.dtype}", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8.5, borderaxespad=0.2)
    tightest = worst.loc[worst["ratio"].idxmax()]
    alt = (
        f"Largest error, error of plain torch and tolerance by stage. Least room: {tightest['stage']} in "
        f"{tightest['kind']}, at {tightest['ratio']:.2f} of its tolerance."
    )
    caption = "The tolerance that would just have passed beside the one allowed; target layers as one row a part."
    return Drawing(fig, worst.rename(columns={"max_abs": "would_pass"}).reset_index(drop=True), alt, caption)


def token_classes(report: TokenReport) -> Drawing:
    """By depth, the share of positions that are not equal, near-ties and bugs apart."""
    from matplotlib import pyplot as plt

    table = report.by_depth()
    labels = ["plain" if k == 0 else f"spec-{k}" for k in table["k"]]
    fig, axes = plt.subplots(figsize=(7.2, 1.6 + 0.4 * len(table)))
    near = 100 * table["n_near_tie"] / table["n_positions"]
    bugs = 100 * table["n_bug"] / table["n_positions"]
    axes.barh(labels, near, label="near-tie", color=colour_of("other"))
    axes.barh(labels, bugs, left=near, label="bug", hatch="//", color=colour_of("bad"))
    for y, (tie, bug) in enumerate(zip(table["n_near_tie"], table["n_bug"], strict=True)):
        end = float((near + bugs).iloc[y])
        axes.annotate(f"{tie} near-ties, {bug} bugs", (end, y), xytext=(4, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, linestyle="--", color="#7a7b7c", label="limit for near-ties")
    axes.set_xlim(0, max(1.6, 1.5 * float((near + bugs).max())))
    axes.invert_yaxis()
    axes.set_xlabel("positions that differ from the reference, %")
    axes.set_title(f"Generated tokens against Hugging Face, {report.dtype}", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8.5, borderaxespad=0.2)
    alt = f"Bars of the share of positions that differ from the reference, by depth. {report.verdict}"
    caption = f"Near-ties and bugs among the generated tokens; the near-tie gap is {report.near_tie_gap:.3g}."
    return Drawing(fig, table, alt, caption)


def divergences(report: TokenReport) -> Drawing:
    """By prompt and depth, the first position where speculation differs from plain decoding."""
    from matplotlib import pyplot as plt

    table = report.table()
    table = table[table["k"] > 0][["prompt", "k", "n_positions", "first_divergence", "divergence"]]
    longest = int(table["n_positions"].max())
    fig, axes = plt.subplots()
    depths = list(dict.fromkeys(table["k"]))
    for i, k in enumerate(depths):
        rows = table[table["k"] == k]
        beside = rows["prompt"] + 0.6 * ((i + 0.5) / len(depths) - 0.5)  # depths side by side, not on top of each other
        axes.plot(
            beside,
            rows["first_divergence"].fillna(longest),
            label=f"spec-{k}",
            **{**depth_look(k), "linestyle": "none"},
        )
    axes.axhline(longest, linestyle=":", color="#7a7b7c")
    axes.annotate("never", (0, longest), xytext=(0, 4), textcoords="offset points")
    axes.set_ylim(-0.05 * longest, 1.15 * longest)
    axes.set_xlabel("prompt")
    axes.set_ylabel("first differing token")
    axes.set_title("Where speculation leaves plain decoding")
    axes.legend(ncols=4, loc="lower left", fontsize=8.5)
    alt = f"First differing token by prompt and depth; {report.n_equal_outputs} of {len(table)} never differ."
    caption = "Each difference from plain decoding is classed like any other position."
    return Drawing(fig, table.reset_index(drop=True), alt, caption)
