"""Epilogues over sums as the tensor cores leave them: the bits of those that have an item a lane, of every kind."""

from dataclasses import replace

import pytest
import torch
from rings import exhaustive_but

from eagle3core.kernels import proof
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.card import CARD, LLAMA_8B
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm, gemm_variant
from eagle3core.kernels.gemm.order.weight import pack_weight
from eagle3core.kernels.gemm.reference import epilogue_of, n_weight_rows
from eagle3core.kernels.gemm.scratch import workspace
from eagle3core.kernels.gemm.tiling import Tiling, deepest

CPU = torch.device("cpu")
CASE = {"kind": "store", "m": 27, "n": 80, "k": 96, "dtype": "bf16", "packed": True}
HELD = {"kernel": "group", "x_tiles": 2, "w_tiles": 4, "units": 1, "stages": 2, "split": 1, "held": True}
RING = {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3, "split": 1}
QKV = {"kind": "qkv", "q_heads": 3, "kv_heads": 1, "head_dim": 32, "block": 16}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({"m": 70, "n": 48}, {"x_tiles": 9}),  # more pieces than are finished together
        ({"kind": "residual", "m": 11, "n": 48, "bias": True, "dtype": "f16"}, {}),
        ({"kind": "residual", "m": 11, "n": 48, "residual": False}, {}),
        ({"kind": "swiglu", "m": 11, "n": 40, "bias": True}, {}),
        ({**QKV, "m": 11, "bias": True}, {}),
        ({"kind": "head", "m": 11, "n": 96, "norm": True, "bias": True, "dtype": "f16"}, {}),
        ({"kind": "head", "m": 11, "n": 48, "powers": True}, {}),
        pytest.param({**QKV, "norm": True, "head_dim": 64, "m": 35}, {"x_tiles": 3}, marks=pytest.mark.slow),
        pytest.param({"kind": "residual", "m": 70, "n": 64, "norm": True}, {"x_tiles": 9}, marks=pytest.mark.slow),
    ],
)
def test_bits_equal_those_of_an_item_a_lane(case, setting):
    case = {**CASE, **case}
    inputs = CARD.example(case, proof.generator(6, CPU), CPU)
    outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**HELD, **setting})
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    assert {name: proof.differing(outputs[name], expected[name]) for name in outputs} == dict.fromkeys(outputs, 0)


@pytest.mark.emulated
def test_logits_that_are_equal_or_no_numbers_are_chosen_between_as_ever():
    case = {**CASE, "kind": "head", "m": 11, "n": 48}
    inputs = CARD.example(case, proof.generator(6, CPU), CPU)
    inputs["w"][:] = inputs["w"][:1]  # all logits of a row are equal
    inputs["w"][20:22, 0] = float("nan")
    outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, HELD)
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    assert torch.equal(outputs["third"], expected["third"])
    assert outputs["third"][0].tolist() == [0, 20, 32]
    assert torch.equal(outputs["second"], expected["second"])


@pytest.mark.emulated
def test_keys_and_values_in_e4m3_are_the_same_bytes():
    case = {**CASE, **QKV, "m": 11}
    inputs, epilogue, found = CARD.example(case, proof.generator(6, CPU), CPU), epilogue_of(case), []
    for tiling in (Tiling(**HELD), Tiling(**RING)):
        outputs = CARD.outputs(case, inputs)
        for name in ("second", "third"):
            outputs[name] = torch.full(outputs[name].shape, 0x55, dtype=torch.uint8)
        others = {name: t for name, t in {**inputs, **outputs}.items() if name not in ("x", "w", "y")}
        emulator.execute(gemm(
            "sm_90a", epilogue, x=inputs["x"], w=pack_weight(inputs["w"], epilogue), y=outputs["y"], k=case["k"],
            packed=True, weight_rows=n_weight_rows(case), tiling=tiling, q_heads=3, kv_heads=1,
            scratch=workspace(CPU), operands={**others, "factors": torch.tensor([2.0, 0.5])},
        ))  # fmt: skip
        found.append(outputs)
    for name, values in found[0].items():
        assert proof.differing(values, found[1][name]) == 0
    assert (found[0]["second"] != 0x55).sum() > 200


@pytest.mark.emulated
def test_a_piece_that_is_not_transposed_is_found(monkeypatch):
    inputs = CARD.example(CASE, proof.generator(6, CPU), CPU)
    expected = proof.run(CARD, "sm_90a", CASE, inputs, emulator.execute, RING)
    monkeypatch.setattr(emulator, "transpose", lambda word: word)
    outputs = proof.run(CARD, "sm_90a", CASE, inputs, emulator.execute, HELD)
    assert proof.differing(outputs["y"], expected["y"]) > 0


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("x_tiles", "w_tiles", "units"),
    exhaustive_but([(24, 8, 2), (16, 12, 1)], [(24, 8, 2), (16, 8, 2), (16, 12, 1)]),  # the least room for each
)
@pytest.mark.parametrize(
    ("case", "ordered"),
    [(case, 0) for case in LLAMA_8B]
    + [(case, ordered) for case in LLAMA_8B[1:3] for ordered in (16, 24)]
    + [({**LLAMA_8B[0], "e4m3_cache": True}, 0)],
    ids=lambda value: value if isinstance(value, int) else f"{value['kind']}-{value['k']}",
)
def test_every_epilogue_of_a_block_that_holds_its_totals_has_registers_for_it(case, ordered, x_tiles, w_tiles, units):
    tiling = deepest("sm_90a", Tiling("group", x_tiles, w_tiles, units, 16, held=True), case["k"] // 32, blocks=1)
    variant = gemm_variant("sm_90a", "bf16", replace(epilogue_of(case), ordered_tiles=ordered), tiling, True, False)
    made = compile_variant(variant, "sm_90a", disassemble=True)
    assert made.faults(variant) == []
    words = {"store": 2, "residual": 6, "swiglu": 1, "qkv": 2, "head": 2}[case["kind"]]
    assert made.sass["MOVM"] >= words * x_tiles, "an exchange a word that is stored, and of the residual read"


@pytest.mark.compiled
@pytest.mark.slow
def test_the_activation_of_a_piece_takes_few_instructions():
    epilogue, tiling = Epilogue("swiglu", quads=2), Tiling("group", 24, 8, 2, 5, held=True)
    made = [
        compile_variant(
            gemm_variant("sm_90a", "bf16", epilogue, replace(tiling, x_tiles=x_tiles), True, False),
            "sm_90a",
            disassemble=True,
        )
        for x_tiles in (16, 24)
    ]
    # Of 8 pieces: each has 4 sums to scale, 2 values of 6 instructions, and a word to round, transpose and store. The 4
    # sums more are also set to zero, added up and put among the totals.
    assert made[1].sass.total() - made[0].sass.total() < 8 * 45


@pytest.mark.gpu
@pytest.mark.parametrize("case", LLAMA_8B[:6], ids=lambda case: f"{case['kind']}-{case['k']}")
@pytest.mark.parametrize(("x_tiles", "w_tiles", "units"), [(24, 8, 2), (16, 8, 2), (16, 12, 1)])
def test_on_a_gpu_every_epilogue_gives_the_bits_of_an_item_a_lane(gpu, case, x_tiles, w_tiles, units):
    device, arch, execute = gpu
    case = {**case, "m": 397, "dtype": "bf16", "packed": True}
    inputs = CARD.example(case, proof.generator(5, device), device)
    group = {"kernel": "group", "x_tiles": 16, "w_tiles": 12, "units": 2, "stages": 3, "split": 1}
    held = deepest(arch, Tiling("group", x_tiles, w_tiles, units, 16, held=True), case["k"] // 32, blocks=1)
    sizes = {"x_tiles": x_tiles, "w_tiles": w_tiles, "units": units, "stages": held.stages, "held": True}
    expected = proof.run(CARD, arch, case, inputs, execute, group)
    for resident in (0, 40, 132):
        outputs = proof.run(CARD, arch, case, inputs, execute, {**group, **sizes, "resident": resident})
        assert {name: proof.differing(outputs[name], expected[name]) for name in outputs} == dict.fromkeys(outputs, 0)
