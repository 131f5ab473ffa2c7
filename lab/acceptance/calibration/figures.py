"""Formats of a target's weights, one beside the other: what they cost in loss, and how often they choose otherwise."""

from __future__ import annotations

import pandas as pd

from lab.acceptance.calibration.measure import Calibration
from lab.acceptance.intervals import Interval
from lab.figures import Drawing, look_of


def quality_table(calibration: Calibration) -> pd.DataFrame:
    """One row a format."""
    return pd.DataFrame([{"format": one.name, **one.row_values()} for one in calibration.formats])


def quality(calibration: Calibration) -> Drawing:
    """Change of the held-out loss, and share of places whose likeliest token is another one, by format."""
    from matplotlib import pyplot as plt

    others = calibration.formats[1:]
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.2, 1.4 + 0.5 * len(others)), sharey=True)
    differing = [_rest_of(one.agreement) for one in others]
    for axes, intervals, title in (
        (left, [one.change for one in others], "change of the loss, nats a token"),
        (right, differing, "share of likeliest tokens that differ"),
    ):
        for y, interval in enumerate(intervals):
            low, high = (interval.mean if end is None else end for end in (interval.low, interval.high))
            axes.plot([low, high], [y, y], **{**look_of("ours"), "marker": ""})
            axes.plot([interval.mean], [y], **{**look_of("ours"), "linestyle": ""})
        axes.axvline(0, **{**look_of("expected"), "marker": "", "linewidth": 1})
        axes.set_xlabel(title)
    left.set_yticks(range(len(others)), [one.name for one in others])
    left.set_ylim(len(others) - 0.5, -0.5)
    caption = (
        f"Each place is a request of the engine: {calibration.n_places} places of {calibration.n_prompts} prompts, "
        f"beside the maps as stored, in {calibration.dtype}. Lines are 95% bootstrap intervals over prompts."
    )
    return Drawing(fig, quality_table(calibration), f"Formats of the target's maps. {calibration.verdict}", caption)


def _rest_of(share: Interval) -> Interval:
    """One minus a share."""
    mean, low, high = (None if value is None else 1 - value for value in (share.mean, share.low, share.high))
    return Interval(mean, high, low)
