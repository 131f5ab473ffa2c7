"""Counting accepted drafts: lengths, positions, categories, and the cause of every miss. Needs no engine.

All means are over complete verify steps (docs/requirements.md 1.X-19): the token that prefill samples and steps cut
short by a stop or a length limit are left out. The loss is an identity, not a model: a step that accepts a of k drafts
loses k - a tokens, all at its first miss, so acceptance length = k + 1 - the sum of the losses by cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3core.metrics import StepRecord
from eagle3core.request import Response
from lab.acceptance.intervals import Interval, mean_interval
from lab.acceptance.loops import looped_tokens
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt

ACCEPTED = "rank 1, accepted"
OUTSIDE, NEAR, DEEP = "outside the draft vocabulary", "rank 2 to 4", "rank 5 or deeper"
REFUSED = "rank 1, yet refused"  # contradicts greedy acceptance: only a bug between draft and tree can do that
CAUSES = (OUTSIDE, NEAR, DEEP, REFUSED)
_NEAR_RANKS = 3  # ranks 1..3 counted from 0: the draft's second to fourth choice


@dataclass(frozen=True)
class CategoryAcceptance:
    """Acceptance on the prompts of one category."""

    category: str
    n_prompts: int
    n_steps: int
    length: Interval

    def row_values(self) -> dict[str, Any]:
        """What is stored of a category."""
        return {"n_prompts": self.n_prompts, "n_steps": self.n_steps, **self.length.values("acceptance_length")}


@dataclass(frozen=True)
class DepthAcceptance:
    """What was measured at one depth of speculation.

    Attributes:
        k: drafts a step.
        n_prompts, n_tokens: requests, and tokens generated in all.
        n_steps, n_cut: complete verify steps, and steps left out because a stop or limit shortened them.
        length: mean acceptance length, bonus included, 1..k+1.
        outside_loops: the same over steps none of whose committed tokens is looped.
        looped_share: looped tokens over generated tokens, 0..1.
        coverage: generated tokens that the draft vocabulary holds, 0..1.
        histogram: entry a counts steps that accepted a drafts.
        misses: steps by (position of the first miss from 0, draft's rank of the target's token, -1 outside).
        lost_outside_loops: tokens lost a step by cause, over the steps of `outside_loops`, with whose mean they add up
            to k + 1; None without such a step.
        categories: by category, in order of name. turns: by user turn ("turn 1", ...); empty where all ask the first.
        per_prompt: mean acceptance length of each prompt, None without a complete step.
        responses: the engine's own, for whoever counts differently.
    """

    k: int
    n_prompts: int
    n_tokens: int
    n_steps: int
    n_cut: int
    length: Interval
    outside_loops: Interval
    looped_share: float
    coverage: float
    histogram: tuple[int, ...]
    misses: Counter[tuple[int, int]]
    lost_outside_loops: dict[str, float] | None
    categories: tuple[CategoryAcceptance, ...]
    turns: tuple[CategoryAcceptance, ...]
    per_prompt: tuple[float | None, ...]
    responses: tuple[Response, ...]

    @property
    def by_position(self) -> tuple[float | None, ...]:
        """Share of steps that accepted the draft at position i and all before it, i = 0..k-1; None without a step."""
        return tuple(self._a_step(sum(self.histogram[i + 1 :])) for i in range(self.k))

    @property
    def given_prefix(self) -> tuple[float | None, ...]:
        """Acceptance at position i among the steps that reached it; None where none did."""
        reached = (1.0, *self.by_position)
        return tuple(p / r if p is not None and r else None for p, r in zip(self.by_position, reached, strict=False))

    @property
    def expected_if_independent(self) -> float | None:
        """Acceptance length if every position were as easy as the first: 1 + p + p^2 + ...; what chaining costs."""
        first = self.by_position[0]
        return None if first is None else 1.0 + sum(first ** (i + 1) for i in range(self.k))

    @property
    def loss_by_cause(self) -> dict[str, tuple[float, ...]]:
        """Tokens lost a step, by cause and by position of the first miss; all of them add up to k + 1 - length."""
        return _losses(self.k, self.misses, self.n_steps)

    @property
    def rank_shares(self) -> dict[str, tuple[float, ...]]:
        """By position, among the steps that reached it: accepted (rank 1), then each cause of a miss; 1 in all."""
        reached = [sum(self.histogram[i:]) for i in range(self.k)]
        shares = {ACCEPTED: [sum(self.histogram[i + 1 :]) / max(reached[i], 1) for i in range(self.k)]}
        shares |= {cause: [0.0] * self.k for cause in CAUSES}
        for (position, rank), count in self.misses.items():
            shares[cause_of(rank)][position] += count / reached[position]
        return {name: tuple(values) for name, values in shares.items()}

    def row_values(self) -> dict[str, Any]:
        """What is stored of a depth (names as docs/requirements.md 1.X-19 where it names them)."""
        accepted = sum(a * n for a, n in enumerate(self.histogram))
        return {
            **self.length.values("acceptance_length"),
            **self.outside_loops.values("acceptance_length_outside_loops"),
            "mean_accepted_draft_tokens": self._a_step(accepted),
            "mean_acceptance_rate": self._a_step(accepted / self.k),
            "acceptance_by_position": list(self.by_position) if self.n_steps else None,
            "accepted_histogram": list(self.histogram),
            "expected_if_independent": self.expected_if_independent,
            **{
                f"lost to {cause}": sum(values) if self.n_steps else None
                for cause, values in self.loss_by_cause.items()
            },
            **{f"lost outside loops to {cause}": lost for cause, lost in (self.lost_outside_loops or {}).items()},
            "looped_share": self.looped_share,
            "draft_vocabulary_coverage": self.coverage,
            "num_drafts": self.n_steps + self.n_cut,
            "num_cut_steps": self.n_cut,
            "n_tokens": self.n_tokens,
            "why": self.why,
        }

    def _a_step(self, count: float) -> float | None:
        """`count` over the complete steps; None where there is none, since nothing was measured."""
        return count / self.n_steps if self.n_steps else None

    @property
    def n_contradictions(self) -> int:
        """Misses whose wanted token was the draft's own first choice; anything but 0 is a bug."""
        return sum(count for (_, rank), count in self.misses.items() if rank == 0)

    @property
    def why(self) -> str:
        """One sentence that says where the tokens between this acceptance length and k + 1 are lost."""
        if self.length.mean is None:
            return f"At spec-{self.k} no verify step was complete, so there is no acceptance length."
        lost = {cause: sum(values) for cause, values in self.loss_by_cause.items()}
        total, rest = sum(lost.values()), self._why_outside_loops
        head = f"At spec-{self.k} a step commits {self.length.mean:.2f} of at most {self.k + 1} tokens"
        if not total:
            return f"{head}: every draft was accepted.{rest}"
        first = sum(values[0] for values in self.loss_by_cause.values()) / total
        bug = f", and {lost[REFUSED]:.2f} where its first choice was refused, a bug" if lost[REFUSED] else ""
        return (
            f"{head}; of the {total:.2f} lost, {lost[OUTSIDE]:.2f} go to tokens {OUTSIDE}, {lost[NEAR]:.2f} to tokens "
            f"at {NEAR} and {lost[DEEP]:.2f} at {DEEP} of the draft's order{bug}; {first:.0%} of the loss is at the "
            f"first drafted position.{rest}"
        )

    @property
    def _why_outside_loops(self) -> str:
        """The same of steps outside loops; empty where no token is looped, as nothing then differs."""
        lost, length = self.lost_outside_loops, self.outside_loops.mean
        if lost is None or length is None or not self.looped_share:
            return ""
        parts = [f"{value:.2f} {'' if cause == OUTSIDE else 'at '}{cause}" for cause, value in lost.items() if value]
        told = f"; of the {self.k + 1 - length:.2f} lost there: {', '.join(parts)}" if parts else ""
        return f" Outside loops a step commits {length:.2f}{told}."


def count_acceptance(
    k: int, prompts: Sequence[Prompt], responses: Sequence[Response], n_covered: Callable[[Sequence[int]], int]
) -> DepthAcceptance:
    """Everything that one depth's responses say.

    Raises:
        ExperimentError: steps without draft ranks: the engine was not asked for them.
    """
    complete = [[step for step in r.req_metrics.steps if not step.cut] for r in responses]
    loops = [looped_tokens(p.ids, r.token_ids) for p, r in zip(prompts, responses, strict=True)]
    unlooped = outside_loops(complete, loops)
    n_tokens = sum(len(r.token_ids) for r in responses)
    histogram = Counter(step.n_accepted for steps in complete for step in steps)
    by_category = {c: [i for i, p in enumerate(prompts) if p.category == c] for c in {p.category for p in prompts}}
    return DepthAcceptance(
        k=k,
        n_prompts=len(prompts),
        n_tokens=n_tokens,
        n_steps=sum(map(len, complete)),
        n_cut=sum(step.cut for r in responses for step in r.req_metrics.steps),
        length=acceptance_interval(complete),
        outside_loops=acceptance_interval(unlooped),
        looped_share=sum(map(sum, loops)) / n_tokens,
        coverage=sum(n_covered(r.token_ids) for r in responses) / n_tokens,
        histogram=tuple(histogram[a] for a in range(k + 1)),
        misses=_misses(k, complete),
        lost_outside_loops=_lost(k, unlooped),
        categories=tuple(_category(name, [complete[i] for i in by_category[name]]) for name in sorted(by_category)),
        turns=_by_turn(prompts, complete),
        per_prompt=tuple(_mean_committed(steps) for steps in complete),
        responses=tuple(responses),
    )


def outside_loops(steps: Sequence[Sequence[StepRecord]], loops: Sequence[Sequence[bool]]) -> list[list[StepRecord]]:
    """Of each prompt the steps none of whose committed tokens is looped."""
    return [
        [step for step in own if not any(loop[step.start : step.start + step.n_committed])]
        for own, loop in zip(steps, loops, strict=True)
    ]


def acceptance_interval(steps: Sequence[Sequence[StepRecord]], level: float = 0.95) -> Interval:
    """Committed tokens a step, with a percentile bootstrap over prompts (steps of one prompt are not independent)."""
    return mean_interval([(sum(s.n_committed for s in own), len(own)) for own in steps], level)


def cause_of(rank: int) -> str:
    """Why a draft was wrong, from its rank (from 0; -1 outside) of the target's token."""
    if rank <= 0:
        return OUTSIDE if rank < 0 else REFUSED
    return NEAR if rank <= _NEAR_RANKS else DEEP


def _misses(k: int, steps: Sequence[Sequence[StepRecord]]) -> Counter[tuple[int, int]]:
    return Counter(_miss(step) for own in steps for step in own if step.n_accepted < k)


def _losses(k: int, misses: Counter[tuple[int, int]], n_steps: int) -> dict[str, tuple[float, ...]]:
    """Tokens lost a step, by cause and by position of the first miss, 0..k-1."""
    lost = {cause: [0.0] * k for cause in CAUSES}
    for (position, rank), count in misses.items():
        lost[cause_of(rank)][position] += count * (k - position) / max(n_steps, 1)
    return {cause: tuple(values) for cause, values in lost.items()}


def _lost(k: int, steps: Sequence[Sequence[StepRecord]]) -> dict[str, float] | None:
    """Tokens lost a step by cause, of these steps alone; None without one."""
    n_steps = sum(map(len, steps))
    found = _losses(k, _misses(k, steps), n_steps)
    return {cause: sum(values) for cause, values in found.items()} if n_steps else None


def _miss(step: StepRecord) -> tuple[int, int]:
    if step.ranks is None or len(step.ranks) <= step.n_accepted:
        raise ExperimentError(
            f"a step that accepted {step.n_accepted} drafts has ranks {step.ranks}",
            "one rank a position up to the first miss",
            "set EngineConfig(collect_draft_ranks=True)",
        )
    return step.n_accepted, step.ranks[step.n_accepted]


def _by_turn(prompts: Sequence[Prompt], steps: Sequence[Sequence[StepRecord]]) -> tuple[CategoryAcceptance, ...]:
    n_turns = max(prompt.turn for prompt in prompts)
    own = [[s for p, s in zip(prompts, steps, strict=True) if p.turn == turn + 1] for turn in range(n_turns)]
    return tuple(_category(f"turn {i}", part) for i, part in enumerate(own, start=1)) if n_turns > 1 else ()


def _category(name: str, steps: Sequence[Sequence[StepRecord]]) -> CategoryAcceptance:
    return CategoryAcceptance(name, len(steps), sum(map(len, steps)), acceptance_interval(steps))


def _mean_committed(steps: Sequence[StepRecord]) -> float | None:
    return sum(step.n_committed for step in steps) / len(steps) if steps else None
