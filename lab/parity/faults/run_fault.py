"""What a planted bug is that no stage of a pass shows: in trees, look-ups, small models, caches, or the account of
blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from eagle3core import Engine
from lab.parity.faults.fault import Change

# tokens: those of plain decoding, one request at a time (`lab.probes.proofs.identity`, and the tests of every engine).
# drafts: what is drafted, against the official code's tree, the small model alone, a look-up of a request's own, and
# what is drafted without a prefix cache.
# account: every block is given back, nobody writes where another reads, and the pool itself refuses what cannot be.
# shares: how often drawn drafts are accepted, against what both models' logits say of it.
FoundBy = Literal["tokens", "drafts", "account", "shares"]
Where = Literal["trees", "small model", "look-ups", "blocks", "chains", "batches", "draws", "caches"]


@dataclass(frozen=True)
class RunFault:
    """One bug, in the programs of a step or in what the host keeps of requests.

    Attributes:
        name: how it is asked for. what: the bug, in words.
        where: the engines that can have it.
        found_by: the check that fails; where that is not `tokens`, verification hides the bug from whoever looks at
            the output alone.
        change: as in `Fault`. spoil: changes an engine that was just made.
    """

    name: str
    what: str
    where: Where
    found_by: FoundBy
    change: Change | None = None
    spoil: Callable[[Engine], None] | None = None
