"""Which cache blocks a slot's rows lie in, written to the device in the order in which work is enqueued.

Programs read the tables as they find them, so a block may change hands while steps are under way: what was enqueued
before reads and writes the block for the one who had it, what is enqueued after for the next. A new request's blocks
are told in one copy, and only where its slot's table is another's; those that a running one gets travel in the launches
that write them (ranges and fills). The host waits for neither. Blocks get their zeros when they are given back, so that
an arriving prompt has nothing cleared before it. Source: docs/requirements.md R-25, R-67; derived here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

Copy = Callable[[Tensor, "array[int] | memoryview[int]"], None]


class BlockTables:
    """The tables of all slots, and what is in the blocks as they are handed out.

    Args:
        tables: `[S, M]` int32 block ids, -1 where a slot holds none.
        pages: caches `[..., n_blocks, K, block, D]` of keys and of values, each of a model; zeros.
        copy: enqueues a copy of int32 numbers to a tensor on the device (`step.results.Staging`).

    Attributes:
        n_blocks: of each cache. entries: most blocks of a slot.
    """

    def __init__(self, tables: Tensor, pages: Sequence[Tensor], copy: Copy) -> None:
        self.n_blocks, self.entries = pages[0].shape[-4], tables.shape[1]
        self._rows, self._pages, self._copy = tables.unbind(0), pages, copy
        self._told: list[list[int]] = [[] for _ in self._rows]  # what the tables hold after all that is enqueued
        self._used: set[int] = set()  # blocks that may hold something else than zeros

    def own_blocks(self, slot: int) -> range:
        """Blocks of a slot in a cache that has enough for every slot's longest session, shared with nobody."""
        assert self.n_blocks >= len(self._rows) * self.entries, "blocks are given by whoever shares a smaller cache"
        return range(slot * self.entries, (slot + 1) * self.entries)

    def assign(self, slot: int, blocks: Sequence[int], n_kept: int = 0) -> None:
        """Give an empty slot `blocks`, in the order of its tokens; the first `n_kept` keep what is in them, the others
        hold zeros."""
        self._use(blocks[n_kept:])
        if self._told[slot] != list(blocks):
            self._copy(self._rows[slot], array("i", [*blocks, *[-1] * (self.entries - len(blocks))]))
            self._told[slot] = list(blocks)

    def extend(self, slot: int, at: int, blocks: Sequence[int]) -> None:
        """Give a slot that has `at` blocks further ones, of zeros."""
        self._use(blocks)
        self._told[slot][at:] = blocks
        for first, n in _runs(blocks):
            torch.arange(first, first + n, out=self._rows[slot][at : at + n])
            at += n

    def cut(self, slot: int, at: int) -> None:
        """Leave a slot its first `at` blocks."""
        if at < self.entries:
            del self._told[slot][at:]
            self._rows[slot][at:].fill_(-1)

    def clean(self, blocks: Iterable[int]) -> None:
        """Zeros into blocks, unless they hold them: attention gives hidden rows weight 0, and 0 times an infinity that
        somebody left is not 0. Of blocks that nobody holds, so that the next one has not to wait for it."""
        used = self._used.intersection(blocks)
        for first, n in _runs(sorted(used)):
            for cache in self._pages:
                cache.narrow(-4, first, n).zero_()
        self._used -= used

    def _use(self, blocks: Sequence[int]) -> None:
        self.clean(blocks)
        self._used.update(blocks)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, how many) of the runs of neighbours in `blocks`."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[start], i - start
            start = i
