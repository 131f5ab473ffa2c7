"""Blocks, slots and rows: the cards' references against plain bookkeeping, and what kernels refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3core.errors import KernelLimit
from eagle3core.kernels.isa.by_row import row_threads
from eagle3core.kernels.layer.embedding import embedding_reference, partial_squares_reference
from eagle3core.kernels.layer.gather_rows import gather_rows, gather_rows_reference
from eagle3core.kernels.layer.rms_norm import rms_norm_reference
from eagle3core.kernels.layer.rope import rope_pairs, rope_tables, rope_variant
from eagle3core.kernels.slots.active_slots import active_slots_reference, active_slots_variant
from eagle3core.kernels.slots.block_table import BlockPool, block_table, block_table_reference, block_table_variant
from eagle3core.kernels.slots.compact_kv import compact_kv_reference, compact_kv_variant
from eagle3core.kernels.slots.open_step import OpenSlots, open_step_reference, open_step_variant
from eagle3core.kernels.slots.slot_state import DRAFT_LENGTH, N_FIELDS, N_PENDING

pytestmark = pytest.mark.reference

N_SLOTS, MAX_TOKENS, BLOCK = 3, 22, 4

lengths = st.lists(st.integers(0, MAX_TOKENS), min_size=N_SLOTS, max_size=N_SLOTS)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(lengths, lengths)
def test_tables_and_the_free_stack_follow_a_plain_ledger(first: list[int], second: list[int]) -> None:
    most = -(-MAX_TOKENS // BLOCK)
    free, held = list(range(N_SLOTS * most)), [list[int]() for _ in range(N_SLOTS)]
    pool = BlockPool(torch.full((N_SLOTS, most), -1, dtype=torch.int32), int32(free), int32([len(free)]))
    slots, before = int32(list(range(N_SLOTS))), [0] * N_SLOTS
    for after in (first, second, [0] * N_SLOTS):
        pool, changed, missing = block_table_reference(pool, slots, int32(before), int32(after), BLOCK)
        had = [len(blocks) for blocks in held]
        for blocks, n_tokens in zip(held, after, strict=True):  # all is taken before anything is returned
            blocks += [free.pop() for _ in range(-(-n_tokens // BLOCK) - len(blocks))]
        for blocks, n_tokens in zip(held, after, strict=True):
            free += [blocks.pop() for _ in range(len(blocks) - -(-n_tokens // BLOCK))]
        assert int(missing.sum()) == 0
        assert pool.tables.tolist() == [blocks + [-1] * (most - len(blocks)) for blocks in held]
        assert pool.free[: int(pool.n_free)].tolist() == free
        assert changed.tolist() == [len(blocks) - n for blocks, n in zip(held, had, strict=True)]
        before = after


def test_a_sequence_whose_blocks_cannot_all_be_had_gets_none() -> None:
    pool = BlockPool(torch.full((2, 4), -1, dtype=torch.int32), int32([5, 6, 7]), int32([3]))
    made, changed, missing = block_table_reference(
        pool, int32([0, 1]), int32([0, 0]), int32([2 * BLOCK, 2 * BLOCK]), BLOCK
    )
    assert (changed.tolist(), missing.tolist()) == ([2, 0], [0, 2])
    assert made.tables.tolist() == [[7, 6, -1, -1], [-1, -1, -1, -1]]
    assert int(made.n_free) == 1


@given(st.data())
def test_compaction_moves_the_rows_of_every_path_one_by_one(data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.integers(0, MAX_TOKENS - 8), min_size=2, max_size=2))
    pages = torch.randn(2, 12, 2, BLOCK, 4)
    tables = torch.randperm(12)[: 2 * 6].view(2, 6).int()
    paths = [[0, *sorted(data.draw(st.sets(st.integers(1, 7), max_size=4)))] for _ in starts]
    path = int32([-1]).repeat(2, 5)
    for b, nodes in enumerate(paths):
        path[b, : len(nodes)] = int32(nodes)
    made = compact_kv_reference(pages, tables, int32(starts), path, int32([len(nodes) for nodes in paths]))
    expected = pages.clone()
    for b, (start, nodes) in enumerate(zip(starts, paths, strict=True)):
        for to, node in enumerate(nodes):
            (target, row), (source, old) = (
                (int(tables[b, (start + n) // BLOCK]), (start + n) % BLOCK) for n in (to, node)
            )
            expected[:, target, :, row] = pages[:, source, :, old]
    assert torch.equal(made, expected)


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_active_slots_ascend_and_the_inverse_undoes_them(flags: list[bool]) -> None:
    n = len(flags)
    zeros, ones = torch.zeros(n, dtype=torch.int32), torch.ones(n, dtype=torch.int32)
    active, inverse, count, _ = active_slots_reference(
        int32([int(f) for f in flags]), zeros, ones, zeros, int32([9]), int32([0])
    )
    kept = torch.tensor([slot for slot, is_on in enumerate(flags) if is_on], dtype=torch.int64)
    assert active[: int(count)].tolist() == kept.tolist()
    assert inverse[kept].tolist() == list(range(len(kept)))
    assert sorted(inverse.tolist())[: n - len(kept)] == [-1] * (n - len(kept))


def test_a_slot_at_its_limit_or_on_an_end_token_is_not_active() -> None:
    active, _, count, _ = active_slots_reference(
        int32([1, 1, 1]), int32([4, 5, 4]), int32([5, 5, 5]), int32([1, 1, 2]), int32([2]), int32([0])
    )
    assert (active.tolist(), count.tolist()) == ([0, -1, -1], [1])


@given(st.lists(st.booleans(), min_size=1, max_size=7))
def test_scattering_by_the_inverse_map_undoes_the_gather_and_fills_dead_slots(flags: list[bool]) -> None:
    n = len(flags)
    zeros, ones = torch.zeros(n, dtype=torch.int32), torch.ones(n, dtype=torch.int32)
    active, inverse, *_ = active_slots_reference(
        int32([int(f) for f in flags]), zeros, ones, zeros, int32([9]), int32([0])
    )
    rows = torch.arange(3 * n, dtype=torch.int32).view(n, 3)
    back = gather_rows_reference(gather_rows_reference(rows, active, 0), inverse, -1)
    assert torch.equal(back, torch.where(torch.tensor(flags)[:, None], rows, -1))


def test_rows_of_a_level_share_a_position_and_are_written_one_behind_the_other() -> None:
    state = torch.zeros(N_FIELDS, 1, dtype=torch.int32)
    state[DRAFT_LENGTH], state[N_PENDING] = 4, 2
    pending, node = (int32([[5, 6]]), int32([[0, 1]])), (int32([0]), int32([[1]]))
    read = OpenSlots(int32([0, -1]), state, *pending, int32([[9, 4, 2]]), *node)
    made = open_step_reference(read, 2, levels=2, block=4, beam=2)
    assert made.chain_lengths.tolist() == [[6, -1], [7, -1]]
    assert made.chain_positions.tolist() == [[[6, 6], [0, 0]], [[7, 7], [0, 0]]]
    assert made.chain_slots.tolist() == [[[4 * 4 + 2, 4 * 4 + 3], [-1, -1]], [[2 * 4, 2 * 4 + 1], [-1, -1]]]


def test_the_rotary_table_holds_what_the_engine_computes_per_position() -> None:
    frequencies = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    cos, sin = rope_tables(frequencies, 1.3, torch.tensor([[0, 5, 11]]), torch.float32)
    table = rope_pairs(frequencies, 1.3, 12)[[0, 5, 11]]
    assert torch.equal(table[..., 0], cos[0])
    assert torch.equal(table[..., 1], sin[0])


def test_scaled_rows_and_partial_sums_give_the_norm_they_stand_for() -> None:
    h, gain = torch.randn(3, 48, dtype=torch.float64), torch.randn(48, dtype=torch.float64)
    scale = torch.rsqrt(partial_squares_reference(h).sum(dim=1, keepdim=True) / 48 + 1e-5)
    assert torch.allclose(h * gain * scale, rms_norm_reference(h, gain, 1e-5))


def test_draft_ids_are_mapped_before_they_are_embedded_and_empty_rows_are_zero() -> None:
    table = torch.arange(12.0).view(6, 2)
    ids, rows = embedding_reference(int32([1, -1, 0]), table, int32([2, 5]))
    assert ids.tolist() == [5, -1, 2]
    assert rows.tolist() == [[10.0, 11.0], [0.0, 0.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: row_threads(12), "multiple of 8"),
        (lambda: row_threads(20000), "up to 16384"),
        (lambda: rope_variant("sm_90a", "bf16", 96, 64), "power of two"),
        (lambda: compact_kv_variant("sm_90a", 128, 48), "power of two"),
        (lambda: open_step_variant("sm_90a", 4, 4, 2, 12), "power of two"),
        (lambda: block_table_variant("sm_90a", 0), "power of two"),
        (lambda: active_slots_variant("sm_90a", 1025), "1..1024"),
        (lambda: gather_rows("sm_90a", *(torch.zeros(1, 3, dtype=torch.int16),) * 3), "multiple of 4"),
        (lambda: block_table("sm_90a", BlockPool(*[int32([0])[None]] * 3), *[int32([0] * 300)] * 5, 4), "at most 256"),
    ],
)
def test_sizes_beyond_a_kernel_are_refused_with_what_is_allowed(refused, message: str) -> None:
    with pytest.raises(KernelLimit, match=message):
        refused()
