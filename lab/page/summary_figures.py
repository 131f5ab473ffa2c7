"""The pictures a night is remembered by: acceptance by depth, speed with and without drafts, every point measured."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib import pyplot as plt

from lab.figures import INK, MARKERS, SERIES, Drawing, colour_of, look_of
from lab.rows.store import Row

RATE = "decode_tokens_per_s"
SMALL = 8.5  # points, where there are many words


def acceptance(rows: list[Row]) -> Drawing | None:
    """Acceptance length by depth of speculation, beside the most there could be; None without such rows.

    Table: spec_k, acceptance_length, outside_loops, most (spec_k + 1: every draft accepted, bonus included).
    """
    found = [row for row in _measured(rows, "acceptance", "acceptance_length") if depth_of(row) is not None]
    if not found:
        return None
    table = pd.DataFrame(
        {
            "spec_k": [depth_of(row) for row in found],
            "acceptance_length": [row.values["acceptance_length"] for row in found],
            "outside_loops": [row.values.get("acceptance_length_outside_loops") for row in found],
        }
    ).sort_values("spec_k", ignore_index=True)
    table["most"] = table["spec_k"] + 1
    figure, axes = plt.subplots()
    axes.plot(table["spec_k"], table["acceptance_length"], label="all steps", **look_of("ours"))
    if table["outside_loops"].notna().any():
        axes.plot(table["spec_k"], table["outside_loops"].astype(float), label="outside loops", **look_of("other"))
    axes.plot(
        table["spec_k"], table["most"], color=INK, linestyle=":", marker="", linewidth=1, label="every draft accepted"
    )
    axes.set(xlabel="drafts a step", ylabel="tokens a verify step", ylim=(0.9, None), xticks=table["spec_k"])
    axes.set_title("Acceptance length by depth")
    axes.legend()
    caption = (
        "Tokens committed by a complete verify step, the target's own (bonus) token included. Outside loops leaves out "
        "steps with a token in a repeated run of 16."
    )
    alt = f"Acceptance length by depth: {_sentence(table, 'spec_k', 'acceptance_length')} tokens a step."
    return Drawing(figure, table, alt, caption)


def speeds(rows: list[Row]) -> Drawing | None:
    """Tokens a second of plain decoding and of each depth, decoding only, and the speed-ups; None without such rows.

    Table: mode, tokens_per_s, p10, p90; speedup with its p10 and p90, and with_prefill_speedup, as the rows have them.
    """
    found = _measured(rows, "decode", RATE)
    if not found:
        return None
    rates = [float(row.values[RATE]) for row in found]  # type: ignore[arg-type]
    names = {"tokens_per_s": RATE, "p10": f"{RATE}_p10", "p90": f"{RATE}_p90"}
    ratios = ("speedup", "speedup_p10", "speedup_p90", "with_prefill_speedup")
    columns = {**names, **{name: name for name in ratios}}
    table = pd.DataFrame(
        {"mode": [row.name for row in found]}
        | {column: [row.values.get(name) for row in found] for column, name in columns.items()}
    )
    figure, axes = plt.subplots(figsize=(7.2, 0.55 * len(table) + 1.4))
    colours = [colour_of("ours" if "spec" in str(mode) else "plain") for mode in table["mode"]]
    axes.barh(table["mode"], table["tokens_per_s"], height=0.6, color=colours)
    low, high = table["p10"].astype(float), table["p90"].astype(float)
    if low.notna().all() and high.notna().all():
        spread = [table["tokens_per_s"] - low, high - table["tokens_per_s"]]
        axes.errorbar(rates, table["mode"], xerr=spread, fmt="none", ecolor=INK, capsize=3, linewidth=1)
    ends = high.fillna(table["tokens_per_s"])
    for place, (end, mode) in enumerate(zip(ends, table.to_dict("records"), strict=True)):
        axes.annotate(_gain(mode), (end, place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set(xlabel="tokens a second, decoding only, median", xlim=(0, max(ends) * 1.45))
    axes.set_title("Decoding speed by mode")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    caption = (
        "Medians over rounds with the 10th to 90th percentile, prefill left out. In brackets the speed-up over plain "
        "decoding: the median over rounds of the ratio within a round, and its percentiles. The table has it with "
        "prefill "
        "too."
    )
    alt = f"Tokens a second by mode, decoding only: {_sentence(table, 'mode', 'tokens_per_s')}."
    return Drawing(figure, table, alt, caption)


def _gain(mode: dict[Any, Any]) -> str:
    """Rate and speed-up of a mode as its label."""
    gain, low, high = (mode[name] for name in ("speedup", "speedup_p10", "speedup_p90"))
    if pd.isna(gain):
        return f"{mode['tokens_per_s']:.0f}"
    return f"{mode['tokens_per_s']:.0f} ({gain:.2f}×, {low:.2f} to {high:.2f})"


def points(rows: list[Row]) -> Drawing | None:
    """Speed-up and share of the byte floor at every point of the bench and the gates; None without such rows.

    Of several rows of one point and job, such as runs of gates, the last. Table: point, spec_k, job, speedup with its
    p10 and p90, with_prefill_speedup, acceptance_length, share_of_floor.
    """
    found = [row for row in _measured(rows, "bench", "share_of_floor") if row.parameters.get("who") == "engine"]
    if not found:
        return None
    last = list({(row.job, row.name): row for row in found}.values())
    values = ("speedup", "speedup_p10", "speedup_p90", "with_prefill_speedup", "acceptance_length", "share_of_floor")
    table = pd.DataFrame(
        {
            "point": [f"{row.parameters['context']} x {row.parameters['batch']}" for row in last],
            "spec_k": [row.parameters["spec_k"] for row in last],
            "job": [row.job for row in last],
        }
        | {name: pd.Series([row.values.get(name) for row in last], dtype=float) for name in values}
    )
    labels = [
        f"{row['point']}, spec-{row['spec_k']}, {row['acceptance_length']:.2f} tokens a step"
        if row["spec_k"]
        else row["point"] + ", plain"
        for row in table.to_dict("records")
    ]
    jobs = list(dict.fromkeys(table["job"]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 0.3 * len(table) + 1.8), sharey=True)
    for place, row in enumerate(table.to_dict("records")):
        series = jobs.index(row["job"]) % len(SERIES)
        style = {"color": SERIES[series][0], "marker": MARKERS[series], "linestyle": "none"}
        first = row["job"] not in list(table["job"][:place])
        right.plot([row["share_of_floor"]], [place], label=row["job"] if first else None, **style)
        if not pd.isna(row["speedup"]):
            left.hlines(place, row["speedup_p10"], row["speedup_p90"], color=SERIES[series][0], linewidth=3)
            left.plot([row["speedup"]], [place], **style)
    left.axvline(1.0, color=INK, linestyle=":", linewidth=1)
    left.set_yticks(range(len(labels)), labels, fontsize=SMALL)
    left.set_ylim(len(labels) - 0.4, -0.6)
    left.set(xlim=(0, None))
    right.set(xlim=(0, 1.02))
    left.set_xlabel("times plain decoding", fontsize=SMALL)
    right.set_xlabel("bytes' time over the step's", fontsize=SMALL)
    left.set_title("Speed-up, decoding only", fontsize=10)
    right.set_title("Share of the byte floor", fontsize=10)
    figure.legend(fontsize=SMALL, loc="outside lower center", ncols=3)
    caption = (
        "Dots are medians over rounds, bars span the 10th to the 90th percentile. A speed-up is the median of the "
        "ratio "
        "to plain decoding within a round, prefill left out; the table has it with prefill too. The floor is the time "
        "that "
        "the bytes of a step need at the read ceiling."
    )
    return Drawing(figure, table, _point_words(table), caption)


def _point_words(table: pd.DataFrame) -> str:
    text = f"Speed-up and share of the byte floor at {table['point'].nunique()} points."
    if table["speedup"].isna().all():
        return text
    best = table.loc[table["speedup"].idxmax()]
    return f"{text} The highest speed-up is {best['speedup']:.2f}, at {best['point']} with spec-{best['spec_k']}."


def _measured(rows: list[Row], kind: str, value: str) -> list[Row]:
    return [row for row in rows if row.kind == kind and row.status == "measured" and row.values.get(value) is not None]


def depth_of(row: Row) -> int | None:
    """The depth k of a row named `spec-k`."""
    stem, _, digits = row.name.rpartition("-")
    return int(digits) if stem == "spec" and digits.isdigit() else None


def _sentence(table: pd.DataFrame, label: str, value: str) -> str:
    """The numbers of a table as words, for an alternative text: `spec-1 1.80, spec-2 2.31`."""
    parts: list[Any] = [f"{row[label]} {row[value]:.2f}" for row in table.to_dict("records")]
    return ", ".join(parts)
