"""What reading prompts costs the requests that run, and what reading short ones in common passes saves.

Times are the host's, of tokens that it knows, which on a GPU is when the step after them has been enqueued.
Source: docs/requirements.md R-89.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median

from eagle3core.config import GenerationConfig
from eagle3core.request import RequestHandle
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.identity import compare_tokens
from lab.probes.proofs.subject import Setting, Subject, WatchedEngine
from lab.probes.proofs.timed import CollectorClock

PART = "waiting"
MOST_WAIT_MS = 60.0
LEAST_SPEED = 0.45
WARM_STEPS = 8
COLLECTED_MS = 1.0  # of garbage collections are worth a word
HEADROOM = 16  # tokens of a session beyond the longest prompt


@dataclass(frozen=True)
class WaitingPlan:
    """What is measured.

    Attributes:
        running: requests that run, each after a prompt of `context` tokens. k: drafts a step. n_steps: before the long
            prompt arrives.
        long: tokens of the prompt that arrives. share: `EngineConfig.prefill_share`.
        n_short, short: prompts that arrive together, and tokens of each, at most those of a span.
    """

    running: int = 4
    context: int = 512
    k: int = 3
    n_steps: int = 100
    long: int = 32768
    share: float = 0.5
    n_short: int = 20
    short: int = 64

    def beside(self) -> Setting:
        """The engine whose requests run while a long prompt is read."""
        return Setting(self.k, self.running + 1, self.long + HEADROOM)

    def together(self) -> Setting:
        """The engine that short prompts arrive at."""
        return Setting(self.k, self.n_short, self.short + HEADROOM)

    def settings(self) -> list[Setting]:
        """Every engine that is made."""
        return [self.beside(), self.together()]


@dataclass(frozen=True)
class BesideReading:
    """Running requests before and while a long prompt was read.

    Attributes:
        waits_ms: between two times at which a running request got tokens, from the prompt's arrival to its first token.
        before, during: tokens a second, of all of them. reading_s: from arrival to first token. n_passes: of it.
        right: whether all tokens are the planted ones.
    """

    waits_ms: tuple[float, ...]
    before: float
    during: float
    reading_s: float
    n_passes: int
    right: Verdict


@dataclass(frozen=True)
class Arrivals:
    """Short prompts read together, and each alone one after the other.

    Attributes:
        n_passes, alone_passes: of all of them. least_passes: as many spans as there are prompts take.
        first_s, alone_s: when each one's first token was known, by order; alone after those before.
        right: whether all tokens are the planted ones.
        collected_ms, alone_collected_ms: of the time of all of them, what garbage collections took.
    """

    n_passes: int
    alone_passes: int
    least_passes: int
    first_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    right: Verdict
    collected_ms: float = 0.0
    alone_collected_ms: float = 0.0


class TokenTimes:
    """When requests got tokens."""

    def __init__(self, handles: Sequence[RequestHandle]) -> None:
        self.handles = handles
        self.times: list[list[float]] = [[] for _ in handles]
        self._n = [0] * len(handles)

    @property
    def n_tokens(self) -> int:
        """Tokens of all requests so far."""
        return sum(self._n)

    def note(self) -> float:
        """Look who has new tokens; the time."""
        now = time.perf_counter()
        for i, handle in enumerate(self.handles):
            if len(handle.token_ids) > self._n[i]:
                self._n[i] = len(handle.token_ids)
                self.times[i].append(now)
        return now

    def waits_ms(self, since: float) -> tuple[float, ...]:
        """Times between tokens of a request, of those that ended after `since`."""
        pairs = [pair for times in self.times for pair in pairwise(times)]
        return tuple((after - before) * 1e3 for before, after in pairs if after >= since)


class Waiting:
    """Checks of one planted pair.

    Args:
        prompts: `prompts(n, length)`.
    """

    def __init__(self, subject: Subject, prompts: Callable[[int, int], list[list[int]]], plan: WaitingPlan) -> None:
        self.subject = replace(subject, settings={**subject.settings, "prefill_share": plan.share})
        self.prompts, self.plan = prompts, plan

    def checks(self) -> list[Check]:
        """The longest wait, the speed that is kept, and the prompts that come together."""
        plan, name = self.plan, self.subject.name
        shared = {"pair": name, "spec_k": plan.k}
        beside = {**shared, "running": plan.running, "context": plan.context, "long": plan.long, "share": plan.share}
        short = {**shared, "n_short": plan.n_short, "short": plan.short}
        return [
            Check(PART, f"{name} longest wait", beside, lambda: judge_wait(self.beside)),
            Check(PART, f"{name} speed kept", beside, lambda: judge_speed(self.beside)),
            Check(PART, f"{name} {plan.n_short} short prompts", short, lambda: judge_passes(self.arrivals)),
        ]

    @cached_property
    def beside(self) -> BesideReading:
        """Requests that run, a while alone and then beside a long prompt."""
        plan, setting = self.plan, self.plan.beside()
        engine = self.subject.engine(setting)
        prompts, [long] = self.prompts(plan.running, plan.context), self.prompts(1, plan.long)
        limit = GenerationConfig(setting.session_len - plan.context, ignore_eos=True)
        handles = [engine.add_request(prompt, limit) for prompt in prompts]
        times = TokenTimes(handles)
        began, n_began = _stepped(engine, times, WARM_STEPS), times.n_tokens
        arrived, n_arrived = _stepped(engine, times, plan.n_steps), times.n_tokens
        n_passes = engine.book.n_passes
        reads = engine.add_request(long, GenerationConfig(HEADROOM, ignore_eos=True))
        while not reads.token_ids:
            engine.step()
            known = times.note()
        n_known, n_passes = times.n_tokens, engine.book.n_passes - n_passes
        _stepped(engine, times, 1)  # the wait that the last pass made
        right = self._right([*prompts, long], [*handles, reads])
        for handle in [*handles, reads]:
            engine.cancel(handle.id)
        return BesideReading(
            times.waits_ms(arrived), (n_arrived - n_began) / (arrived - began),
            (n_known - n_arrived) / (known - arrived), known - arrived, n_passes, right,
        )  # fmt: skip

    @cached_property
    def arrivals(self) -> Arrivals:
        """Short prompts that come together, and one by one."""
        plan = self.plan
        engine, prompts = self.subject.engine(plan.together()), self.prompts(plan.n_short, plan.short)
        engine.generate([prompts[0]], GenerationConfig(2, ignore_eos=True))  # whatever is made on first use
        handles: list[RequestHandle] = []
        passes = [engine.book.n_passes]
        with CollectorClock() as collector:
            together = first_tokens(engine, prompts, handles)
        passes.append(engine.book.n_passes)
        with CollectorClock() as alone_collector:
            alone = [first_tokens(engine, [prompt], handles)[0] for prompt in prompts]
        passes.append(engine.book.n_passes)
        return Arrivals(
            passes[1] - passes[0], passes[2] - passes[1], -(-plan.n_short // engine.runner.sizes.n_spans),
            tuple(together), tuple(sum(alone[: i + 1]) for i in range(len(alone))),
            self._right([*prompts, *prompts], handles), collector.ms, alone_collector.ms,
        )  # fmt: skip

    def _right(self, prompts: Sequence[Sequence[int]], handles: Sequence[RequestHandle]) -> Verdict:
        tokens = self.subject.tokens
        assert tokens is not None, "the pair is planted"
        got = [list(handle.token_ids) for handle in handles]
        wanted = [tokens.follow(prompt[-1], len(one)) for prompt, one in zip(prompts, got, strict=True)]
        return compare_tokens(got, wanted)


def _stepped(engine: WatchedEngine, times: TokenTimes, n: int) -> float:
    """`n` rounds; when the last one was over."""
    for _ in range(n):
        engine.step()
        now = times.note()
    return now


def first_tokens(engine: WatchedEngine, prompts: Sequence[Sequence[int]], handles: list[RequestHandle]) -> list[float]:
    """Seconds from the arrival of prompts to each one's first token; the requests run to their ends."""
    start = time.perf_counter()
    added = [engine.add_request(prompt, GenerationConfig(HEADROOM // 2, ignore_eos=True)) for prompt in prompts]
    times = TokenTimes(added)
    while not engine.book.is_empty:
        engine.advance()
        times.note()
    handles.extend(added)
    return [seen[0] - start for seen in times.times]


def judge_wait(found: BesideReading) -> Verdict:
    """Whether no running request waited longer for a token than it may."""
    longest = max(found.waits_ms)
    values = {
        **found.right.values, "longest_wait_ms": longest, "median_wait_ms": median(found.waits_ms),
        "most_wait_ms": MOST_WAIT_MS, "n_waits": len(found.waits_ms), "reading_s": found.reading_s,
        "n_passes": found.n_passes,
    }  # fmt: skip
    detail = (
        f"{found.right.detail}; {longest:.1f} ms (at most {MOST_WAIT_MS:.0f}), median {median(found.waits_ms):.1f} ms; "
        f"the prompt was read in {found.reading_s:.2f} s and {found.n_passes} passes"
    )
    return Verdict(_and(found.right, longest <= MOST_WAIT_MS), detail, values)


def judge_speed(found: BesideReading) -> Verdict:
    """Whether running requests kept the share of their speed that they are promised."""
    ratio = found.during / found.before
    values = {
        **found.right.values, "speed_ratio": ratio, "least_speed_ratio": LEAST_SPEED,
        "tokens_per_s_before": found.before, "tokens_per_s_during": found.during,
    }  # fmt: skip
    detail = (
        f"{found.right.detail}; {ratio:.3f} of the speed before (at least {LEAST_SPEED}): {found.during:.0f} of "
        f"{found.before:.0f} tokens a second"
    )
    return Verdict(_and(found.right, ratio >= LEAST_SPEED), detail, values)


def judge_passes(found: Arrivals) -> Verdict:
    """Whether short prompts shared passes, as few as hold them, and the last one was answered sooner for it."""
    n, last, alone = len(found.first_s), max(found.first_s), found.alone_s[-1]
    values = {
        **found.right.values, "n_passes": found.n_passes, "least_passes": found.least_passes,
        "one_by_one_passes": found.alone_passes, "mean_first_token_ms": 1e3 * sum(found.first_s) / n,
        "last_first_token_ms": 1e3 * last, "one_by_one_mean_first_token_ms": 1e3 * sum(found.alone_s) / n,
        "one_by_one_last_first_token_ms": 1e3 * alone, "collected_ms": found.collected_ms,
        "one_by_one_collected_ms": found.alone_collected_ms,
    }  # fmt: skip
    detail = (
        f"{found.right.detail}; {found.n_passes} passes (at least {found.least_passes}; one by one "
        f"{found.alone_passes}), the last first token after {1e3 * last:.0f} ms, one by one {1e3 * alone:.0f} ms"
    )
    if found.collected_ms >= COLLECTED_MS:
        detail += f"; garbage collections took {found.collected_ms:.0f} ms of them"
    return Verdict(_and(found.right, found.n_passes == found.least_passes and last < alone), detail, values)


def _and(right: Verdict, is_met: bool) -> bool | None:
    return None if right.held is None else right.held and is_met
