"""A request on its way into a slot: what the runner has to know of it, and how far its prompt has been read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3core.sampling import Sampling

EVERY_DRAFT = (1 << 31) - 1


@dataclass(frozen=True)
class SlotRequest:
    """What a runner has to know of a request.

    Attributes:
        id: whose rows these will be, 0..2^31 - 1. prompt: its tokens. budget: tokens it may get.
        ends: tokens that end it. sampling: how its tokens are drawn; None for a greedy one.
        logprobs: log-probabilities of its tokens are kept.
        blocks: where the rows of prompt and first step go, in order; None: the slot's own (`BlockTables.own_blocks`).
        most_drafts: of a path that the request uses.
        n_cached: tokens of the prompt whose rows lie in the first of `blocks` already: whole blocks, and not the last
            token.
    """

    id: int
    prompt: Sequence[int]
    budget: int
    ends: tuple[int, ...]
    sampling: Sampling | None = None
    logprobs: bool = False
    blocks: Sequence[int] | None = None
    n_cached: int = 0
    most_drafts: int = EVERY_DRAFT


@dataclass
class Reading:
    """How far the prompt under reading has been read: `n_read` of `n_chunks` chunks, of `n_prompt` tokens without the
    `n_cached` first; and whether its request `draws` its tokens, and asks for their `logprobs`."""

    n_chunks: int
    n_prompt: int
    n_cached: int = 0
    n_read: int = 0
    draws: bool = False
    logprobs: bool = False

    @property
    def is_done(self) -> bool:
        """Whether its slot runs."""
        return self.n_read == self.n_chunks
