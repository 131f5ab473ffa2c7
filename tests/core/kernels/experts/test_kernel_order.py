"""Matrices in the kernels' order: the same values, for every byte and scale, and nothing that the kernels misread."""

from __future__ import annotations

import pytest
import torch
from statements import computed, two_of

from eagle3core.errors import KernelLimit
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.experts.maps.form import Form, form_for, piece_units
from eagle3core.kernels.experts.maps.order import ALTERNATE, COLUMNS, HALVES, MOST_SCALE, Pairs, ordered_mxfp4
from eagle3core.kernels.experts.matrices import Mxfp4Matrices, PlainMatrices, in_order
from eagle3core.kernels.experts.mxfp4 import E2M1
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.order.weight import pack_weight
from eagle3core.kernels.isa.e2m1 import POWERS_BF16, WIDEN_E2M1
from eagle3core.kernels.isa.four_bits import PLACES
from eagle3core.weights.fp8 import quantised

pytestmark = pytest.mark.reference

PAIRS = (COLUMNS, HALVES, ALTERNATE)


def stored(n: int = 2, rows: int = 48, units: int = 5) -> Mxfp4Matrices:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (n, rows, units, 16), generator=random).to(torch.uint8)
    scales = torch.randint(MOST_SCALE + 1, (n, rows, units), generator=random).to(torch.uint8)
    return Mxfp4Matrices(blocks, scales, torch.randn(n, rows, generator=random))


@pytest.mark.parametrize("pairs", PAIRS)
def test_matrices_in_order_mean_what_they_meant(pairs: Pairs) -> None:
    four_bits = stored()
    weight = torch.randn(2, 48, 160).bfloat16()
    made = in_order(2, lambda i: (four_bits.blocks[i], four_bits.scales[i]), pairs, four_bits.bias)
    plain = in_order(2, lambda i: weight[i], pairs)
    assert made.data.nbytes == four_bits.blocks.nbytes + four_bits.scales.nbytes, "no byte more than is stored"
    for i in range(2):
        assert torch.equal(made.of(i, torch.float64), four_bits.of(i, torch.float64))
        assert torch.equal(made.bias_of(i), four_bits.bias[i])  # type: ignore[arg-type,index]
        assert torch.equal(plain.of(i, torch.bfloat16), weight[i])
        assert torch.equal(made.rolled().of(i, torch.float64), four_bits.rolled().of(i, torch.float64))
    assert plain.bias_of(0) is None
    eight_bits = [quantised(matrix) for matrix in weight]
    eight = in_order(2, lambda i: eight_bits[i], pairs)
    stored_rows, scales = (torch.stack(t) for t in zip(*eight_bits, strict=True))
    whole = PlainMatrices(stored_rows, None, scales)
    for i in range(2):
        expected = eight_bits[i][0].double() * eight_bits[i][1][:, None].double()
        assert torch.equal(eight.of(i, torch.float64), expected)
        assert torch.equal(whole.of(i, torch.float64), expected)
        assert torch.equal(whole.rolled().of(i, torch.float64), whole.of(i - 1, torch.float64))
        assert torch.equal(eight.rolled().of(i, torch.float64), eight.of(i - 1, torch.float64))


@pytest.mark.parametrize("pairs", [COLUMNS, HALVES])
def test_scales_of_blocks_stay_with_their_eight_rows(pairs: Pairs) -> None:
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(2, 48, 160, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 6, 2, generator=random)
    meant = weight.double() * scales.repeat_interleave(8, 1).repeat_interleave(128, 2)[..., :160].double()
    made = in_order(2, lambda i: (weight[i], scales[i]), pairs)
    whole = PlainMatrices(weight, None, scales)
    assert made.form == "fp8_blocks"
    assert sum(t.nbytes for t in made.tensors) == weight.nbytes + scales.nbytes, "no byte more than is stored"
    for maps in (made, whole):
        assert all(torch.equal(maps.of(i, torch.float64), meant[i]) for i in range(2))
        assert torch.equal(maps.rolled().of(0, torch.float64), meant[1])


@pytest.mark.parametrize(("pairs", "kind"), [(HALVES, "swiglu"), (COLUMNS, "store")])
def test_sixteen_bits_lie_as_the_gemm_has_them(pairs: Pairs, kind: str) -> None:
    w = torch.randn(32, 96).half()
    packed = pack_weight(w, Epilogue(kind))  # type: ignore[arg-type]
    assert torch.equal(in_order(1, lambda i: w, pairs).data.flatten(), packed.flatten())


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("scale", [0, 1, 100, 127, MOST_SCALE])
def test_a_word_comes_apart_into_all_values_of_four_bits_at_any_scale(scale: int, half: int) -> None:
    """Value c in place i of a word, for all c and i, by what the kernels call and by its PTX; the other row's scale is
    another one."""
    scales_of_rows = torch.full((16, 1), MOST_SCALE - scale, dtype=torch.uint8)
    scales_of_rows[8 * half : 8 * half + 8] = scale
    for shift in range(8):
        codes = [(place + shift) % 8 | (shift % 2) * 8 for place in range(32)]
        block = torch.tensor([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
        blocks = block.to(torch.uint8).expand(16, 1, 16)
        unit = ordered_mxfp4(blocks, scales_of_rows, COLUMNS)[0, 0]
        scales = int(unit[256:260].contiguous().view(torch.int32))
        powers, found = emulator.powers_bf16(scales, 0x4140), []
        assert computed(POWERS_BF16, {"$1": scales & 0xFFFFFFFF, "$2": 0x4140}, "bf16") == [powers & 0xFFFFFFFF]
        for lane in range(4):
            at = lane * 8 + 4 * half
            word = int(unit[at : at + 4].contiguous().view(torch.int32))
            pairs = [pair & 0xFFFFFFFF for pair in emulator.WIDEN_E2M1_BF16[half](word, powers)]
            given = {"$4": word & 0xFFFFFFFF, "$5": powers & 0xFFFFFFFF}
            assert computed(WIDEN_E2M1[half], given, "bf16") == pairs
            found += [value for pair in pairs for value in two_of(pair, "bf16")]
        assert found == [(-1.0) ** (code >> 3) * E2M1[code & 7] * 2.0 ** (scale - 127) for code in codes]


def test_every_bit_of_a_word_is_one_of_one_value() -> None:
    """One rotation brings a pair's bits to where bf16 has them, and two those of the last pair."""
    assert sorted(at for pair in PLACES for places in pair for at in places) == list(range(32))
    in_bf16 = (6, 7, 8, 15)  # fraction, exponent, sign
    rotations = [{(to - at) % 32 for at, to in zip(even, in_bf16, strict=True)} for even, _ in PLACES]
    assert rotations == [{0}, {4}, {10}, {6, 30}]


def test_what_the_kernels_have_no_order_for_is_refused() -> None:
    maps = stored(1)
    maps.scales[0, 3, 1] = MOST_SCALE + 1
    with pytest.raises(KernelLimit, match=r"a group's scale is 2\^2"):
        ordered_mxfp4(maps.blocks[0], maps.scales[0], COLUMNS)
    with pytest.raises(KernelLimit, match="gates and ups in turn, in FP8 by block"):
        in_order(1, lambda i: (torch.zeros(32, 32).to(torch.float8_e4m3fn), torch.ones(4, 1)), ALTERNATE)
    with pytest.raises(KernelLimit, match="map has 24 rows"):
        in_order(1, lambda i: torch.zeros(24, 32), COLUMNS)
    with pytest.raises(KernelLimit, match="reads 40 values"):
        in_order(1, lambda i: torch.zeros(32, 40), COLUMNS)


@pytest.mark.parametrize(
    ("k", "piece", "of_blocks"),
    [(2880, 6, 2), (2048, 4, 4), (768, 6, 2), (1536, 6, 4), (4096, 4, 4), (1440, 3, 1), (64, 1, 1), (32, 1, 1)],
)
def test_k_is_cut_by_itself_alone_into_streams_of_nearly_one_length(k: int, piece: int, of_blocks: int) -> None:
    for form in ("mxfp4", "plain", "fp8", "fp8_blocks"):
        expected = of_blocks if form == "fp8_blocks" else piece
        assert piece_units(k, form) == expected
        cuts = [form_for(form, k, x_tiles) for x_tiles in (1, 2, 4, 8)]
        assert all(expected % cut.step == 0 and cut.stages >= 2 for cut in cuts)
        assert all(isinstance(cut, Form) and cut.shared_bytes(form) <= 227 * 1024 for cut in cuts)


def test_plain_matrices_have_the_biases_of_their_experts() -> None:
    maps = PlainMatrices(torch.zeros(2, 16, 32), torch.arange(32.0).view(2, 16))
    assert torch.equal(maps.bias_of(1), torch.arange(16.0) + 16)  # type: ignore[arg-type]
    assert PlainMatrices(maps.weight).bias_of(1) is None
