"""The head's acceptance length beside that of drafts without a model, by depth: the picture and its table."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lab.acceptance.controls import CONTROLS, Comparison, ControlAcceptance
from lab.acceptance.counts import DepthAcceptance
from lab.figures import Drawing, look_of

HEAD = "head"
DRAFTERS = dict(zip((HEAD, *CONTROLS), ("ours", "other", "expected", "plain"), strict=True))  # what each is drawn as


def controls_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """One row a depth and drafter; the head first."""
    rows = []
    for comparison in comparisons:
        drafters: dict[str, DepthAcceptance | ControlAcceptance] = {HEAD: comparison.depth}
        drafters |= {control.name: control for control in comparison.controls}
        for name, measured in drafters.items():
            rows.append({
                "mode": f"spec-{comparison.depth.k}", "drafts": name, "acceptance_length": measured.length.mean,
                "low": measured.length.low, "high": measured.length.high,
                "outside_loops": measured.outside_loops.mean, "steps": measured.n_steps,
            })  # fmt: skip
    return pd.DataFrame(rows)


def controls(comparisons: Sequence[Comparison], k: int) -> Drawing:
    """Acceptance length by depth of the head and of every control, of all steps and outside loops; in words, at `k`."""
    from matplotlib import pyplot as plt

    table = controls_table(comparisons)
    fig, sides = plt.subplots(1, 2, figsize=(7.2, 3.4), sharey=True)
    for axes, column, title in zip(
        sides, ("acceptance_length", "outside_loops"), ("of all steps", "outside loops"), strict=True
    ):
        for name in (HEAD, *CONTROLS):
            values = table.loc[table["drafts"] == name, column].astype(float)
            axes.plot(range(len(comparisons)), values, label=name, **look_of(DRAFTERS[name]))
        axes.set_xticks(range(len(comparisons)), [f"spec-{each.depth.k}" for each in comparisons])
        axes.set_title(title)
        axes.set_ylim(bottom=0.9)
    sides[0].set_ylabel("tokens a verify step")
    sides[0].legend(fontsize=8.5)
    told = next(each for each in comparisons if each.depth.k == k)
    alt = f"Acceptance length by depth of the head and of drafts without a model. {told.verdict}"
    caption = (
        "What each drafter accepts of the same text. ngram and suffix look up what followed earlier in the request's "
        "own "
        "text; bigram takes the token that most often follows in the prompts."
    )
    return Drawing(fig, table, alt, caption)
