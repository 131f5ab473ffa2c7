"""Which cache blocks a slot's rows lie in, written to the device in the order in which work is enqueued.

Programs read the tables as they find them, so a block may change hands while steps are under way: what was enqueued
before reads and writes the block for the one who had it, what is enqueued after for the next. Numbers travel in the
launches that write them (fills and ranges), so nothing is copied, waited for or allocated.
Source: docs/requirements.md R-25, R-67; derived here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class BlockTables:
    """The tables of all slots, and what is in the blocks as they are handed out.

    Args:
        tables: `[S, M]` int32 block ids, -1 where a slot holds none.
        pages: caches `[..., n_blocks, K, block, D]` of keys and of values, each of a model.

    Attributes:
        n_blocks: of each cache. entries: most blocks of a slot.
    """

    def __init__(self, tables: Tensor, pages: Sequence[Tensor]) -> None:
        self.n_blocks, self.entries = pages[0].shape[-4], tables.shape[1]
        self._rows, self._pages = tables.unbind(0), pages

    def own_blocks(self, slot: int) -> range:
        """Blocks of a slot in a cache that has enough for every slot's longest session, shared with nobody."""
        assert self.n_blocks >= len(self._rows) * self.entries, "blocks are given by whoever shares a smaller cache"
        return range(slot * self.entries, (slot + 1) * self.entries)

    def assign(self, slot: int, blocks: Sequence[int], n_kept: int = 0) -> None:
        """Give an empty slot `blocks`, in the order of its tokens; the content of the first `n_kept` stays."""
        self._write(slot, 0, blocks[:n_kept])
        self.extend(slot, n_kept, blocks[n_kept:])
        self.cut(slot, len(blocks))

    def extend(self, slot: int, at: int, blocks: Sequence[int]) -> None:
        """Give a slot that has `at` blocks further ones, of zeros."""
        self._clear(blocks)
        self._write(slot, at, blocks)

    def cut(self, slot: int, at: int) -> None:
        """Leave a slot its first `at` blocks."""
        if at < self.entries:
            self._rows[slot][at:].fill_(-1)

    def _write(self, slot: int, at: int, blocks: Sequence[int]) -> None:
        for first, n in _runs(blocks):
            torch.arange(first, first + n, out=self._rows[slot][at : at + n])
            at += n

    def _clear(self, blocks: Sequence[int]) -> None:
        """Zeros where others' rows may lie: attention gives hidden rows weight 0, and 0 times their infinity is not
        0."""
        for first, n in _runs(sorted(blocks)):
            for cache in self._pages:
                cache.narrow(-4, first, n).zero_()


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, how many) of the runs of neighbours in `blocks`."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[start], i - start
            start = i
