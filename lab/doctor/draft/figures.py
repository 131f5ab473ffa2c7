"""The lamps of a head as a picture, and what they rest on: acceptance by level, and drafts without a model."""

from __future__ import annotations

import pandas as pd

from lab.doctor.draft.examine import Diagnosis, base_table
from lab.figures import FAINT, Drawing

MOST_BARS = 6


def lamps_table(diagnosis: Diagnosis) -> pd.DataFrame:
    """A row a lamp: red ones first, by what mending them gives."""
    rows = []
    for each in diagnosis.judged:
        repair = each.finding.repair
        rows.append({
            "lamp": each.lamp.name, "colour": each.finding.colour.replace("unknown", "cannot tell"),
            "before": repair.before if repair else None, "if fixed": repair.after if repair else None,
            "change": repair.change if repair else "", "because": each.finding.said,
        })  # fmt: skip
    return pd.DataFrame(rows)


def lamps(diagnosis: Diagnosis) -> Drawing:
    """Of every red lamp a bar to the acceptance length that mending it gives, beside the length as it is."""
    from matplotlib import pyplot as plt

    table = lamps_table(diagnosis)
    measured = table[table["if fixed"].notna()].head(MOST_BARS)
    fig, axes = plt.subplots(figsize=(7.2, 1.5 + 0.35 * max(len(measured), 1)))
    places = range(len(measured))
    axes.barh(places, measured["if fixed"], height=0.55, label="if fixed")
    axes.barh(places, measured["before"], height=0.55, color=FAINT, hatch="//", label="as it is")
    for place, (before, after) in enumerate(zip(measured["before"], measured["if fixed"], strict=True)):
        axes.text(after, place, f" {before:.2f} -> {after:.2f}", va="center")
    if measured.empty and diagnosis.length is not None:
        axes.barh([0], [diagnosis.length], height=0.55, label="as it is: no lamp is red")
    axes.set_yticks(list(places) or [0], list(measured["lamp"]) or ["this head"])
    axes.invert_yaxis()
    axes.set_xlim(0, max([*measured["if fixed"], diagnosis.length or 1.0]) * 1.3)
    axes.set_xlabel("tokens a verify step")
    fig.legend(loc="outside upper right", ncols=2, fontsize=8.5)
    alt = f"Acceptance length as it is, and with each red lamp mended. {diagnosis.verdict}"
    caption = (
        "Tokens committed by a verify step, bonus included. The table has every lamp with its change and its reason."
    )
    return Drawing(fig, table, alt, caption)


def base(diagnosis: Diagnosis) -> Drawing:
    """Conditional acceptance by level, fed its own drafts and with the truth; beside it lengths without a model."""
    from matplotlib import pyplot as plt

    assert diagnosis.base is not None, "drawn of a head that was measured"
    table = pd.DataFrame(base_table(diagnosis.base))
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.0), width_ratios=(3, 2))
    left.plot(table["level"], table["self_fed"].astype(float), label="fed its own drafts and states")
    left.plot(table["level"], table["teacher_forced"].astype(float), label="with the true ones")
    left.set_xticks(table["level"])
    left.set_ylim(0, 1)
    left.set_xlabel("level of the chain")
    left.set_ylabel("accepted, given all before")
    left.legend(fontsize=8.5)
    lengths = {"head": diagnosis.length or 0.0}
    if diagnosis.comparison is not None:
        lengths |= {control.name: control.length.mean or 0.0 for control in diagnosis.comparison.controls}
    right.bar(list(lengths), list(lengths.values()), width=0.6)
    right.set_ylabel("tokens a verify step")
    alt = (
        "Conditional acceptance by level of the chain, self-fed and with the truth; and the length of drafts without a "
        "model."
    )
    caption = (
        "Left: over every place of the texts. Right: the engine's acceptance length beside drafts without a model."
    )
    return Drawing(fig, table, alt, caption)
