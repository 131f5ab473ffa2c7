"""The account of cache blocks, held against the tables that a step reads and against itself once nobody runs."""

from __future__ import annotations

from typing import Any

from eagle3core import Engine
from eagle3core.kernels.slots.slot_state import DRAFT_LENGTH, LENGTH, RUNNING


def watched(engine: Engine) -> Engine:
    """The engine, which before every step finds its tables true: rows in blocks of the request's own alone."""
    runner, blocks = engine.runner, engine.book.blocks
    enqueue, sizes = runner.enqueue, engine.runner.sizes

    def checked(*args: Any, **options: Any) -> None:
        state, table = runner.state.state, runner.state.tables.tolist()
        written: list[int] = []
        for slot in state[RUNNING].nonzero()[:, 0].tolist():
            length, draft_length = int(state[LENGTH, slot]), int(state[DRAFT_LENGTH, slot])
            first = draft_length if runner.draft is not None else length
            ends = range(first // sizes.block, (length + sizes.path_len - 1) // sizes.block + 1)
            assert all(block >= 0 for block in table[slot][: ends.stop]), "a row without a block"
            written += [table[slot][i] for i in ends]
        assert len(set(written)) == len(written), "two requests write to one block"
        assert all(blocks.pool.n_holders(block) == 1 for block in written), "somebody else may read what is written"
        enqueue(*args, **options)

    runner.enqueue = checked  # type: ignore[method-assign]
    return engine


def assert_all_blocks_are_back(engine: Engine) -> None:
    """Nobody holds any."""
    pool, counts = engine.book.blocks.pool, engine.book.blocks.counts
    assert (pool.n_held, pool.n_available) == (0, pool.n_blocks)
    assert counts.n_taken == counts.n_given_back > 0
