"""Blocks hold zeros while nobody holds them, so that no prompt that arrives has to wait for any."""

from __future__ import annotations

import pytest
import torch
from block_accounts import watched
from lettered import lettered_engine, lettered_prompts
from rings import slow_but
from test_requests_join_and_leave import assert_each_has_its_own, run_arrivals
from tiny_engines import Pair, new_tokens
from torch import Tensor

from eagle3core import Engine

pytestmark = pytest.mark.reference


def rows_in(engine: Engine, blocks: list[int]) -> list[Tensor]:
    """Keys and values of all models in the blocks."""
    at = torch.tensor(blocks, dtype=torch.int64)
    return [cache.index_select(cache.dim() - 4, at) for cache in engine.runner.state.pages]


def free_blocks(engine: Engine) -> list[int]:
    pool = engine.book.blocks.pool
    return [block for block in range(pool.n_blocks) if pool.is_free(block)]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("k", "n_behind"), slow_but([(3, 1)], [(None, 1), (3, 0), (3, 1)]))
def test_blocks_that_nobody_holds_are_zeros_after_every_round(
    letters: Pair, alone: list[list[int]], k: int | None, n_behind: int, keeps: bool
) -> None:
    engine = watched(lettered_engine(letters, k, 4, n_behind, cache_blocks=34, block_size=2, prefix_cache=keeps))
    step = engine.step

    def checked() -> bool:
        is_busy = step()
        assert not any(rows.any() for rows in rows_in(engine, free_blocks(engine)))
        return is_busy

    engine.step = checked  # type: ignore[method-assign]
    assert_each_has_its_own(run_arrivals(engine, alone, 16, seed=0, run_on=0.8), alone)
    assert engine.book.blocks.counts.n_put_back > 0, "blocks never ran out"
    assert not keeps or engine.book.blocks.pool.n_evicted > 0


def test_blocks_that_a_failure_left_are_zeroed_before_they_are_given_again(
    letters: Pair, alone: list[list[int]]
) -> None:
    engine, prompts = lettered_engine(letters, 3), lettered_prompts()
    engine.add_request(prompts[6], new_tokens(12))
    engine.step()
    held = [block for block in engine.runner.state.tables[0].tolist() if block >= 0]
    for cache in engine.runner.state.pages:
        cache.index_fill_(cache.dim() - 4, torch.tensor(held), torch.inf)
    engine.book.fail(RuntimeError("broken off"))
    assert all(rows.isinf().all() for rows in rows_in(engine, held))
    handle = engine.add_request(prompts[5], new_tokens(12))
    engine.step()
    taken = [block for block in engine.runner.state.tables[0].tolist() if block >= 0]
    assert taken
    assert set(taken) <= set(held)
    assert not any(rows.isinf().any() for rows in rows_in(engine, taken))
    while engine.step():
        pass
    assert handle.token_ids == alone[5][:12]
