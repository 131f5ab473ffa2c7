"""What a step, or the end of a prompt, gave each sequence: result rows as whoever keeps the book reads them."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3core.kernels.slots.slot_state import NO_FAULT
from eagle3core.step.outcome.logprobs import TokenLogprob


@dataclass(frozen=True)
class RowOutcome:
    """What one sequence got.

    Attributes:
        request_id: whose. slot: where it lay.
        tokens: accepted drafts, then the target's own; of an admission the first token.
        drafts: what was drafted, -1 where the draft's logits were not finite. n_accepted: how many of them the target
            agreed with.
        is_finished: the slot has stopped by itself: an end token, the budget, no room, or `is_broken`.
        is_broken: after `tokens` the target's logits are not finite, with drafts and without: there is no next token.
        fault: 0, or the broken invariants (`kernels.slots.slot_state`), after which a slot goes on without its drafts.
        ranks: the draft's rank of the target's token at each level of a chain, if asked for.
        parents: of the nodes of a grown tree, the root's -1 first, if asked for.
        logprobs: of the tokens, if some request of the step asked for its own.
    """

    request_id: int
    slot: int
    tokens: list[int]
    drafts: list[int]
    n_accepted: int
    is_finished: bool = False
    is_broken: bool = False
    fault: int = NO_FAULT
    ranks: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Outcome:
    """Results of one admission (`step` is None) or of the step of that number: a row a sequence that took part.

    Attributes:
        n_drafts: on the longest path of the step. reads: whether the draft read what waited for it.
        took_us: since the step before, where that is measured and nothing else ran between.
    """

    step: int | None
    rows: list[RowOutcome]
    n_drafts: int = 0
    reads: bool = True
    took_us: float | None = None
