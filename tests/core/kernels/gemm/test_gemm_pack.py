"""x in the order of warpgroups: the kernel against a plain rearrangement, and what a product finds there."""

import pytest
import torch

from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.order.pack import pack_rows, pack_rows_reference, packed_words

SIZES = [(3, 80, 1, 1), (11, 528, 2, 2), (17, 272, 1, 2), (9, 544, 1, 4), (33, 48, 2, 1)]


@pytest.mark.emulated
@pytest.mark.parametrize(("rows", "k", "x_tiles", "units"), SIZES)
def test_every_piece_lies_where_the_reference_puts_it(rows, k, x_tiles, units):
    x = torch.randn(rows, k).bfloat16()
    packed = torch.full((packed_words(rows, k, x_tiles, units),), float("nan"))
    emulator.execute([pack_rows("sm_90a", x, packed, x_tiles, units)])
    expected = pack_rows_reference(x, x_tiles, units).view(-1).view(torch.int16)
    assert torch.equal(packed.view(torch.int16), expected)


@pytest.mark.reference
def test_a_piece_holds_two_elements_of_every_eight_and_streams_end_in_zeros():
    k, units = 32 * 9, 2  # streams of 2, 2, 2 and 3 units
    x = torch.arange(k, dtype=torch.float32).view(1, k)
    packed = pack_rows_reference(x, 1, units)
    assert packed.shape == (1, 4, 4, 2, 1, 2, 8, 8)
    assert packed[0, 1, 0, 0, 0, 0, 0].tolist() == [64, 65, 72, 73, 80, 81, 88, 89]
    assert packed[0, 1, 0, 1, 0, 1, 0].tolist() == [70, 71, 78, 79, 86, 87, 94, 95]
    assert packed[0, 0, 2:].count_nonzero() == 0
    # The last stage would read W past its end, so it starts a unit earlier and holds zeros there.
    assert packed[0, 3, 2].count_nonzero() == 0
    assert packed[0, 3, 3, 0, 0, 0, 0].tolist() == [256, 257, 264, 265, 272, 273, 280, 281]
    assert packed[0, ..., 1:, :].count_nonzero() == 0  # rows past the last
