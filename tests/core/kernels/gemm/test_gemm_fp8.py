"""W in e4m3: what the conversion's own statement computes, and kernels with the bits of those over 16-bit W."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_examples import FP8_STORE, example
from rings import slow_but, slow_from
from statements import KINDS, computed, two_of

from eagle3core.kernels import proof
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.card import CARD
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.operands import by_element
from eagle3core.kernels.gemm.order.weight import pack_scales, pack_weight, unpack_scales
from eagle3core.kernels.isa import e4m3

CODES = [code for code in range(256) if code & 0x7F != 0x7F]  # two of them are no numbers
SMALL = {
    "ring": {"x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3},
    "group": {"x_tiles": 1, "w_tiles": 4, "units": 2, "stages": 2, "split": 1},
}  # fmt: skip
BLOCKS = {**FP8_STORE, "n": 32, "k": 512, "fp8": "blocks"}


@pytest.mark.reference
@pytest.mark.parametrize("kind", KINDS)
def test_the_statement_and_its_twin_widen_every_value_exactly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    monkeypatch.setattr(e4m3, "instruction", lambda name, asm, *_: statements.append(asm))
    shift, power = {"bf16": (4, "0x7B807B80"), "f16": (1, "0x5C005C00")}[kind]
    e4m3.widen_e4m3(kind, shift, power)
    for first in range(0, len(CODES), 2):
        codes = [CODES[(first + step) % len(CODES)] for step in (0, 1, 77, 140)]
        values = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
        word = sum(code << 8 * i for i, code in enumerate(codes))
        for even, odd in (tuple(computed(statements[0], {"$2": word}, kind)), emulator.WIDEN_E4M3[kind](word)):
            assert two_of(even, kind) == [values[0], values[2]]
            assert two_of(odd, kind) == [values[1], values[3]]


@pytest.mark.reference
def test_fp16_of_neighbours_is_exact_made_in_integers_or_by_the_instructions_twin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statements: list[str] = []
    monkeypatch.setattr(e4m3, "instruction", lambda name, asm, *_: statements.append(asm))
    e4m3.neighbours_in_integers()
    for first in range(0, len(CODES), 2):
        codes = [CODES[(first + step) % len(CODES)] for step in (0, 1, 77, 140)]
        values = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
        word = sum(code << 8 * i for i, code in enumerate(codes))
        twins = [emulator.F16_OF_E4M3[has](word) for has in (True, False)]
        for low, high in (tuple(computed(statements[0], {"$2": word}, "f16")), *twins):
            assert two_of(low, "f16") + two_of(high, "f16") == values
        for has in (True, False):
            even, odd = emulator.F16_OF_E4M3_APART[has](word)
            assert two_of(even, "f16") + two_of(odd, "f16") == [values[i] for i in (0, 2, 1, 3)]
    low, high = (two_of(pair, "f16") for pair in emulator.F16_OF_E4M3[True](0x7FFF0000))
    assert low == [0.0, 0.0]
    assert all(value != value for value in high), "no number stays none where the instruction converts"


@pytest.mark.emulated
@pytest.mark.parametrize("arch", slow_but(["sm_90a"], ["sm_80", "sm_90a"]))
@pytest.mark.parametrize("case", [case for case in (*CARD.cases, *CARD.slow_cases) if case.get("fp8") is True],
                         ids=lambda case: case["kind"])  # fmt: skip
def test_with_powers_of_two_as_scales_bits_are_those_of_16_bit_weights(case: dict[str, Any], arch: str) -> None:
    inputs = example(case)
    inputs["scales"] = 2.0 ** (torch.arange(len(inputs["scales"])) % 5 - 9.0)
    wide = {**inputs, "w": (inputs["w"].float() * inputs["scales"][:, None]).to(inputs["x"].dtype)}
    del wide["scales"]
    ours = proof.run(CARD, arch, case, inputs, emulator.execute)
    theirs = proof.run(CARD, arch, {**case, "fp8": False}, wide, emulator.execute)
    assert {name: proof.differing(ours[name], theirs[name]) for name in ours} == dict.fromkeys(ours, 0)


@pytest.mark.emulated
@pytest.mark.parametrize("kernel", ["ring", "group"])
def test_where_a_stream_is_one_block_its_scales_are_those_of_16_bit_weights_too(kernel: str) -> None:
    """Then a stream's sum is scaled once, by a power of two exactly, as if its weights had been."""
    inputs, setting = example(BLOCKS), {"kernel": kernel, **SMALL[kernel]}
    inputs["scales"] = 2.0 ** (torch.arange(inputs["scales"].numel()).view(inputs["scales"].shape) % 5 - 9.0)
    wide = {**inputs, "w": (inputs["w"].float() * by_element(inputs["scales"], BLOCKS["k"])).to(inputs["x"].dtype)}
    del wide["scales"]
    ours = proof.run(CARD, "sm_90a", BLOCKS, inputs, emulator.execute, setting)
    theirs = proof.run(CARD, "sm_90a", {**BLOCKS, "fp8": False}, wide, emulator.execute)
    assert proof.differing(ours["y"], theirs["y"]) == 0


@pytest.mark.emulated
@pytest.mark.parametrize(
    "setting",
    slow_from(2, [
        {"kernel": "bulk", "x_tiles": 1, "w_tiles": 3, "units": 1, "stages": 3},
        {"kernel": "group", **SMALL["group"]},
        {"kernel": "bulk", "x_tiles": 2, "w_tiles": 1, "units": 2, "stages": 2},
        {"kernel": "tile", "x_tiles": 2, "w_tiles": 2, "warps_x": 2, "warps_w": 1, "units": 1, "stages": 3},
        {"kernel": "tile", "x_tiles": 1, "w_tiles": 4, "warps_x": 1, "warps_w": 2, "units": 1, "stages": 2, "split": 4},
        {"kernel": "group", "x_tiles": 6, "w_tiles": 8, "units": 1, "stages": 3},
        {"kernel": "group", "x_tiles": 1, "w_tiles": 4, "units": 2, "stages": 2, "split": 4, "together": True},
        {"kernel": "bulk", "x_tiles": 1, "w_tiles": 1, "units": 2, "stages": 2},
        {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 2, "stages": 2},
        {"kernel": "ring", "x_tiles": 4, "w_tiles": 3, "units": 1, "stages": 4},
    ]),
    ids=lambda setting: "_".join(map(str, setting.values())),
)  # fmt: skip
def test_every_kernel_over_e4m3_gives_the_same_bits(setting: dict[str, Any]) -> None:
    inputs = example(FP8_STORE)
    expected = proof.run(CARD, "sm_90a", FP8_STORE, inputs, emulator.execute)["y"]
    assert proof.differing(proof.run(CARD, "sm_90a", FP8_STORE, inputs, emulator.execute, setting)["y"], expected) == 0
    assert all(each.passes for each in proof.deviations(CARD, FP8_STORE, inputs, {"y": expected}))


@pytest.mark.emulated
@pytest.mark.parametrize(
    "setting",
    slow_from(2, [
        {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3},
        {"kernel": "group", **SMALL["group"]},
        {"kernel": "bulk", "x_tiles": 1, "w_tiles": 1, "units": 2, "stages": 2},
        {"kernel": "bulk", "x_tiles": 2, "w_tiles": 2, "units": 1, "stages": 2},
        {"kernel": "ring", "x_tiles": 2, "w_tiles": 2, "units": 4, "stages": 2},
        {"kernel": "group", "x_tiles": 6, "w_tiles": 8, "units": 4, "stages": 2},
        {"kernel": "group", "x_tiles": 1, "w_tiles": 4, "units": 1, "stages": 2, "split": 4, "together": True},
    ]),
    ids=lambda setting: "_".join(map(str, setting.values())),
)  # fmt: skip
def test_every_kernel_over_blocks_with_scales_gives_the_same_bits(setting: dict[str, Any]) -> None:
    case = {**BLOCKS, "k": 1024}  # two blocks a stream
    inputs = example(case)
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute)["y"]
    assert proof.differing(proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)["y"], expected) == 0
    assert all(each.passes for each in proof.deviations(CARD, case, inputs, {"y": expected}))


@pytest.mark.emulated
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_streams_may_begin_and_end_within_a_block(arch: str) -> None:
    case = {**BLOCKS, "k": 336}  # 11 units, the last one half: streams of 2, 3, 3 and 3
    inputs = example(case)
    made = proof.run(CARD, arch, case, inputs, emulator.execute)
    alone = proof.run(CARD, arch, {**case, "m": 1}, {**inputs, "x": inputs["x"][2:]}, emulator.execute)
    assert all(each.passes for each in proof.deviations(CARD, case, inputs, made))
    assert torch.equal(made["y"][2:], alone["y"])


@pytest.mark.emulated
@pytest.mark.parametrize("case", [FP8_STORE, BLOCKS], ids=["rows", "blocks"])
def test_scales_of_another_place_show(case: dict[str, Any]) -> None:
    inputs = example(case)
    right = proof.run(CARD, "sm_90a", case, inputs, emulator.execute)
    wrong = proof.run(CARD, "sm_90a", case, {**inputs, "scales": inputs["scales"].roll(1, -1)}, emulator.execute)
    assert any(not each.passes for each in proof.deviations(CARD, case, inputs, wrong))
    assert proof.differing(right["y"], wrong["y"]) > 80


@pytest.mark.reference
@pytest.mark.parametrize(
    "epilogue", [Epilogue("store"), Epilogue("swiglu"), Epilogue("qkv", head_dim=32, block=16)],
    ids=lambda epilogue: epilogue.kind,
)  # fmt: skip
def test_packed_scales_lie_beside_the_rows_that_they_scale(epilogue: Epilogue) -> None:
    n_w, k = 96, 272
    scales = torch.arange(n_w // 8 * 3).view(n_w // 8, 3) + 1.0
    packed = pack_scales(scales, epilogue)
    assert packed.shape == (n_w // 16, 3, 2)
    assert torch.equal(unpack_scales(packed, epilogue), scales)
    # What a tile's rows of a weight whose values are their own scales hold: the tile's two scales of each block.
    tiles = pack_weight(by_element(scales, k).contiguous(), epilogue).view(n_w // 16, -1, 2, 8, 32)  # tile, unit, half
    for unit in range(8):
        assert torch.equal(tiles[:, unit, :, 0, 0], packed[:, unit // 4])
        assert torch.equal(tiles[:, unit].flatten(2).amin(2), packed[:, unit // 4])
