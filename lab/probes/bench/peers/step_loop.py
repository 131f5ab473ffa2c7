"""What the engine is timed against, in the same rounds: another way to run the same step on the same weights.

A peer starts from a cache of random keys and values of the context's length, as decoding speed does not depend on what
they hold. Over a planted pair its tokens are known all the same, and are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.probes.bench.clocks import rest, synchronise


@dataclass(frozen=True)
class PeerRound:
    """Steps of a peer, timed together.

    Attributes:
        step_ms: mean time of a step.
        n_tokens: tokens a sequence committed over all steps, averaged over the batch.
        n_steps: how many steps.
        n_wrong: sequences that did not end in the planted token; None where that is not known.
    """

    step_ms: float
    n_tokens: float
    n_steps: int
    n_wrong: int | None

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens of a sequence and step."""
        return self.n_tokens / self.n_steps


class Peer(Protocol):
    """Another implementation of a decode step."""

    name: str

    def run(self) -> PeerRound:
        """A round of steps."""

    def facts(self) -> dict[str, Any]:
        """What else belongs in its row."""


@dataclass
class StepLoop:
    """Calls a step again and again from fixed first tokens, and checks where it ends.

    Args:
        step: one step; reads and writes `tokens`.
        tokens: `[B]` int64 last committed token of each sequence.
        counts: `[B]` int64 tokens committed so far, which the step adds to; None where a step commits one.
        successor: `[V]` int64 planted successors; None where they are not known.
        reset: called before the steps, for state other than `tokens` and `counts`.
    """

    step: Callable[[], None]
    tokens: Tensor
    counts: Tensor | None
    successor: Tensor | None
    n_steps: int
    reset: Callable[[], None] | None = None

    def run(self, first: Tensor) -> PeerRound:
        """All steps once, from the tokens `first: [B]`; device work is waited for at both ends."""
        device = self.tokens.device
        self.tokens.copy_(first)
        if self.counts is not None:
            self.counts.zero_()
        if self.reset is not None:
            self.reset()
        rest(device)
        start = time.perf_counter()
        for _ in range(self.n_steps):
            self.step()
        synchronise(device)
        seconds = time.perf_counter() - start
        counts = self.counts if self.counts is not None else torch.full_like(first, self.n_steps)
        wrong = None if self.successor is None else self._wrong(first, counts)
        return PeerRound(seconds / self.n_steps * 1e3, float(counts.double().mean()), self.n_steps, wrong)

    def _wrong(self, first: Tensor, counts: Tensor) -> int:
        assert self.successor is not None, "asked for only where successors are known"
        ends = first.cpu().clone()
        for i, count in enumerate(counts.tolist()):
            for _ in range(count):
                ends[i] = self.successor[ends[i]]
        return int((ends != self.tokens.cpu()).sum())
