"""A rewind takes back exactly the rejected drafts and frees exactly the blocks past the new length."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_kvcache import BLOCK, MAX_TOKENS, N_SLOTS, check_ownership, new_cache

from eagle3core.decode.rewind import (
    KVCacheRewindParams,
    cleared_block_range,
    compute_rewind_lengths,
    rewind_kv_cache,
)
from eagle3core.errors import InvariantViolated

pytestmark = pytest.mark.reference

lengths = st.lists(st.integers(0, MAX_TOKENS), min_size=N_SLOTS, max_size=N_SLOTS)


def test_what_was_drafted_and_not_accepted_is_taken_back() -> None:
    drafted, accepted = torch.tensor([3, 3, 3, 0, 2]), torch.tensor([0, 2, 3, 0, 3])
    assert compute_rewind_lengths(drafted, accepted).tolist() == [3, 1, 0, 0, 0]


@given(old=lengths, rewinds=lengths, order=st.permutations(range(N_SLOTS)), n_rows=st.integers(1, N_SLOTS))
def test_exactly_the_blocks_past_the_new_length_are_freed(
    old: list[int], rewinds: list[int], order: list[int], n_rows: int
) -> None:
    assume(all(rewind <= length for rewind, length in zip(rewinds, old, strict=True)))
    cache = new_cache()
    for slot, length in enumerate(old):
        cache.reserve(slot, length)
    tables = cache.block_tables.clone()
    slots = order[:n_rows]
    params = KVCacheRewindParams(
        cache, torch.tensor(slots), torch.tensor([old[s] for s in slots]), torch.tensor([rewinds[s] for s in slots])
    )
    freed = rewind_kv_cache(params)
    expected = tables.clone()
    for row, slot in enumerate(slots):
        cleared = cleared_block_range(old[slot], old[slot] - rewinds[slot], BLOCK)
        expected[slot, list(cleared)] = -1
        assert int(freed[row]) == len(cleared)
        if rewinds[slot] < old[slot]:  # the block of the last kept token stays, however little of it is used
            assert int(cache.block_tables[slot, (old[slot] - rewinds[slot] - 1) // BLOCK]) >= 0
    assert torch.equal(cache.block_tables, expected)
    check_ownership(cache)


@pytest.mark.parametrize(
    ("old", "new", "cleared"), [(12, 9, []), (12, 8, [2]), (13, 12, [3]), (5, 4, [1]), (4, 0, [0]), (9, 1, [1, 2])]
)
def test_a_partly_used_block_stays(old: int, new: int, cleared: list[int]) -> None:
    assert list(cleared_block_range(old, new, 4)) == cleared


@pytest.mark.parametrize(("old", "rewind"), [(3, 4), (3, -1)])
def test_more_than_is_there_cannot_be_taken_back(old: int, rewind: int) -> None:
    with pytest.raises(InvariantViolated, match="0 <= rewind <= cached length"):
        KVCacheRewindParams(new_cache(), torch.tensor([0]), torch.tensor([old]), torch.tensor([rewind]))


def test_rewinds_are_logged_only_when_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "eagle3core")
    cache = new_cache()
    cache.reserve(0, 9)
    monkeypatch.delenv("EAGLE3_KV_DEBUG", raising=False)
    rewind_kv_cache(KVCacheRewindParams(cache, torch.tensor([0]), torch.tensor([9]), torch.tensor([1])))
    assert caplog.messages == []
    monkeypatch.setenv("EAGLE3_KV_DEBUG", "1")
    rewind_kv_cache(KVCacheRewindParams(cache, torch.tensor([0]), torch.tensor([8]), torch.tensor([5])))
    assert caplog.messages == ["[EAGLE][KVRewind] slots [0] new lengths [3] freed blocks [1]"]
