"""Runners: who does the work of a step, behind one small interface that the scheduler talks to.

`TorchRunner` is plain torch and finishes a step before it returns; `device_runner.DeviceRunner` only enqueues it, and
its results are read one step behind. Whatever was admitted or enqueued gives exactly one outcome, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eagle3core.config import EngineConfig
from eagle3core.decode.prefill import prefill
from eagle3core.decode.slots import release_slot
from eagle3core.decode.state import new_state
from eagle3core.decode.step import StepResult, decode_step
from eagle3core.model.draft import DraftModel
from eagle3core.model.target import TargetModel
from eagle3core.trace import Trace


@dataclass(frozen=True)
class SlotRequest:
    """What a runner has to know of a request.

    Attributes:
        prompt: its tokens. budget: tokens it may get. ends: tokens that end it.
    """

    prompt: Sequence[int]
    budget: int
    ends: tuple[int, ...]


@dataclass(frozen=True)
class RowOutcome:
    """What one sequence got.

    Attributes:
        slot: whose.
        tokens: accepted drafts, then the target's own; of an admission the first token.
        drafts: what was drafted. n_accepted: how many of them the target agreed with.
        ranks: the draft's rank of the target's token at each level, if asked for.
        fault: 0, or the broken invariants (`kernels.slot_state`), after which a slot goes on without its drafts.
    """

    slot: int
    tokens: list[int]
    drafts: list[int]
    n_accepted: int
    ranks: tuple[int, ...] | None = None
    fault: int = 0


@dataclass(frozen=True)
class Outcome:
    """Results of one admission or one step: a row a sequence that took part."""

    is_admission: bool
    rows: list[RowOutcome]


class Runner(Protocol):
    """Runs admissions and steps.

    Attributes:
        n_slots: sequences at once. depth: drafts on the longest path. n_drafts: drafts of a step.
    """

    n_slots: int
    depth: int
    n_drafts: int

    @property
    def state(self) -> Any:
        """Everything the runner keeps of running sequences."""

    def admit(self, slot: int, request: SlotRequest, trace: Trace) -> None:
        """Read a prompt into an empty slot and sample its first token; the slot then takes part in steps."""

    def enqueue(self, trace: Trace) -> None:
        """Advance every running slot by a step."""

    def collect(self, *, everything: bool) -> list[Outcome]:
        """Outcomes in the order of the work. Without `everything`, only those that need no waiting for the newest."""

    def release(self, slot: int) -> None:
        """Empty a slot."""

    def abandon(self) -> None:
        """Empty every slot and forget what is under way, be it of a step that broke off half-way."""


class TorchRunner:
    """Plain torch, on whatever device the models are."""

    def __init__(self, target: TargetModel, draft: DraftModel | None, config: EngineConfig) -> None:
        self.target, self.draft, self.config = target, draft, config
        self.state = new_state(target, draft, config)
        self.n_slots, self.depth = config.max_batch_size, self.state.tree.max_depth
        self.n_drafts = self.state.tree.n_nodes - 1
        self._done: deque[Outcome] = deque()

    def admit(self, slot: int, request: SlotRequest, trace: Trace) -> None:
        prompt = torch.tensor(list(request.prompt), dtype=torch.int64, device=self.target.device)
        first = prefill(self.target, self.draft, self.state, slot, prompt, self.config.prefill_chunk, trace)
        self._done.append(Outcome(True, [RowOutcome(slot, [first], [], 0)]))

    def enqueue(self, trace: Trace) -> None:
        """Raises InvariantViolated for an acceptance outside the tree or a cache row outside the slot's blocks."""
        result = decode_step(self.target, self.draft, self.state, trace, collect_ranks=self.config.collect_draft_ranks)
        self._done.append(Outcome(False, _rows(result)))

    def collect(self, *, everything: bool) -> list[Outcome]:
        done = list(self._done)
        self._done.clear()
        return done

    def release(self, slot: int) -> None:
        release_slot(self.state, slot)

    def abandon(self) -> None:
        self._done.clear()
        for slot in range(self.n_slots):
            release_slot(self.state, slot)


def _rows(result: StepResult) -> list[RowOutcome]:
    rows = zip(result.slots.tolist(), result.tokens.tolist(), result.n_accepted.tolist(), strict=True)
    drafts, ranks = result.drafts.tolist(), None if result.ranks is None else result.ranks.tolist()
    return [
        RowOutcome(slot, tokens[: n + 1], drafts[i], n, None if ranks is None else tuple(ranks[i]))
        for i, (slot, tokens, n) in enumerate(rows)
    ]
