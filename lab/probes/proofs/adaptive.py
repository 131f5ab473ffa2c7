"""Adaptive speculation on a planted pair: its tokens a second beside every fixed depth and beside plain decoding.

One engine a batch runs all of it but plain decoding, which is an engine of its own without a draft: a fixed depth is a
choice that never changes, and another acceptance is another draft's weights in the places of the first. Every run
begins with an empty history. Where adaptive decoding is about as quick as plain, both run by turns, or a GPU that grows
warm meanwhile would decide. Source: docs/requirements.md R-03.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import torch

from eagle3core import Engine
from eagle3core.adaptive import Choice, History, Moment, StepCurve, choose
from eagle3core.config import GenerationConfig
from eagle3core.weights import PackedDraft, pack_draft
from lab.errors import ExperimentError
from lab.pairs.planted import PlantedGeometry, PlantedPair, share_for_length
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.subject import Setting, Subject

PART = "adaptive"
LEAST_OF_BEST, LEAST_OF_PLAIN = 0.97, 0.99
NEAR_PLAIN = 1.05  # of plain, up to which both run by turns


@dataclass(frozen=True)
class AdaptivePlan:
    """What is measured.

    Attributes:
        k: most drafts. batches: slots. lengths: planted tokens a step at `k` drafts.
        context: tokens of a prompt. n_tokens: of an answer; a run ends with the first that is complete.
        turns: of adaptive and of plain decoding, where they are about as quick.
    """

    k: int = 3
    batches: tuple[int, ...] = (1, 4, 16, 64)
    lengths: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    context: int = 64
    n_tokens: int = 384
    turns: int = 3

    def setting(self, batch: int, *, drafts: bool) -> Setting:
        """An engine's: adaptive, or without drafts."""
        session = self.context + self.n_tokens + 16
        return Setting(self.k, batch, session, adaptive=True) if drafts else Setting(0, batch, session)

    def settings(self) -> list[Setting]:
        """Every engine that is made."""
        return [self.setting(batch, drafts=drafts) for batch in self.batches for drafts in (False, True)]


@dataclass(frozen=True)
class Rate:
    """A run: tokens a second of all sequences together, tokens that were right, and steps by depth and reason."""

    tokens_per_s: float
    is_right: bool
    steps: str


class Adaptive:
    """Checks of one planted pair: one a batch and acceptance.

    Args:
        drafts: of the pair, by planted length. prompts: so many of so many tokens.
    """

    def __init__(
        self,
        subject: Subject,
        drafts: Callable[[float], PackedDraft],
        prompts: Callable[[int, int], list[list[int]]],
        plan: AdaptivePlan,
    ) -> None:
        self.subject, self.plan = subject, plan
        self._drafts, self._prompts = drafts, prompts
        self._engine = cache(lambda batch: subject.engine(plan.setting(batch, drafts=True)))
        self._plain_engine = cache(lambda batch: subject.engine(plan.setting(batch, drafts=False)))
        self._plain = cache(self._plain_rate)

    def checks(self) -> list[Check]:
        """Tokens a second of every batch and acceptance."""
        return [
            Check(PART, f"{self.subject.name} batch {batch} acceptance {length}",
                  {"pair": self.subject.name, "slots": batch, "spec_k": self.plan.k, "length": length},
                  partial(self._judge, batch, length))
            for batch in self.plan.batches
            for length in self.plan.lengths
        ]  # fmt: skip

    def _judge(self, batch: int, length: float) -> Verdict:
        plain, engine = [self._plain(batch)], self._engine(batch)
        put_weights(engine, self._drafts(length))
        fixed = {depth: self._rate(engine, batch, fixed_at(depth)) for depth in range(1, self.plan.k + 1)}
        adaptive = [self._rate(engine, batch, choose)]
        if adaptive[0].tokens_per_s < NEAR_PLAIN * plain[0].tokens_per_s:
            plain = [self._plain_rate(batch)]  # that of before is of another time
            for _ in range(self.plan.turns - 1):
                adaptive.append(self._rate(engine, batch, choose))
                plain.append(self._plain_rate(batch))
        return judge_rates(adaptive, fixed, plain)

    def _plain_rate(self, batch: int) -> Rate:
        return self._rate(self._plain_engine(batch), batch, None)

    def _rate(self, engine: Engine, batch: int, policy: Callable[..., Choice] | None) -> Rate:
        """Of all sequences at once, from the first step of all to the first that is complete."""
        depths = engine.book.depths
        if depths is not None and policy is not None:
            depths.choose, depths.history = policy, History(engine.runner.depth)
            depths.counts.clear()
        prompts = self._prompts(batch, self.plan.context)
        asked = GenerationConfig(self.plan.n_tokens, ignore_eos=True)
        handles = [engine.add_request(prompt, asked) for prompt in prompts]
        while not all(handle.token_ids for handle in handles):
            engine.step()
        self._wait()
        began, n_before = time.perf_counter(), sum(len(handle.token_ids) for handle in handles)
        while not any(handle.finish_reason for handle in handles):
            engine.step()
        took, n_after = time.perf_counter() - began, sum(len(handle.token_ids) for handle in handles)
        for handle in handles:
            if handle.finish_reason is None:
                engine.cancel(handle.id)
        map_ = self.subject.tokens
        assert map_ is not None, "the pair is planted"
        pairs = zip(prompts, (handle.token_ids for handle in handles), strict=True)
        is_right = all(got == map_.follow(prompt[-1], len(got)) for prompt, got in pairs)
        return Rate((n_after - n_before) / took, is_right, depths.line() if depths is not None else "")

    def _wait(self) -> None:
        if self.subject.on_gpu:
            torch.cuda.synchronize()


def fixed_at(depth: int) -> Callable[[StepCurve, History, Moment], Choice]:
    """A choice that is always the same."""
    return lambda curve, history, moment: Choice(depth, "fixed", 1.0, 0.0, 1.0)


def judge_rates(adaptive: Sequence[Rate], fixed: Mapping[int, Rate], plain: Sequence[Rate]) -> Verdict:
    """Whether adaptive decoding gives right tokens and keeps both shares, by the medians of its runs and plain ones."""
    ours, theirs = median_of(adaptive), median_of(plain)
    best = max((theirs, 0), *((rate.tokens_per_s, depth) for depth, rate in fixed.items()))
    of_best, of_plain = ours / best[0], ours / theirs
    is_right, steps = all(rate.is_right for rate in (*adaptive, *plain, *fixed.values())), adaptive[-1].steps
    values = {
        "tokens_per_s": ours, "plain_tokens_per_s": theirs, "best_depth": best[1],
        **{f"fixed_tokens_per_s.{depth}": rate.tokens_per_s for depth, rate in fixed.items()},
        "tokens_per_s_samples": [rate.tokens_per_s for rate in adaptive],
        "plain_tokens_per_s_samples": [rate.tokens_per_s for rate in plain],
        "of_best": of_best, "of_plain": of_plain, "is_right": is_right, "steps": steps,
    }  # fmt: skip
    detail = (
        f"{of_best:.3f} of the best fixed depth, {best[1]} (at least {LEAST_OF_BEST}), {of_plain:.3f} of plain (at "
        f"least {LEAST_OF_PLAIN}){'' if is_right else '; TOKENS ARE WRONG'}; {steps}"
    )
    return Verdict(is_right and of_best >= LEAST_OF_BEST and of_plain >= LEAST_OF_PLAIN, detail, values)


def median_of(rates: Sequence[Rate]) -> float:
    """Tokens a second."""
    return median(rate.tokens_per_s for rate in rates)


def put_weights(engine: Engine, draft: PackedDraft) -> None:
    """Another draft's weights in the places of the engine's own, which captured graphs read.

    Raises:
        ExperimentError: a draft of other shapes.
    """
    assert engine.draft is not None, "the engine drafts"
    ours, theirs = list(engine.draft.own_tensors()), list(draft.own_tensors())
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        raise ExperimentError("drafts of other shapes", "one geometry for all", "make them from the same pair")
    for place, tensor in zip(ours, theirs, strict=True):
        place.copy_(tensor)


def draft_of_length(subject: Subject, geometry: PlantedGeometry, k: int, length: float, block: int) -> PackedDraft:
    """The pair's draft as it would be at another acceptance; the target is the same.

    Raises:
        ExperimentError: the subject follows another map.
    """
    target = subject.target
    pair = PlantedPair(geometry, share=share_for_length(length, k), dtype=target.dtype, device=target.device)
    if subject.tokens is None or not torch.equal(subject.tokens.successor, pair.tokens.successor):
        raise ExperimentError("the pair follows another map", "a planted pair of seed 0", "open it by its geometry")
    pair.draft_weights.share_table(target.embedding)
    return pack_draft(geometry.draft, pair.draft_weights.tensor, pair.tokens.draft_to_target, target, block=block)
