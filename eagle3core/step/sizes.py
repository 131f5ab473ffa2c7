"""What a state is made for: slots, lengths, blocks, the tree of a step; and the models and device it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle3core.acceptance import AcceptanceRule, RejectionAcceptance
from eagle3core.geometry import DrafterGeometry, DraftGeometry, TargetGeometry
from eagle3core.kernels.card import E4M3
from eagle3core.speculative import CacheDtype
from eagle3core.step.tree import FlatTree, GrownTree

_SMALL_BATCH = 4
_SHORT_SPAN = 16
SPAN = 64  # tokens of a prompt that attention's kernels treat as one sequence: as many as they take at once

# Steps without drafts whose states wait together for the draft. What reading them takes of as many plain steps was
# reckoned from the products' times on an H200 (8B): 0.2 % at one row, 0.5 % at 64, where more would save nothing.
STEPS_KEPT = 8


class ChunkShape(NamedTuple):
    """A pass over prompts: so many spans, each of so many tokens of one prompt."""

    spans: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.spans * self.tokens

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether these numbers of tokens, each of one prompt, fit."""
        return sum(blocks_for(n, self.tokens) for n in counts) <= self.spans


def stored_dtype(cache: CacheDtype, computed: torch.dtype) -> torch.dtype:
    """In which keys and values lie in a cache, of a model that computes in `computed`."""
    return E4M3 if cache == "fp8" else computed


def blocks_for(n_tokens: int, block_size: int) -> int:
    """Cache blocks that hold `n_tokens`."""
    return -(-n_tokens // block_size)


@dataclass(frozen=True)
class DeviceSizes:
    """What the engine is built for.

    Attributes:
        n_slots: sequences at once. session_len: tokens of a prompt and its answer.
        max_tokens: tokens a slot's cache holds, drafts in flight included (R-64).
        tree: of every step; a chain of k drafts, a tree that the draft grows, or any flattened tree whose nodes are
            given from outside.
        chunk, span: rows of the largest pass over prompts, and those of one of its spans.
        block: tokens of a cache block.
        keeps_ranks: the draft's rank of the target's token is kept at every level of a chain.
        last_states: the last layer's output is made for every token of a prompt, not for those alone that are read.
        pool: blocks of the cache, which slots share; None: as many as all slots' longest sessions take.
        acceptance: the rule by which drafts are accepted; None: where they are the target's own choice.
        n_kept: places of a slot for states of steps without drafts, a power of two, so that such steps may be mixed
            with others of any depth; 0: every step is of the tree.
        cache_dtype, draft_cache_dtype: of the target's keys and values, and of the draft's.
        draft_window: positions back that a head drafts with, its own included; 0: all, or the head's own window.
    """

    n_slots: int
    session_len: int
    max_tokens: int
    tree: FlatTree | GrownTree
    chunk: int = 512
    span: int = SPAN
    block: int = 64
    keeps_ranks: bool = False
    last_states: bool = False
    pool: int | None = None
    acceptance: AcceptanceRule | None = None
    n_kept: int = 0
    draft_window: int = 0
    cache_dtype: CacheDtype = "as_computed"
    draft_cache_dtype: CacheDtype = "as_computed"

    @property
    def entries(self) -> int:
        """Most blocks of a slot."""
        return blocks_for(self.max_tokens, self.block)

    @property
    def n_blocks(self) -> int:
        """Blocks of the cache, each with rows of target and draft."""
        return self.n_slots * self.entries if self.pool is None else self.pool

    @property
    def positions(self) -> int:
        """Rotary positions, those of rows past the last block included."""
        return self.entries * self.block + 64

    @property
    def in_flight(self) -> int:
        """Cache rows that a step may write behind a slot's committed ones."""
        return self.max_tokens - self.session_len

    @property
    def nodes(self) -> int:
        return self.tree.n_nodes

    @property
    def path_len(self) -> int:
        return self.tree.max_depth + 1

    @property
    def n_spans(self) -> int:
        """Spans of the largest pass over prompts, which prompts share."""
        return self.chunk // self.span

    @property
    def n_ends(self) -> int:
        """Most prompts that end in a pass."""
        return min(self.n_slots, self.n_spans)

    @property
    def step_rows(self) -> int:
        """Rows of the largest step."""
        return self.n_slots * self.nodes

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass: of a step, or of a prompt's chunk."""
        return max(self.step_rows, self.chunk)

    @property
    def grown(self) -> GrownTree | None:
        """The tree that the draft grows, if it does."""
        return self.tree if isinstance(self.tree, GrownTree) else None

    @property
    def beam(self) -> int:
        """Rows of a sequence in a pass of the draft over one level."""
        return self.grown.top_k if self.grown else 1

    @property
    def chain_levels(self) -> int:
        """Passes of the draft after its first, whose rows, `beam` a sequence, are placed as the step opens."""
        return max(self.path_len - 2, 0)

    @property
    def draws_drafts(self) -> bool:
        """Whether a chain's drafts are drawn where tokens are, and accepted by rejection."""
        return isinstance(self.acceptance, RejectionAcceptance)

    @property
    def keeps_logits(self) -> bool:
        """Whether the draft's logits of every level of a chain are kept until the target has chosen."""
        return (self.keeps_ranks or self.draws_drafts) and self.grown is None

    @property
    def is_chain(self) -> bool:
        return self.grown is None and self.tree.max_depth + 1 == self.tree.n_nodes

    @property
    def seed_row(self) -> int:
        """First of the rows that keep the taps of a prompt's last token, a slot each, after those of a step."""
        return self.step_rows

    @property
    def kept_row(self) -> int:
        """First of the rows that keep the taps of steps without drafts, `n_kept` a slot, after the seeds."""
        return self.step_rows + self.n_slots

    @property
    def pending(self) -> int:
        """Most entries that a draft has not read."""
        return max(self.path_len, self.n_kept)


@dataclass(frozen=True)
class StateShape:
    """What a state's size depends on beside `DeviceSizes`: both models' geometries, and where it lives."""

    target: TargetGeometry
    draft: DrafterGeometry | None
    dtype: torch.dtype
    device: torch.device

    @property
    def n_taps(self) -> int:
        return len(self.draft.taps) if isinstance(self.draft, DraftGeometry) else 0

    @property
    def most_columns(self) -> int:
        """Columns of the widest matrix: what a row of its input has."""
        blocks = [self.target.block, *([self.draft.block] if self.draft else [])]
        widths = [max(b.hidden_size, b.intermediate_size, b.n_heads * b.head_dim) for b in blocks]
        if isinstance(self.draft, DraftGeometry):  # its q, k, v read two rows side by side, its fc all taps
            widths += [2 * self.draft.block.hidden_size, self.n_taps * self.draft.target_hidden_size]
        return max(widths)


def buckets(sizes: DeviceSizes) -> list[int]:
    """Batch sizes that programs are made for: 1 to 4, powers of two, and the most.

    Up to 4 every size has its own, so that work falls with each slot that finishes; beyond, a size in between costs a
    graph more than it saves.
    """
    found = [n for n in range(1, _SMALL_BATCH + 1) if n <= sizes.n_slots]
    while 2 * found[-1] < sizes.n_slots:
        found.append(2 * found[-1])
    return sorted({*found, sizes.n_slots})


def chunk_shapes(sizes: DeviceSizes, *, kernels: bool) -> list[ChunkShape]:
    """Shapes of the passes that read prompts, the smallest first, the last of which any pass fits into.

    Kernels have whole spans, doubling in number. Plain torch, which pays for every row, has smaller ones, doubling in
    spans and tokens; of as many rows fewer spans come first, since each reads its prefix.
    """
    spans = _doubling(1, sizes.n_spans)
    if kernels:
        return [ChunkShape(n, sizes.span) for n in spans]
    tokens = {*_doubling(_SHORT_SPAN, sizes.chunk), sizes.span}
    found = [ChunkShape(n, t) for n in spans for t in tokens if n * t <= sizes.chunk]
    return sorted(found, key=lambda shape: (shape.rows, shape.spans))


def largest_pass(shapes: Iterable[ChunkShape], span: int, most_rows: float | None) -> ChunkShape:
    """Of those of whole spans of `span` tokens the largest of at most `most_rows` (None: of any), or the smallest."""
    whole = [shape for shape in shapes if shape.tokens == span]
    return max((shape for shape in whole if most_rows is None or shape.rows <= most_rows), default=min(whole))


def _doubling(first: int, last: int) -> list[int]:
    """`first`, its doubles below `last`, and `last`."""
    found = [first]
    while 2 * found[-1] < last:
        found.append(2 * found[-1])
    return [*(n for n in found if n < last), last]
