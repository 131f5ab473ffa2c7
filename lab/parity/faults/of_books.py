"""Bugs in what the host keeps of requests: their look-ups, and who holds which block of the cache.

They replace a method of an engine that was just made, beside the one that ships: what is private to the books is read
here, as a bug in them would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle3core import Engine
from eagle3core.lookup import Lookup
from lab.parity.faults.run_fault import RunFault


class _Late:
    """A look-up whose drafts begin with the token after the one that is to come."""

    def __init__(self, inner: Lookup) -> None:
        self._inner = inner

    def extend(self, tokens: Sequence[int]) -> None:
        """As the right one."""
        self._inner.extend(tokens)

    def propose(self, n: int) -> list[int]:
        """All but the first."""
        return self._inner.propose(n + 1)[1:]


def _late(engine: Engine) -> None:
    proposals: Any = engine.book._proposals
    make: Callable[[], Lookup] = proposals._make
    proposals._make = lambda: _Late(make())


def _in_one_text(engine: Engine) -> None:
    proposals: Any = engine.book._proposals
    lookup = proposals._make()
    proposals._make = lambda: lookup


def _uncounted(engine: Engine) -> None:
    """Who shares a block that somebody holds is not counted."""
    pool: Any = engine.book.blocks.pool
    share = pool.share
    pool.share = lambda blocks: share([block for block in blocks if not pool.n_holders(block)])


def _kept_back(engine: Engine) -> None:
    pool: Any = engine.book.blocks.pool
    give_back = pool.give_back
    pool.give_back = lambda blocks: give_back(blocks[:-1] if len(blocks) > 1 else blocks)


def _without_what_came_before(engine: Engine) -> None:
    """The second block of a text has the name of its own tokens."""
    blocks: Any = engine.book.blocks
    names_of, block = blocks._names_of, blocks._sizes.block

    def by_content(request: Any) -> list[bytes]:
        tokens = [*request.prompt, *request.token_ids]
        return [repr(tokens[i * block : (i + 1) * block]).encode() for i in range(len(names_of(request)))]

    blocks._names_of = by_content


def _a_step_early(engine: Engine) -> None:
    """The draft's rows of tokens that were just accepted are those of its own guesses, and count as final."""
    blocks: Any = engine.book.blocks
    committed = blocks.committed

    def early(request: Any, step: int, n: int, **how: bool) -> None:
        committed(request, step, n, **how)
        held = blocks._held[request.id]
        held.n_final = held.n_known

    blocks.committed = early


def _not_entered(engine: Engine) -> None:
    """The tables that steps read do not get the blocks of a request that grows."""
    tables: Any = engine.runner.tables
    tables.extend = lambda slot, n_held, taken: None


BOOK_FAULTS = (
    RunFault("lookup_late", "what was found is proposed one token late", "look-ups", "drafts", spoil=_late),
    RunFault("lookup_shared", "all requests are looked up in one text", "look-ups", "drafts", spoil=_in_one_text),
    RunFault(
        "freed_while_shared", "a block is free once the first of those who share it ends", "blocks", "account",
        spoil=_uncounted,
    ),
    RunFault("block_kept_back", "a request's last block is not given back", "blocks", "account", spoil=_kept_back),
    RunFault(
        "grown_not_entered", "blocks that a request grows by are not entered in its table", "blocks", "account",
        spoil=_not_entered,
    ),
    RunFault(
        "names_without_past", "blocks are found by their own tokens, whatever stood before them", "blocks", "tokens",
        spoil=_without_what_came_before,
    ),
    RunFault(
        "stale_draft_rows", "blocks are kept before the draft's rows in them are final", "blocks", "drafts",
        spoil=_a_step_early,
    ),
)  # fmt: skip
