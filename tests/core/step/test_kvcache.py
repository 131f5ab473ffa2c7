"""The paged cache never loses a block, never hands one out twice, and writes only the rows it is told to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from eagle3core.decode.kvcache import CacheView, PagedCache, blocks_for
from eagle3core.errors import InvariantViolated
from eagle3core.geometry import BlockGeometry, RopeGeometry

pytestmark = pytest.mark.reference

N_SLOTS, MAX_TOKENS, BLOCK, N_LAYERS, N_KV_HEADS, HEAD_DIM = 3, 22, 4, 2, 2, 4


def new_cache() -> PagedCache:
    """A cache of three slots with six blocks of four tokens each."""
    geometry = BlockGeometry(16, 16, 4, N_KV_HEADS, HEAD_DIM, 1e-5, RopeGeometry())
    return PagedCache(
        geometry,
        n_layers=N_LAYERS,
        n_slots=N_SLOTS,
        max_tokens=MAX_TOKENS,
        block_size=BLOCK,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def check_ownership(cache: PagedCache) -> None:
    """Every block is free or held, exactly once, and the tables say who holds it."""
    held = [block for blocks in cache.held for block in blocks]
    assert sorted(held + cache.free_blocks) == list(range(N_SLOTS * cache.blocks_per_slot))
    for slot, blocks in enumerate(cache.held):
        padding = [-1] * (cache.blocks_per_slot - len(blocks))
        assert cache.block_tables[slot].tolist() == blocks + padding


class BlockLedger(RuleBasedStateMachine):
    """Any sequence of reservations, truncations and releases against a count of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_cache()
        self.n_blocks = [0] * N_SLOTS

    @rule(slot=st.integers(0, N_SLOTS - 1), n_tokens=st.integers(0, MAX_TOKENS + 2))
    def reserve(self, slot: int, n_tokens: int) -> None:
        before = list(self.cache.held[slot])
        self.cache.reserve(slot, n_tokens)
        self.n_blocks[slot] = max(self.n_blocks[slot], -(-n_tokens // BLOCK))
        assert self.cache.held[slot][: len(before)] == before

    @rule(slot=st.integers(0, N_SLOTS - 1), n_tokens=st.integers(0, MAX_TOKENS))
    def truncate(self, slot: int, n_tokens: int) -> None:
        before = list(self.cache.held[slot])
        freed = self.cache.truncate(slot, n_tokens)
        self.n_blocks[slot] = min(self.n_blocks[slot], -(-n_tokens // BLOCK))
        assert self.cache.held[slot] == before[: len(before) - freed]

    @rule(slot=st.integers(0, N_SLOTS - 1), n_tokens=st.integers(MAX_TOKENS + 3, 999))
    def reserve_too_much(self, slot: int, n_tokens: int) -> None:
        with pytest.raises(InvariantViolated):
            self.cache.reserve(slot, n_tokens)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        check_ownership(self.cache)
        assert [len(blocks) for blocks in self.cache.held] == self.n_blocks


TestBlockLedger = BlockLedger.TestCase


@given(st.integers(0, 999), st.integers(1, 99))
def test_blocks_hold_their_tokens_with_less_than_one_to_spare(n_tokens: int, block_size: int) -> None:
    n_blocks = blocks_for(n_tokens, block_size)
    assert 0 <= n_blocks * block_size - n_tokens < block_size


def test_an_empty_pool_is_an_error_that_takes_nothing() -> None:
    cache = new_cache()
    cache.reserve(0, 24)
    cache.reserve(1, 24)
    del cache.free_blocks[2:]  # as if a third sequence had taken the rest
    with pytest.raises(InvariantViolated, match=r"slot 2 asks for 3 KV blocks \(12 tokens\) with 2 free"):
        cache.reserve(2, 12)
    assert cache.held[2] == []
    cache.reserve(2, 8)
    assert len(cache.held[2]) == 2


def rows_like(valid: Tensor) -> Tensor:
    """Distinct keys `[B, T, K, D]`."""
    return torch.arange(1, valid.numel() * N_KV_HEADS * HEAD_DIM + 1).double().view(*valid.shape, N_KV_HEADS, HEAD_DIM)


def test_a_write_changes_its_valid_rows_in_its_own_layer_and_nothing_else() -> None:
    cache = new_cache()
    cache.reserve(0, 9)
    cache.reserve(2, 7)
    cache.k.fill_(-1.0)
    cache.v.fill_(-2.0)
    view = cache.view(torch.tensor([0, 2]))
    starts = torch.tensor([3, 6])
    valid = torch.tensor([[True, True, False, True, True], [True, False, False, False, False]])
    k = rows_like(valid)
    view.write(1, starts, k, 10 * k, valid)
    assert bool((cache.k[0] == -1).all())
    assert bool((cache.v[0] == -2).all())
    keys, values = view.read(1, 0, 9)
    for token, row in zip([3, 4, 6, 7], [0, 1, 3, 4], strict=True):
        assert torch.equal(keys[token], k[0, row])
        assert torch.equal(values[token], 10 * k[0, row])
    for token in (0, 1, 2, 5, 8):
        assert bool((keys[token] == -1).all())
    assert torch.equal(view.read(1, 1, 7)[0][6], k[1, 0])
    assert int((cache.k[1] != -1).sum()) == int(valid.sum()) * N_KV_HEADS * HEAD_DIM


@pytest.mark.parametrize("start", [5, 8, 23])
def test_a_write_outside_the_reserved_blocks_is_an_error(start: int) -> None:
    cache = new_cache()
    cache.reserve(0, 6)
    valid = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(InvariantViolated, match="does not hold"):
        cache.view(torch.tensor([0])).write(0, torch.tensor([start]), rows_like(valid), rows_like(valid), valid)


def filled_view(lengths: list[int]) -> CacheView:
    """A view of slots with `lengths` tokens, each row a number of its own."""
    cache = new_cache()
    for slot, length in enumerate(lengths):
        cache.reserve(slot, length)
    view = cache.view(torch.arange(len(lengths)))
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    for layer in range(N_LAYERS):
        k = rows_like(valid) + 1000 * layer
        view.write(layer, torch.zeros(len(lengths), dtype=torch.int64), k, -k, valid)
    return view


@st.composite
def paths(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Prefix lengths and, a row each, increasing node numbers that start at the root, as accepted paths are."""
    starts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=N_SLOTS))
    chosen = [[0, *sorted(draw(st.sets(st.integers(1, 8), max_size=4)))] for _ in starts]
    return starts, chosen


@given(paths())
def test_keeping_a_path_makes_it_one_run_and_touches_nothing_before_it(case: tuple[list[int], list[list[int]]]) -> None:
    starts, chosen = case
    width = max(map(len, chosen))
    view = filled_view([start + 9 for start in starts])
    before = [[view.read(layer, b, start + 9) for layer in range(N_LAYERS)] for b, start in enumerate(starts)]
    before = [[(k.clone(), v.clone()) for k, v in layers] for layers in before]
    sources = torch.tensor([row + [0] * (width - len(row)) for row in chosen])
    valid = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in chosen])
    view.move(torch.tensor(starts), sources, valid)
    for b, (start, row) in enumerate(zip(starts, chosen, strict=True)):
        kept = [*range(start), *(start + node for node in row)]
        rest = range(len(kept), start + 9)  # rows past the path are free to hold anything; these keep what they had
        for layer in range(N_LAYERS):
            for now, then in zip(view.read(layer, b, start + 9), before[b][layer], strict=True):
                assert torch.equal(now[: len(kept)], then[kept])
                assert torch.equal(now[list(rest)], then[list(rest)])


def test_keeping_a_chain_moves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    view = filled_view([9, 7])

    def refuse(*_: object) -> None:
        raise AssertionError("a chain must not be copied")

    monkeypatch.setattr(view, "_locate", refuse)
    view.move(torch.tensor([2, 1]), torch.arange(4).expand(2, -1), torch.ones(2, 4, dtype=torch.bool))


def test_the_cache_counts_its_bytes() -> None:
    cache = new_cache()
    assert cache.n_bytes == 2 * N_LAYERS * (N_SLOTS * 6) * N_KV_HEADS * BLOCK * HEAD_DIM * 8
    assert cache.n_bytes == cache.k.nbytes + cache.v.nbytes


def test_views_see_what_other_views_write() -> None:
    cache = new_cache()
    cache.reserve(1, 4)
    valid = torch.ones(1, 2, dtype=torch.bool)
    k = rows_like(valid)
    cache.view(torch.tensor([1])).write(0, torch.tensor([1]), k, k, valid)
    assert torch.equal(cache.view(torch.tensor([0, 1])).read(0, 1, 3)[0][1:], k[0])
