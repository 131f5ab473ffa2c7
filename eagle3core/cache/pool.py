"""The blocks of the cache: each is free, held by one or more requests, or kept for what is in it.

A block that is held by several is only read (docs/engine.md, "Memory"). A block that nobody holds any more is kept as
long as it has a name and nobody needs the room; what was let go first is thrown away first. Of one request the last
blocks count as let go first: without the ones before them they are of no use.
Source: Kwon et al., arXiv 2309.06180, sections 4.4 and 4.5; docs/requirements.md R-64, R-67, R-69.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from eagle3core.errors import InvariantViolated


class BlockPool:
    """The account of blocks 0..n_blocks - 1.

    Attributes:
        n_evicted: kept blocks that were thrown away so far, since their room was needed.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks, self.n_evicted = n_blocks, 0
        self._holders = [0] * n_blocks
        self._free = list(range(n_blocks))  # a heap: the lowest are taken first, so that most lie side by side
        heapify(self._free)
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest let go first
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def n_free(self) -> int:
        """Blocks that are empty."""
        return len(self._free)

    @property
    def n_kept(self) -> int:
        """Blocks that nobody holds, kept for what is in them."""
        return len(self._kept)

    @property
    def n_available(self) -> int:
        """Blocks that can be taken, kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def n_held(self) -> int:
        """Blocks that somebody holds."""
        return self.n_blocks - self.n_available

    def n_holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    def is_free(self, block: int) -> bool:
        """Whether nobody holds a block, and what is in it means nothing."""
        return not self._holders[block] and block not in self._kept

    def take(self, n: int) -> list[int] | None:
        """`n` blocks with one holder each, whose content means nothing; None, and nothing changed, if there are fewer.

        Kept blocks are thrown away where the free ones do not suffice.
        """
        if n > self.n_available:
            return None
        while len(self._free) < n:
            block, _ = self._kept.popitem(last=False)
            del self._named[self._names.pop(block)]
            heappush(self._free, block)
            self.n_evicted += 1
        taken = [heappop(self._free) for _ in range(n)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One holder more for each of `blocks`, which are held or kept.

        Raises:
            InvariantViolated: a block that is free: what was in it is gone.
        """
        for block in blocks:
            if not self._holders[block] and block not in self._kept:
                raise _broken(block, "is shared while it is free", "a block that is held or kept")
        for block in blocks:
            self._kept.pop(block, None)
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each of `blocks`, given in the order of their tokens.

        Raises:
            InvariantViolated: a block that nobody holds.
        """
        for block in reversed(blocks):
            if not self._holders[block]:
                raise _broken(block, "is given back by nobody who holds it", "a block that is held")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._names:
                self._kept[block] = None
            else:
                heappush(self._free, block)

    def name(self, block: int, name: bytes) -> None:
        """Say what is in a held block, so that `find` gives it; the first of a name stays.

        Raises:
            InvariantViolated: a block that nobody holds, or that has another name.
        """
        if not self._holders[block] or self._names.get(block, name) != name:
            raise _broken(block, "is named again or while nobody holds it", "one name for as long as it is held")
        if name not in self._named:
            self._named[name], self._names[block] = block, name

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the first of `names`, up to the first that is not there."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def n_takeable(self, shared: Sequence[int]) -> int:
        """Blocks that could still be taken once `shared` were held."""
        return self.n_available - sum(block in self._kept for block in shared)


def _broken(block: int, what: str, allowed: str) -> InvariantViolated:
    return InvariantViolated(f"cache block {block} {what}", allowed, "report this: the account of blocks is wrong")
