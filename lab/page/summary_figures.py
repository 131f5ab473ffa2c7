"""The two pictures a night is remembered by: acceptance length by depth, and speed with and without the draft."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lab.figures import INK
from lab.rows.store import Row

Drawn = tuple[Figure, pd.DataFrame]


def acceptance(rows: list[Row]) -> Drawn | None:
    """Acceptance length by depth of speculation, beside the most there could be; None without such rows.

    Table: spec_k, acceptance_length, outside_loops, most (spec_k + 1: every draft accepted, bonus included).
    """
    found = [row for row in _measured(rows, "acceptance", "acceptance_length") if _depth(row) is not None]
    if not found:
        return None
    table = pd.DataFrame(
        {
            "spec_k": [_depth(row) for row in found],
            "acceptance_length": [row.values["acceptance_length"] for row in found],
            "outside_loops": [row.values.get("acceptance_length_outside_loops") for row in found],
        }
    ).sort_values("spec_k", ignore_index=True)
    table["most"] = table["spec_k"] + 1
    figure, axes = plt.subplots()
    axes.plot(table["spec_k"], table["acceptance_length"], label="all steps")
    if table["outside_loops"].notna().any():
        axes.plot(table["spec_k"], table["outside_loops"].astype(float), label="outside loops")
    axes.plot(
        table["spec_k"], table["most"], color=INK, linestyle=":", marker="", linewidth=1, label="every draft accepted"
    )
    axes.set(xlabel="drafts a step", ylabel="tokens a verify step", ylim=(1, None), xticks=table["spec_k"])
    axes.set_title("Acceptance length by depth")
    axes.legend()
    return figure, table


def speeds(rows: list[Row]) -> Drawn | None:
    """Tokens a second of plain decoding and of each depth, with p10 to p90 where recorded; None without such rows.

    Table: mode, tokens_per_s, p10, p90, against_plain (ratio to the first mode).
    """
    found = _measured(rows, "decode", "tokens_per_s")
    if not found:
        return None
    rates = [float(row.values["tokens_per_s"]) for row in found]  # type: ignore[arg-type]
    table = pd.DataFrame(
        {
            "mode": [row.name for row in found],
            "tokens_per_s": rates,
            "p10": [row.values.get("tokens_per_s_p10") for row in found],
            "p90": [row.values.get("tokens_per_s_p90") for row in found],
            "against_plain": [rate / rates[0] for rate in rates],
        }
    )
    figure, axes = plt.subplots(figsize=(7.2, 0.55 * len(table) + 1.4))
    axes.barh(table["mode"], table["tokens_per_s"], height=0.6)
    low, high = table["p10"].astype(float), table["p90"].astype(float)
    if low.notna().all() and high.notna().all():
        spread = [table["tokens_per_s"] - low, high - table["tokens_per_s"]]
        axes.errorbar(rates, table["mode"], xerr=spread, fmt="none", ecolor=INK, capsize=3, linewidth=1)
    ends = high.fillna(table["tokens_per_s"])
    for place, (end, rate, ratio) in enumerate(zip(ends, rates, table["against_plain"], strict=True)):
        label = f"{rate:.0f} ({ratio:.2f}×)"
        axes.annotate(label, (end, place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set(xlabel="tokens a second, median", xlim=(0, max(ends) * 1.25))
    axes.set_title("Decoding speed by mode")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure, table


def _measured(rows: list[Row], kind: str, value: str) -> list[Row]:
    return [row for row in rows if row.kind == kind and row.status == "measured" and row.values.get(value) is not None]


def _depth(row: Row) -> int | None:
    """The depth k of a row named `spec-k`."""
    stem, _, digits = row.name.rpartition("-")
    return int(digits) if stem == "spec" and digits.isdigit() else None


def sentence(table: pd.DataFrame, label: str, value: str) -> str:
    """The numbers of a table as words, for an alternative text: `spec-1 1.80, spec-2 2.31`."""
    parts: list[Any] = [f"{row[label]} {row[value]:.2f}" for row in table.to_dict("records")]
    return ", ".join(parts)
