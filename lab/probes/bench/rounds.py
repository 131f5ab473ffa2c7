"""Rounds: one mode over the same work, timed as a whole, and the interleaving that makes modes comparable.

In every round each mode does its work once, the order turned around every other round, so that a drift of the machine
meets all modes alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.request import Response, without_errors
from eagle3core.trace import Trace
from eagle3core.weights import PackedTarget
from lab.probes.bench.clocks import PhaseClock, synchronise
from lab.rows.clock import quantile

K = TypeVar("K")
R = TypeVar("R")
WARM_STEPS = 2  # of a round: the first steps follow a prefill, whose last work may still run


@dataclass(frozen=True)
class FullWindow:
    """The part of a round in which every request was decoding: no slot had run empty yet.

    Attributes:
        seconds: wall time of its steps.
        n_steps, n_tokens: steps of the batch, and tokens they committed.
    """

    seconds: float
    n_steps: int
    n_tokens: int

    @property
    def step_ms(self) -> float:
        """Mean time of a step, milliseconds."""
        return self.seconds / self.n_steps * 1e3

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens a second, over the batch."""
        return self.n_tokens / self.seconds


@dataclass(frozen=True)
class Round:
    """One mode over all prompts, once.

    Attributes:
        total_s: wall time, without rests (`clocks.rest`).
        prefill_s: part of it spent in prefills.
        n_tokens: generated tokens; the first of each request comes from its prefill.
        n_requests, n_steps: requests, and decode steps of the batch.
        full: the steps with every slot in use; None where requests waited for a slot or ended too soon to tell.
    """

    total_s: float
    prefill_s: float
    n_tokens: int
    n_requests: int
    n_steps: int
    full: FullWindow | None = None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefills included."""
        return self.n_tokens / self.total_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of decode steps a second of decoding."""
        return (self.n_tokens - self.n_requests) / (self.total_s - self.prefill_s)

    @property
    def step_ms(self) -> float:
        """Mean time of a decode step, milliseconds."""
        return (self.total_s - self.prefill_s) / self.n_steps * 1e3


@dataclass(frozen=True)
class Spread:
    """Median of the rounds with their 10th and 90th percentile."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.samples)

    @property
    def p10(self) -> float:
        """What nine rounds in ten exceed."""
        return quantile(self.samples, 0.1)

    @property
    def p90(self) -> float:
        """What one round in ten exceeds."""
        return quantile(self.samples, 0.9)

    def values(self, name: str) -> dict[str, float | list[float]]:
        """Row values: the median as `name`, its percentiles and samples beside it."""
        return {
            name: self.median,
            f"{name}_p10": self.p10,
            f"{name}_p90": self.p90,
            f"{name}_samples": list(self.samples),
        }


def within_rounds(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, round by round: the one definition of every speed-up and step ratio of the lab.

    Both ran in the same rounds, so a drift of the machine cancels in each ratio; a ratio of two medians would pair one
    side's slow round with the other's fast one.
    """
    return Spread(tuple(our / their for our, their in zip(ours, theirs, strict=True)))


def interleave(
    runs: Mapping[K, Callable[[], R]],
    *,
    rounds: int,
    warmup: int,
    on_round: Callable[[int], None] | None = None,
) -> dict[K, list[R]]:
    """Results of every run of `runs`, one a round, in an order that turns around every other round.

    `on_round` gets the number of each round before it starts, warm-up rounds (whose results are dropped) below 0.
    """
    measured: dict[K, list[R]] = {key: [] for key in runs}
    for number in range(-warmup, rounds):
        if on_round is not None:
            on_round(number)
        for key in list(runs) if number % 2 == 0 else reversed(list(runs)):
            result = runs[key]()
            if number >= 0:
                measured[key].append(result)
    return measured


class Work:
    """An engine and the prompts it decodes, again and again.

    Args:
        rests: whether a GPU is left idle between a prefill and its steps (`clocks.rest`).

    Attributes:
        responses: of the last pass.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], generation: GenerationConfig, *, rests: bool = True
    ) -> None:
        self.engine, self.prompts, self.generation, self.rests = engine, prompts, generation, rests
        self.responses: list[Response] = []

    @property
    def tokens(self) -> list[list[int]]:
        """Generated tokens of every prompt in the last pass."""
        return [list(response.token_ids) for response in self.responses]

    def decode(self, trace: Trace) -> None:
        """Generate for every prompt once, under `trace`."""
        self.engine.trace = trace
        self.responses = without_errors(self.engine.generate(self.prompts, self.generation))

    def run(self) -> Round:
        """One round."""
        device = self.engine.target.device
        clock = PhaseClock(device, rests=self.rests)
        synchronise(device)
        start = time.perf_counter()
        self.decode(clock)
        synchronise(device)
        total = time.perf_counter() - start - clock.rest_s
        n_tokens = sum(len(response.token_ids) for response in self.responses)
        full = full_window(self.responses, clock.step_ends_s, self.engine.config.max_batch_size)
        return Round(total, clock.prefill_s, n_tokens, len(self.responses), clock.n_steps, full)


@dataclass(frozen=True)
class Sustained:
    """Steps in one pass that nothing interrupts, after its prefill; or why there are none.

    Attributes:
        window: the steps. n_tokens: generated a request; the session holds them all, so its cache grows further than a
            round's.
        clocks: of the GPU, `before_*` the prefill and `after_*` the steps.
    """

    window: FullWindow | None
    n_tokens: int
    clocks: Mapping[str, float | str | None]
    reason: str = ""


def tokens_to_sustain(n_steps: int, k: int) -> int:
    """Tokens a request that take at least `n_steps` steps of `k` drafts, those not counted aside."""
    return (n_steps + WARM_STEPS + 2) * (k + 1)


def without_taps(target: PackedTarget) -> PackedTarget:
    """The target as a plain engine has it: one that captures nothing must not pay for it."""
    return replace(target, taps=())


def acceptance_length(responses: Sequence[Response]) -> float | None:
    """Tokens a complete verify step committed on average, bonus included; None without such a step."""
    steps = [step for response in responses for step in response.req_metrics.steps if not step.cut]
    return sum(step.n_committed for step in steps) / len(steps) if steps else None


def full_window(responses: Sequence[Response], step_ends_s: Sequence[float], n_slots: int) -> FullWindow | None:
    """The steps of a round in which all requests were decoding, the first `WARM_STEPS` and the last left out."""
    committed = [committed_by_step(response) for response in responses]
    n_full = min(map(len, committed)) - 1  # the last step of the first request to end may be cut
    if len(responses) > n_slots or n_full <= WARM_STEPS:
        return None
    seconds = step_ends_s[n_full - 1] - step_ends_s[WARM_STEPS - 1]
    n_tokens = sum(sum(counts[WARM_STEPS:n_full]) for counts in committed)
    return FullWindow(seconds, n_full - WARM_STEPS, n_tokens)


def committed_by_step(response: Response) -> list[int]:
    """Tokens each step of a request committed; a plain step commits one, and the first token came from prefill."""
    steps = response.req_metrics.steps
    return [step.n_committed for step in steps] if steps else [1] * (len(response.token_ids) - 1)
