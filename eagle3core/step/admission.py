"""Requests on their way into slots: what the runner has to know of each, how far it was read, who is read next."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from eagle3core.sampling import Sampling
from eagle3core.step.sizes import ChunkShape, blocks_for

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
        first: its first token, where that is known and not to be drawn: of a request that was put back.
    """

    id: int
    prompt: Sequence[int]
    budget: int
    ends: tuple[int, ...]
    sampling: Sampling | None = None
    logprobs: bool = False
    blocks: Sequence[int] | None = None
    n_cached: int = 0
    first: int | None = None
    most_drafts: int = EVERY_DRAFT

    @cached_property
    def numbers(self) -> array[int]:
        """The prompt as int32, of which each pass over it takes some."""
        return array("i", self.prompt)


@dataclass
class Reading:
    """How far a request's prompt was read into its slot: `n_read` tokens, those included that were there already."""

    slot: int
    request: SlotRequest
    n_read: int

    @property
    def n_left(self) -> int:
        """Tokens that are still to be read."""
        return len(self.request.prompt) - self.n_read

    @property
    def is_new(self) -> bool:
        """Whether no pass has read any of it."""
        return self.n_read == self.request.n_cached

    @property
    def is_done(self) -> bool:
        """Whether its slot runs."""
        return not self.n_left


class Part(NamedTuple):
    """What a pass reads of one prompt: `n` tokens, from the first that was not read."""

    reading: Reading
    n: int


def parts_of_pass(
    readings: Sequence[Reading], shapes: Sequence[ChunkShape], largest: ChunkShape
) -> tuple[list[Part], ChunkShape]:
    """What the next pass reads, first come first served in whole spans up to those of `largest`, and the smallest of
    `shapes`, of which that is one, that holds it."""
    n_free, counts = largest.spans, []
    for reading in readings:
        n_spans = min(blocks_for(reading.n_left, largest.tokens), n_free)
        n_free -= n_spans
        counts.append(min(reading.n_left, n_spans * largest.tokens))
    shape = next(shape for shape in shapes if shape.holds(counts))
    # A span of more tokens than those that are shared may have room left for what follows in its prompt.
    rounded = [blocks_for(n, shape.tokens) * shape.tokens for n in counts]
    read = [Part(reading, min(reading.n_left, n)) for reading, n in zip(readings, rounded, strict=True) if n]
    return read, shape


def is_full(readings: Sequence[Reading], largest: ChunkShape) -> bool:
    """Whether these prompts leave no span of a pass to another."""
    return sum(blocks_for(reading.n_left, largest.tokens) for reading in readings) >= largest.spans
