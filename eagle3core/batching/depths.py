"""The depth of each step where it is chosen anew: what the choice is told, and what its results are.

The host plans a step while the one before runs, so it knows results up to the one before that; what is under way is
reserved at its risk. Times are those between the marks that result blocks have anyway. Source: docs/requirements.md
R-03, R-12; `eagle3core.adaptive` chooses, or a limit alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection

from eagle3core.adaptive import Choice, History, Moment, StepCurve, choose
from eagle3core.config import EngineConfig
from eagle3core.request import Request
from eagle3core.step.outcome import Outcome
from eagle3core.step.run import DeviceRunner

log = logging.getLogger("eagle3core")

Choose = Callable[[StepCurve, History, Moment], Choice]


def depths_for(runner: DeviceRunner, config: EngineConfig) -> Depths | None:
    """Who chooses depths under these settings; None where every step has all drafts."""
    spec, most = config.speculative_config, config.max_tokens_per_step
    if not runner.sizes.n_kept or spec is None:
        return None
    return Depths(runner, most_tokens=most) if spec.adaptive else Depths(runner, StepCurve(), most, deepest)


def deepest(curve: StepCurve, history: History, moment: Moment) -> Choice:
    """As many drafts as are allowed, whatever they cost or gave."""
    return Choice(moment.depths[-1], "most that fit", 1.0, 0.0, 1.0)


class Depths:
    """Chooses for one runner, whose kinds of steps it knows.

    Args:
        curve: what steps take; by default as measured now, over empty slots.
        most_tokens: of a step over all its rows, those of the program's padding included; None: any number.

    Attributes:
        choose: the policy. history: what it is made of.
        counts: steps enqueued by (drafts, reason).
    """

    def __init__(
        self, runner: DeviceRunner, curve: StepCurve | None = None, most_tokens: int | None = None,
        choose: Choose = choose,
    ) -> None:  # fmt: skip
        self._runner, self._most_tokens = runner, most_tokens
        self.curve = curve or StepCurve(runner.time_steps())
        self.history, self.choose = History(runner.depth), choose
        self.counts: Counter[tuple[int, str]] = Counter()
        self._depths = sorted(kind for kind in runner.kinds if kind >= 0)
        self._moment, self._chosen = Moment(0, 0, (0,)), Choice(0, "plain", 1.0, 0.0, 1.0)
        self._under_way: dict[int, tuple[Moment, Choice, float]] = {}  # by step; with the risk that is reserved

    def next(self, running: Collection[Request]) -> int:
        """Drafts that are wanted of the next step."""
        n, depth = len(running), self._runner.depth
        cached = sum(len(request.prompt) + len(request.token_ids) for request in running)
        most = max(depth if r.most_drafts is None else min(r.most_drafts, depth) for r in running)
        # Of a tree a request may use the upper part, so it is drafted if anybody uses any.
        fits = [each for each in self._depths if each <= most or (most and len(self._depths) == 2)]
        if self._most_tokens is not None:  # no drafts always fit: the settings leave room for every root
            fits = [each for each in fits if not each or self._runner.rows_of_step(n, each) <= self._most_tokens]
        self._moment = Moment(self._runner.batch_of(n), cached // n, tuple(fits))
        self._chosen = self.choose(self.curve, self.history, self._moment)
        return self._chosen.depth

    def enqueued(self, step: int, kind: int) -> None:
        """Note that the step of that number is of that kind."""
        choice, depth = self._chosen, max(kind, 0)
        risk = choice.risk if depth == choice.depth else 0.0
        self.history.chose(depth, risk)
        self.counts[depth, choice.reason] += 1
        self._under_way[step] = (self._moment, choice, risk)

    def saw(self, outcome: Outcome) -> None:
        """Learn from what a step gave and took."""
        if outcome.step is None or outcome.step not in self._under_way:
            return
        moment, choice, risk = self._under_way.pop(outcome.step)
        over = choice.over_plain if outcome.n_drafts == choice.depth else 1.0
        accepted = [row.n_accepted for row in outcome.rows if not row.is_broken]
        self.history.saw(outcome.n_drafts, accepted, over, risk)
        if outcome.took_us is not None:
            self.curve.saw(outcome.n_drafts, moment.rows, moment.context, outcome.took_us)

    def forget(self) -> None:
        """Results under way will not be read."""
        self._under_way.clear()
        self.history.reserved = 0.0

    def line(self) -> str:
        """Steps by depth and reason, for the log."""
        return ", ".join(f"{n} of depth {depth} ({why})" for (depth, why), n in sorted(self.counts.items()))
