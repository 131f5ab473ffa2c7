"""Counters of speculation: per step, per request, and over a run.

Terms (docs/requirements.md 1.X-1, 1.X-19): the *acceptance length* of a step is the number of tokens it commits, the
bonus included. Steps that a stop or a length limit cut short are counted but left out of every mean, as is the token
that prefill samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from eagle3core.errors import ConfigError, InvariantViolated
from eagle3core.trees import StepTree

USUAL = "of the target's own choice"  # the rule that has no name of its own


@dataclass(frozen=True)
class StepRecord:
    """One verify step of one request.

    Attributes:
        start: index of the first committed token among the generated tokens.
        n_draft: tokens drafted.
        n_accepted: drafts the target agreed with.
        n_committed: tokens added to the output; n_accepted + 1 unless cut.
        cut: a stop or the length limit dropped committed tokens.
        ranks: the draft's rank of the target's token at each level whose prefix was right, -1 outside its vocabulary.
        tree: what was drafted, where the draft grew a tree.
        acceptance: the rule by which drafts were accepted; None: where they were the target's own choice.
        depth: drafts on the longest path, where that is chosen anew in every step; None: the engine's.
    """

    start: int
    n_draft: int
    n_accepted: int
    n_committed: int
    cut: bool
    ranks: tuple[int, ...] | None = None
    tree: StepTree | None = None
    acceptance: str | None = None
    depth: int | None = None


@dataclass(frozen=True)
class SpecInfo:
    """A request's speculation counters (docs/requirements.md R-121, R-122).

    Attributes:
        num_drafts: verify steps.
        num_draft_tokens: tokens drafted.
        num_accepted_tokens: drafts that were committed.
        num_rewound_tokens: drafted tokens taken back.
        rewind_steps: steps that took any back.
        num_cut_steps: steps cut short by a stop or a limit.
        accepted_histogram: entry a counts the complete steps that accepted a drafts.
        acceptance: the rule by which drafts were accepted; None: where they were the target's own choice.
        depth_histogram: entry d counts the complete steps of depth d; None where all have the engine's.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rewound_tokens: int
    rewind_steps: int
    num_cut_steps: int
    accepted_histogram: tuple[int, ...]
    acceptance: str | None = None
    depth_histogram: tuple[int, ...] | None = None

    @property
    def n_complete(self) -> int:
        """Verify steps that were not cut short."""
        return sum(self.accepted_histogram)

    @property
    def mean_accepted_draft_tokens(self) -> float | None:
        """Accepted drafts per complete step; None when there is none."""
        if not self.n_complete:
            return None
        return sum(a * n for a, n in enumerate(self.accepted_histogram)) / self.n_complete

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per complete verify step, bonus included, 1..k+1; None when there is no complete step."""
        drafts = self.mean_accepted_draft_tokens
        return None if drafts is None else drafts + 1.0

    @property
    def mean_acceptance_rate(self) -> float | None:
        """Accepted drafts over depth in complete steps, 0..1; None where none drafted."""
        drafts, depth = self.mean_accepted_draft_tokens, float(len(self.accepted_histogram) - 1)
        if self.depth_histogram is not None and self.n_complete:
            depth = sum(d * n for d, n in enumerate(self.depth_histogram)) / self.n_complete
        return None if drafts is None or depth == 0 else drafts / depth

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of complete steps that accepted at least i + 1 drafts, for i = 0..k-1."""
        n = self.n_complete
        depth = len(self.accepted_histogram) - 1
        return tuple(sum(self.accepted_histogram[i + 1 :]) / n for i in range(depth)) if n else ()

    def to_dict(self) -> dict[str, Any]:
        """The block users read: zero rewind counters are left out, means only where there are steps."""
        block: dict[str, Any] = {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }
        if self.num_rewound_tokens:
            block |= {"num_rewound_tokens": self.num_rewound_tokens, "rewind_steps": self.rewind_steps}
        if self.n_complete:
            block |= {
                "mean_acceptance_length": self.mean_acceptance_length,
                "mean_accepted_draft_tokens": self.mean_accepted_draft_tokens,
                "mean_acceptance_rate": self.mean_acceptance_rate,
            }
        return block | _named(self.acceptance)


def _named(acceptance: str | None) -> dict[str, Any]:
    """The rule as a block names it; nothing for the usual one."""
    return {} if acceptance is None else {"acceptance": acceptance}


def spec_info_from_steps(steps: list[StepRecord], depth: int) -> SpecInfo | None:
    """Counters of a request from its steps; None when it had no speculative step."""
    if not steps or depth == 0:
        return None
    histogram, depths = [0] * (depth + 1), [0] * (depth + 1)
    for step in steps:
        if not step.cut:
            histogram[step.n_accepted] += 1
            depths[depth if step.depth is None else step.depth] += 1
    rewound = [step.n_draft - step.n_accepted for step in steps]
    return SpecInfo(
        num_drafts=len(steps),
        num_draft_tokens=sum(step.n_draft for step in steps),
        num_accepted_tokens=sum(min(step.n_accepted, step.n_committed) for step in steps),
        num_rewound_tokens=sum(rewound),
        rewind_steps=sum(count > 0 for count in rewound),
        num_cut_steps=sum(step.cut for step in steps),
        accepted_histogram=tuple(histogram),
        acceptance=steps[0].acceptance,
        depth_histogram=tuple(depths) if any(step.depth is not None for step in steps) else None,
    )


@dataclass(frozen=True)
class RequestMetrics:
    """What a response tells of its own decoding.

    Attributes:
        spec_info: counters; None without a speculative step, never made up (docs/requirements.md R-122).
        steps: every verify step in order; empty when metrics are off.
        num_put_back: how often the request had to wait again, since blocks of the cache ran out.
        num_cached_tokens: tokens of the prompt that were not read, since their blocks lay in the prefix cache.
    """

    spec_info: SpecInfo | None = None
    steps: tuple[StepRecord, ...] = ()
    num_put_back: int = 0
    num_cached_tokens: int = 0


class HasMetrics(Protocol):
    """Anything that carries `req_metrics`, such as `eagle3core.Response`."""

    @property
    def req_metrics(self) -> RequestMetrics:
        """The request's counters."""


@dataclass
class SpeculativeDecodingStats:
    """Counters over many responses, step by step (docs/requirements.md R-123, 1.X-2).

    Attributes:
        num_spec_tokens: depth of the draft, k.
        accepted_histogram: entry a counts complete steps that accepted a drafts.
        acceptance: the rule by which drafts were accepted, one for all; None: where they were the target's own choice.
        depth_histogram: entry d counts complete steps of depth d.
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    acceptance: str | None = None
    depth_histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_histogram = self.accepted_histogram or [0] * (self.num_spec_tokens + 1)
        self.depth_histogram = self.depth_histogram or [0] * (self.num_spec_tokens + 1)

    def update_from_output(self, response: HasMetrics) -> None:
        """Add a response's counters; a response without spec_info changes nothing.

        Raises:
            ConfigError: the response was drafted at another depth, or accepted by another rule.
        """
        info = response.req_metrics.spec_info
        if info is None:
            return
        if len(info.accepted_histogram) != len(self.accepted_histogram):
            raise ConfigError(
                f"a response drafted at depth {len(info.accepted_histogram) - 1}",
                f"depth {self.num_spec_tokens}, which these counters are for",
                "keep one SpeculativeDecodingStats for each num_speculative_tokens",
            )
        if self.num_drafts and info.acceptance != self.acceptance:
            raise ConfigError(
                f"a response with acceptance {info.acceptance or USUAL}",
                f"acceptance {self.acceptance or USUAL}, which these counters are for",
                "keep one SpeculativeDecodingStats for each rule of acceptance",
            )
        self.acceptance = info.acceptance
        self.num_drafts += info.num_drafts
        self.num_draft_tokens += info.num_draft_tokens
        self.num_accepted_tokens += info.num_accepted_tokens
        for accepted, count in enumerate(info.accepted_histogram):
            self.accepted_histogram[accepted] += count
        for depth, count in enumerate(info.depth_histogram or (*([0] * self.num_spec_tokens), info.n_complete)):
            self.depth_histogram[depth] += count

    def update_per_draft(self, n_draft: int, n_accepted: int) -> None:
        """Add one complete verify step.

        Raises:
            InvariantViolated: more accepted than drafted or than the tree is deep (docs/requirements.md R-58).
        """
        if not 0 <= n_accepted <= min(n_draft, self.num_spec_tokens):
            raise InvariantViolated(
                f"{n_accepted} accepted of {n_draft} drafted tokens at depth {self.num_spec_tokens}",
                "0 <= accepted <= drafted, at most the depth",
                "report this: the counters and the acceptance walk disagree",
            )
        self.num_drafts += 1
        self.num_draft_tokens += n_draft
        self.num_accepted_tokens += n_accepted
        self.accepted_histogram[n_accepted] += 1
        self.depth_histogram[self.num_spec_tokens] += 1


@dataclass(frozen=True)
class EagleMetricsSummary:
    """Means over a run (docs/requirements.md R-124)."""

    num_drafts: int
    total_draft_tokens: int
    total_accepted_tokens: int
    mean_acceptance_rate: float
    mean_acceptance_length: float
    mean_accepted_draft_tokens: float
    fraction_steps_ge_2: float
    max_acceptance_length: int
    acceptance_by_position: tuple[float, ...]
    acceptance: str | None = None

    @classmethod
    def from_stats(cls, stats: SpeculativeDecodingStats) -> EagleMetricsSummary | None:
        """Summary of `stats`; None when no complete step was counted."""
        info = SpecInfo(
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            0,
            0,
            0,
            tuple(stats.accepted_histogram),
            depth_histogram=tuple(stats.depth_histogram),
        )
        length, accepted, rate = info.mean_acceptance_length, info.mean_accepted_draft_tokens, info.mean_acceptance_rate
        if length is None or accepted is None or rate is None:
            return None
        return cls(
            num_drafts=stats.num_drafts,
            total_draft_tokens=stats.num_draft_tokens,
            total_accepted_tokens=stats.num_accepted_tokens,
            mean_acceptance_rate=rate,
            mean_acceptance_length=length,
            mean_accepted_draft_tokens=accepted,
            # A step of acceptance length 2 or more accepted at least one draft.
            fraction_steps_ge_2=info.acceptance_by_position[0],
            max_acceptance_length=max(a for a, n in enumerate(info.accepted_histogram) if n) + 1,
            acceptance_by_position=info.acceptance_by_position,
            acceptance=stats.acceptance,
        )

    def to_dict(self) -> dict[str, Any]:
        """The `eagle_speculation` block of a benchmark record (docs/requirements.md R-125)."""
        counted = {name: value for name, value in self.__dict__.items() if name != "acceptance"}
        by_position = list(self.acceptance_by_position)
        return {"enabled": True, **counted, "acceptance_by_position": by_position, **_named(self.acceptance)}
