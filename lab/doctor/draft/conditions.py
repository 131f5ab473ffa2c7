"""One head in the real engine under conditions that differ in one thing alone, and what two of them have in common.

Greedy speculation has the same text however it is run, and a head the same drafts wherever a step begins: from a root
that two runs share, the draft's ranks of the target's tokens are the same (fp32: but for near ties). So a difference is
no matter of chance, and what differs between the conditions is its cause. Every run is of a new engine over weights
that are read once, with the case's fault in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.metrics import StepRecord
from eagle3core.request import Response, without_errors
from lab.pairs.prompts import Prompt
from lab.parity.faults import with_fault

MOST_PROMPTS = 8  # as many as run together
SMALL_BATCH = 4  # sequences up to which a step has no rows of padding (`eagle3core.step`)
TALKS = 4  # prompts that are asked on
BEHIND = 2  # tokens behind the end of a cache block at which turns end: their last step has filled it
MOST_ANEW = 8  # steps of a request that are made again
# Of the roots that two runs share, those whose ranks may differ by rounding alone, in fp32.
LEAST_ROOTS, LEAST_SHARE = 3, 0.02

# Of the runs of `Conditions`, those that begin from others.
RESTS_ON = {"read_anew": "alone", "cold_turns": "alone", "warm_turns": "alone"}

Prompts = Sequence[Sequence[int]]


class Served(Protocol):
    """What a case tells of how its head is served; `lab.doctor.draft.case.Case`."""

    prompts: tuple[Prompt, ...]
    k: int
    max_new_tokens: int
    fault: str

    @property
    def torch_device(self) -> torch.device:
        """Where the engine runs."""

    def engine(self, *, planted: bool = True, max_batch_size: int = 8) -> Engine:
        """An engine of the head."""


@dataclass(frozen=True)
class Difference:
    """What two runs of the same requests have in common.

    Attributes:
        good, bad: mean acceptance lengths over complete steps, bonus included; 1 without a step.
        n_roots: roots that complete steps of both begin from, up to where their tokens part.
        n_other: of these, the ones from which the draft ranked the target's tokens otherwise.
        first: request, and index of the answer's token, where that is so first; None: nowhere.
        by_request: both lengths of each request.
        n_texts: requests whose tokens differ.
    """

    good: float
    bad: float
    n_roots: int
    n_other: int
    first: tuple[int, int] | None
    by_request: tuple[tuple[float, float], ...]
    n_texts: int

    @property
    def differs(self) -> bool:
        """Whether more differs than rounding explains."""
        return self.n_other >= max(LEAST_ROOTS, LEAST_SHARE * self.n_roots)

    @property
    def costs(self) -> bool:
        """Whether the second run accepts less because of it."""
        return self.differs and self.bad < self.good

    @property
    def said(self) -> str:
        """In words."""
        return (
            f"{self.n_other} of {self.n_roots} roots draft otherwise, {self.good:.2f} and {self.bad:.2f} tokens a step"
        )


def complete(response: Response) -> dict[int, StepRecord]:
    """The complete steps of a response by the answer's token that they begin behind."""
    return {step.start: step for step in response.req_metrics.steps if not step.cut}


def mean_length(responses: Sequence[Response]) -> float:
    """Tokens a complete step, bonus included; 1 without one."""
    steps = [step for response in responses for step in complete(response).values()]
    return sum(step.n_committed for step in steps) / len(steps) if steps else 1.0


def difference(good: Sequence[Response], bad: Sequence[Response]) -> Difference:
    """Two runs of the same requests, in the same order."""
    shared: list[tuple[int, int, bool]] = []
    for i, (one, other) in enumerate(zip(good, bad, strict=True)):
        mine, its = complete(one), complete(other)
        same = n_equal(one.token_ids, other.token_ids)
        shared += [(i, at, ranks(mine[at]) != ranks(its[at])) for at in sorted({*mine} & {*its}) if at <= same]
    others = [(i, at) for i, at, is_other in shared if is_other]
    pairs = tuple((mean_length([a]), mean_length([b])) for a, b in zip(good, bad, strict=True))
    n_texts = sum(a.token_ids != b.token_ids for a, b in zip(good, bad, strict=True))
    return Difference(
        mean_length(good), mean_length(bad), len(shared), len(others), others[0] if others else None, pairs, n_texts
    )


def ranks(step: StepRecord) -> tuple[int, ...]:
    """What a step says of its drafts: their ranks, or in a tree how many were accepted."""
    return (step.n_accepted,) if step.ranks is None else step.ranks[: step.n_accepted + 1]


def n_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Conditions:
    """The engines of a case. A run is made when it is first asked for, and kept."""

    def __init__(self, case: Served) -> None:
        self.case = case
        n = len(case.prompts)
        chosen = range(n) if n <= MOST_PROMPTS else [i * n // MOST_PROMPTS for i in range(MOST_PROMPTS)]
        self.chosen = tuple(chosen)  # indices of the case's prompts
        self.prompts: list[list[int]] = [list(case.prompts[i].ids) for i in self.chosen]
        self.block = 16 if case.torch_device.type == "cpu" else 64  # kernels take blocks of 64

    @cached_property
    def first(self) -> Engine:
        """The engine whose weights all others share."""
        return self.case.engine(planted=False, max_batch_size=1)

    def engine(self, prompts: Prompts, *, drafts: Mapping[str, Any] | None = None, **settings: Any) -> Engine:
        """A new engine, with a chunk that holds all of `prompts`.

        Args:
            drafts: fields of the case's `SpeculativeConfig` in the place of its own.
            settings: fields of `EngineConfig`.
        """
        first, spec = self.first, self.first.config.speculative_config
        assert spec is not None, "a case has drafts"
        if drafts:
            spec = replace(spec, **{"max_path_len": None, "max_decoding_tokens": None, **drafts})
        longest = max(map(len, prompts)) + self.case.max_new_tokens + 2 * self.block + 2 * spec.tokens_in_flight
        config = replace(first.config, **{
            "block_size": self.block, "prefill_chunk": sum(-(-len(prompt) // 64) * 64 for prompt in prompts),
            "session_len": longest, "speculative_config": spec, **settings,
        })  # fmt: skip
        target = copy.copy(first.target)
        return with_fault(Engine(target, first.draft, config), self.case.fault)

    def ask(self, engine: Engine, prompts: Prompts, n: int = 0, **settings: Any) -> list[Response]:
        """Greedy answers of `n` tokens, 0: of the case's."""
        generation = GenerationConfig(max_new_tokens=n or self.case.max_new_tokens, **settings)
        return without_errors(engine.generate([list(prompt) for prompt in prompts], generation))

    def each_alone(self, *, drafts: Mapping[str, Any] | None = None, **settings: Any) -> list[Response]:
        """Every prompt in an engine of its own."""
        return [self.ask(self.engine([p], drafts=drafts, **settings), [p])[0] for p in self.prompts]

    def together(self, size: int, slots: int) -> list[Response]:
        """The prompts in groups of `size` in `slots` slots, a new engine each; a last group is filled up by the first
        prompts, whose second answers are left out."""
        found: list[Response] = []
        for start in range(0, len(self.prompts), size):
            group = self.prompts[start : start + size]
            filled = (group + self.prompts * size)[:size]
            found += self.ask(self.engine(filled, max_batch_size=slots), filled)[: len(group)]
        return found

    @cached_property
    def alone(self) -> list[Response]:
        """One request, in a new engine, its prompt read in one chunk: nothing can come from others."""
        return self.each_alone()

    @cached_property
    def in_chunks(self) -> list[Response]:
        """As `alone`, prompts read in as many chunks as may be."""
        return self.each_alone(prefill_chunk=self.block)

    @cached_property
    def after_others(self) -> list[Response]:
        """One slot that serves one prompt after the other."""
        longest = max(self.prompts, key=len)
        return self.ask(self.engine([longest]), self.prompts)

    @cached_property
    def in_company(self) -> list[Response]:
        """Groups of four in four slots: every step has as many rows as requests that run."""
        return self.together(SMALL_BATCH, SMALL_BATCH)

    @cached_property
    def in_full(self) -> list[Response]:
        """Groups of eight in eight slots."""
        return self.together(2 * SMALL_BATCH, 2 * SMALL_BATCH)

    @cached_property
    def padded(self) -> list[Response]:
        """Groups of seven in eight slots: until three have ended, every step has rows of padding."""
        return self.together(2 * SMALL_BATCH - 1, 2 * SMALL_BATCH)

    def while_full(self, responses: Sequence[Response]) -> list[set[int]]:
        """Of groups of eight, the steps made while all of them ran, by where they begin."""
        size, kept = 2 * SMALL_BATCH, list[set[int]]()
        for start in range(0, len(responses), size):
            group = responses[start : start + size]
            n = min(len(response.req_metrics.steps) for response in group)
            kept += [{step.start for step in response.req_metrics.steps[:n]} for response in group]
        return kept

    @cached_property
    def cold_turns(self) -> list[Response]:
        """Conversations without the prefix cache."""
        return self._turns(prefix_cache=False)

    @cached_property
    def warm_turns(self) -> list[Response]:
        """The same conversations with it."""
        return self._turns(prefix_cache=True)

    def _turns(self, *, prefix_cache: bool) -> list[Response]:
        """Conversations in one slot: each answer is asked on after every few tokens, then its prompt without its first
        block is asked."""
        texts = [[*p, *r.token_ids] for p, r in zip(self.prompts, self.alone, strict=True)][:TALKS]
        engine, found = self.engine([max(texts, key=len)], prefix_cache=prefix_cache), list[Response]()
        for prompt, text in zip(self.prompts, texts, strict=False):
            ends = [n for n in range(len(prompt) + 1, len(text)) if n % self.block == BEHIND]
            for begin, end in pairwise([len(prompt), *ends, len(text) + self.block]):
                found += self.ask(engine, [text[:begin]], min(end - begin, self.block + BEHIND))
            if len(prompt) > 2 * self.block:
                found += self.ask(engine, [prompt[self.block :]], self.block)
        return found

    @cached_property
    def read_anew(self) -> list[tuple[StepRecord, StepRecord]]:
        """Steps of `alone` behind accepted drafts, with the first step each of a request whose prompt is the text up to
        there: its draft has read what the target holds, and nothing of its own."""
        found: list[tuple[StepRecord, StepRecord]] = []
        for prompt, response in zip(self.prompts, self.alone, strict=True):
            text, steps = [*prompt, *response.token_ids], sorted(complete(response).items())
            begun = next((i for i, (_, step) in enumerate(steps) if step.n_accepted), len(steps)) + 1
            every = max(1, -(-len(steps[begun:]) // MOST_ANEW))
            engine = self.engine([text])
            for at, step in steps[begun::every]:
                [again] = self.ask(engine, [text[: len(prompt) + at - 1]], self.case.k + 2, ignore_eos=True)
                found.append((step, again.req_metrics.steps[0]))
        return found

    @property
    def keeps_own_states(self) -> bool:
        """Whether more of these pairs differ than rounding explains."""
        others = sum(ranks(one) != ranks(other) for one, other in self.read_anew)
        return others >= max(LEAST_ROOTS, LEAST_SHARE * len(self.read_anew))
