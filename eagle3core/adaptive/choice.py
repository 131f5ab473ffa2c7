"""Which depth the next step has: the one that gives the most tokens a second, as far as a loss is covered.

Tokens a second are the expected tokens of a row over the time of the step. What a step may lose beside plain decoding,
if no more is right than can be counted on, has to be covered by the balance; where nothing pays, one step in `LOOKS`
drafts again if that is covered, sooner while little was seen and later while it is in vain.
Source: docs/requirements.md R-03; derived here.
"""

from __future__ import annotations

from typing import NamedTuple

from eagle3core.adaptive.curve import StepCurve
from eagle3core.adaptive.history import History

LOOKS = 16  # steps without drafts after which one drafts again, at the soonest
LEARNS = 8  # rows whose results make a first opinion: until a step gives as many, it may risk its share of the balance
SETTLES = 32  # rows whose results make an opinion that is left alone for long: the fewer were seen, the sooner a look
CHANGES = 1.01  # a change has to be so much better: a step down costs a step without drafts


class Moment(NamedTuple):
    """What is known before a step.

    Attributes:
        rows: of the step's program. context: tokens in a row's cache.
        depths: that may be chosen, ascending, 0 first.
    """

    rows: int
    context: int
    depths: tuple[int, ...]


class Choice(NamedTuple):
    """A step's depth, and why.

    Attributes:
        depth: drafts a row. reason: "best", "look" (nothing pays, and it was time to try), "plain" (nothing pays) or
            "not covered" (what seems best may lose more than the balance has).
        over_plain: time of the step over that of a plain one. risk: plain steps that it may lose.
        gain: tokens a second expected, over those of plain decoding.
    """

    depth: int
    reason: str
    over_plain: float
    risk: float
    gain: float


def choose(curve: StepCurve, history: History, moment: Moment) -> Choice:
    """The next step's depth; a pure function."""
    rows, context, depths = moment
    lengths, sure = history.lengths(), history.sure_lengths()
    plain_us = curve.time_us(0, rows, context)
    over = {depth: curve.time_us(depth, rows, context) / plain_us for depth in depths}
    gains = {depth: lengths[depth] / over[depth] for depth in depths}
    risks = {depth: max(0.0, over[depth] - sure[depth]) for depth in depths}
    # What is under way counts twice: its results may show that another such step is not worth its risk.
    free = max(0.0, history.balance - 2.0 * history.reserved) * min(1.0, rows / LEARNS)

    def choice(depth: int, reason: str) -> Choice:
        return Choice(depth, reason, over[depth], risks[depth], gains[depth])

    best = max(depths, key=lambda depth: (gains[depth], -depth))
    if gains[best] <= CHANGES * gains.get(history.last, 0.0):
        best = history.last
    if best:
        covered = [depth for depth in depths[1:] if risks[depth] <= free and gains[depth] >= 1.0]
        if best in covered:
            return choice(best, "best")
        if covered:
            return choice(max(covered, key=lambda depth: gains[depth]), "not covered")
    if len(depths) > 1:
        look = depths[1]
        settled = min(1.0, history.n_rows / SETTLES) if history.n_rows else 1.0  # first drafts' results are waited for
        if history.n_plain >= settled * max(LOOKS, risks[look] / history.regained) and risks[look] <= free:
            return choice(look, "look")
    return choice(0, "not covered" if best else "plain")
