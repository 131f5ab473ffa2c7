"""The tiling where nothing was tuned: who shares K, how high and wide blocks are, and how deep a ring fits."""

from itertools import product

import pytest

from eagle3core.kernels.card import SHARED_BYTES_SM
from eagle3core.kernels.gemm.products import STREAMS
from eagle3core.kernels.gemm.tiling import MULTIPROCESSORS, Tiling, deepest, ruled_tiling

pytestmark = pytest.mark.reference


def test_wide_blocks_share_k_where_it_is_long_enough_to_pay_for_the_sums_and_all_blocks_run_at_once():
    def choice(n_tiles, k):
        return ruled_tiling("sm_90a", 100, n_tiles, k)

    assert [choice(128, k).split for k in (512, 4096)] == [1, STREAMS]
    assert choice(128, 4096).together
    assert choice(1792, 4096).split == 1, "more blocks than processors"


def test_narrow_blocks_are_as_high_as_the_rows_and_small_where_large_ones_would_leave_processors_idle():
    def choice(rows, blocks):
        return ruled_tiling("sm_90a", rows, 8 * blocks, 4096)

    whole = 2 * MULTIPROCESSORS
    assert [choice(rows, whole).x_tiles for rows in (17, 24, 25, 32, 33, 48, 49, 64)] == [3, 3, 4, 4, 6, 6, 8, 8]
    assert [choice(40, blocks).w_tiles for blocks in (whole, MULTIPROCESSORS + 10)] == [8, 4]


def test_the_deepest_ring_leaves_each_block_its_share_of_a_processor_and_has_stages_no_longer_than_k():
    for x_tiles, units, blocks in product((2, 3, 4, 5, 6, 8), (1, 4), (1, 2, 3)):
        tiling = deepest("sm_90a", Tiling("group", x_tiles, 4, units, 32), units=64, blocks=blocks)
        assert blocks * (tiling.shared_bytes + 1024) <= SHARED_BYTES_SM["sm_90a"], tiling.name
    short = Tiling("group", 4, 4, 4, 8)
    assert [deepest("sm_90a", short, units=units, blocks=1).units for units in (1, 3, 4)] == [1, 2, 4]
