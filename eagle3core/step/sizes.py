"""What a state is made for: slots, lengths, blocks, the tree of a step; and the models and device it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3core.geometry import DrafterGeometry, DraftGeometry, TargetGeometry
from eagle3core.step.tree import FlatTree, GrownTree

_SMALL_BATCH = 4
_SMALL_CHUNK = 16
SPAN = 64  # tokens of a prompt that attention's kernels treat as one sequence: as many as they take at once


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
        chunk, span: rows of a prefill pass, and those of one of its attention sequences.
        block: tokens of a cache block.
        keeps_ranks: the draft's rank of the target's token is kept at every level of a chain.
        pool: blocks of the cache, which slots share; None: as many as all slots' longest sessions take.
        n_kept: places of a slot for states of steps without drafts, a power of two, so that such steps may be mixed
            with others of any depth; 0: every step is of the tree.
    """

    n_slots: int
    session_len: int
    max_tokens: int
    tree: FlatTree | GrownTree
    chunk: int = 512
    span: int = SPAN
    block: int = 64
    keeps_ranks: bool = False
    pool: int | None = None
    n_kept: int = 0

    @property
    def entries(self) -> int:
        """Most blocks of a slot."""
        return blocks_for(self.max_tokens, self.block)

    @property
    def n_blocks(self) -> int:
        """Blocks of the cache, each with rows of target and draft."""
        return self.n_slots * self.entries if self.pool is None else self.pool

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
        """Passes of the draft after its first in which a sequence has one row, placed as the step opens."""
        return 0 if self.grown else max(self.path_len - 2, 0)

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


def chunk_rows(sizes: DeviceSizes) -> list[int]:
    """Rows of the chunks that plain torch reads prompts in: doubling, so that a short prompt costs no long chunk.

    Kernels have the longest alone: for them a chunk costs the weights' bytes whatever its rows.
    """
    found = [_SMALL_CHUNK]
    while 2 * found[-1] < sizes.chunk:
        found.append(2 * found[-1])
    return [*(n for n in found if n < sizes.chunk and n % min(sizes.span, n) == 0), sizes.chunk]
