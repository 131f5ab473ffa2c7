"""W in e4m3: what the conversion's own statement computes, and kernels with the bits of those over 16-bit W."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import BY_MEANING, device_runner, write_nano_pair
from gemm_examples import STORE, example
from rings import slow_but, slow_from
from statements import KINDS, computed, two_of

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.card import ARCHES, SHARED_BYTES
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm import tiling_for, workspace
from eagle3core.kernels.gemm.candidates import fp8_candidates
from eagle3core.kernels.gemm.card import CARD, gemm_variants_of
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.tiling import Fp8Tiling, choose_fp8_tiling
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.order.weight import pack_weight
from eagle3core.kernels.gemm.tiling import Tiling
from eagle3core.kernels.isa import narrow
from eagle3core.step.gemm_audit import products_of
from lab.probes.sweeps.machines import variants_of

CODES = [code for code in range(256) if code & 0x7F != 0x7F]  # two of them are no numbers
WHOLE = {"kind": "store", "m": 3, "n": 48, "k": 256, "dtype": "bf16", "packed": True, "fp8": True}


@pytest.mark.reference
@pytest.mark.parametrize("kind", KINDS)
def test_the_statement_and_its_twin_widen_every_value_exactly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    monkeypatch.setattr(narrow, "instruction", lambda name, asm, *_: statements.append(asm))
    shift, power = {"bf16": (4, "0x7B807B80"), "f16": (1, "0x5C005C00")}[kind]
    narrow._widen_e4m3(kind, shift, power)
    for first in range(0, len(CODES), 2):
        codes = [CODES[(first + step) % len(CODES)] for step in (0, 1, 77, 140)]
        values = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
        word = sum(code << 8 * i for i, code in enumerate(codes))
        for even, odd in (tuple(computed(statements[0], {"$2": word}, kind)), emulator.WIDEN_E4M3[kind](word)):
            assert two_of(even, kind) == [values[0], values[2]]
            assert two_of(odd, kind) == [values[1], values[3]]


@pytest.mark.emulated
@pytest.mark.parametrize("arch", slow_but(["sm_90a"], ["sm_80", "sm_90a"]))
@pytest.mark.parametrize("case", [case for case in (*CARD.cases, *CARD.slow_cases) if case.get("fp8")],
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
@pytest.mark.parametrize(
    "setting",
    slow_from(2, [
        {"kernel": "bulk", "x_tiles": 1, "w_tiles": 3, "units": 1, "stages": 3},
        {"kernel": "bulk", "x_tiles": 2, "w_tiles": 1, "units": 2, "stages": 2},
        {"kernel": "bulk", "x_tiles": 1, "w_tiles": 1, "units": 2, "stages": 2},
        {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 2, "stages": 2},
        {"kernel": "ring", "x_tiles": 4, "w_tiles": 3, "units": 1, "stages": 4},
    ]),
    ids=lambda setting: "_".join(map(str, setting.values())),
)  # fmt: skip
def test_every_kernel_over_e4m3_gives_the_same_bits(setting: dict[str, Any]) -> None:
    inputs = example(WHOLE)
    expected = proof.run(CARD, "sm_90a", WHOLE, inputs, emulator.execute)["y"]
    assert proof.differing(proof.run(CARD, "sm_90a", WHOLE, inputs, emulator.execute, setting)["y"], expected) == 0
    assert all(each.passes for each in proof.deviations(CARD, WHOLE, inputs, {"y": expected}))


@pytest.mark.emulated
def test_a_scale_of_another_row_shows() -> None:
    inputs = example(WHOLE)
    right = proof.run(CARD, "sm_90a", WHOLE, inputs, emulator.execute)
    wrong = proof.run(CARD, "sm_90a", WHOLE, {**inputs, "scales": inputs["scales"].roll(1)}, emulator.execute)
    assert any(not each.passes for each in proof.deviations(CARD, WHOLE, inputs, wrong))
    assert proof.differing(right["y"], wrong["y"]) > 100


@pytest.mark.reference
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("rows", [1, 5, 9, 16, 20, 64, 512])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 8192), (4096, 14336), (32000, 4096), (48, 272), (64, 80)])
def test_every_shape_has_a_tiling_that_fits_and_that_the_launcher_takes(arch: str, rows: int, n: int, k: int) -> None:
    tiling = choose_fp8_tiling(arch, rows, n // 16, k)
    assert tiling.kernel in ("ring", "bulk")
    assert tiling.shared_bytes <= SHARED_BYTES[arch]
    meta = {"device": "meta"}
    operands = {"scales": torch.empty(n, **meta)}
    for each in (tiling, *fp8_candidates(arch, rows, n // 16, k)):
        (launch,) = gemm(
            arch, Epilogue("store"), x=torch.empty(rows, k, dtype=torch.bfloat16, **meta),
            w=torch.empty(n, -(-k // 32) * 32, dtype=torch.float8_e4m3fn, **meta),
            y=torch.empty(rows, n, dtype=torch.bfloat16, **meta), k=k, packed=True, weight_rows=n, tiling=each,
            scratch=workspace(torch.device("meta")), operands=operands,
        )  # fmt: skip
        assert launch.operands["scales"] is operands["scales"]
        assert "workspace" not in launch.operands


@pytest.mark.reference
def test_a_ring_over_e4m3_takes_half_of_w_and_all_of_x() -> None:
    tiling = Tiling("ring", 2, 2, 2, 4)
    half, whole = Fp8Tiling("ring", 2, 2, 2, 4), tiling.shared_bytes
    assert whole == 4 * 4 * 2 * (4 + 2) * 512
    assert half.shared_bytes == 4 * 4 * 2 * (2 + 2) * 512
    assert half.name == f"{tiling.name}_fp8"
    assert isinstance(replace(half, stages=3), Fp8Tiling)


@pytest.mark.emulated
def test_products_of_an_fp8_draft_have_keys_and_cases_of_their_own(tmp_path: Path) -> None:
    pair = write_nano_pair(tmp_path, n_layers=1, vocab=64, taps=(0, 1))
    runner = device_runner(pair, 2, BY_MEANING, n_slots=1, draft_weights="fp8")
    products = [product for program in runner.all_programs for product in products_of(program)]
    of_draft = {product for product in products if product.tag.startswith("EAGLE3")}
    assert {product.key.dtype for product in of_draft} == {"bf16_fp8"}
    assert {product.key.dtype for product in set(products) - of_draft} == {"bf16"}
    for product in of_draft:
        assert product.case["dtype"] == "bf16"
        assert product.case["fp8"] is True
        tiling = tiling_for("sm_90a", product.m, product.key)
        assert isinstance(tiling, Fp8Tiling)
        assert variants_of("gemm", "sm_90a", product.case, asdict(tiling))[-1].constants["fp8"] is True


@pytest.mark.reference
def test_kernels_over_16_bit_weights_are_named_and_made_as_before() -> None:
    for case in ({**STORE, "m": 1}, {**STORE, "m": 16}):
        (plain,) = gemm_variants_of("sm_90a", case)
        (fp8,) = gemm_variants_of("sm_90a", {**case, "fp8": True})
        assert "fp8" not in plain.name
        assert "fp8" not in plain.constants
        assert fp8.constants["fp8"] is True
        assert [p.name for p in plain.parameters if p.name not in {q.name for q in fp8.parameters}] == ["workspace"]


@pytest.mark.reference
@pytest.mark.parametrize(
    ("changes", "words"),
    [({"packed": False}, "W in e4m3 by rows"), ({"operands": {}}, "W in e4m3 packed with no scales"),
     ({"operands": {"scales": torch.ones(48, dtype=torch.float64)}}, r"scales \[48\] torch.float64"),
     ({"operands": {"scales": torch.ones(16)}}, r"scales \[16\] torch.float32"),
     ({"tiling": Tiling("tile", 2, 2, 1, 3, 2, 1)}, "ring or bulk"),
     ({"tiling": Tiling("group", 2, 4, 1, 3)}, "ring or bulk")],
)  # fmt: skip
def test_what_no_kernel_over_e4m3_takes_is_refused(changes: dict[str, Any], words: str) -> None:
    inputs = example(WHOLE)
    epilogue = Epilogue("store")
    given: dict[str, Any] = {
        "x": inputs["x"], "w": pack_weight(inputs["w"], epilogue), "y": torch.empty(3, 48, dtype=torch.bfloat16),
        "k": 256, "packed": True, "weight_rows": 48, "operands": {"scales": inputs["scales"]},
        "scratch": workspace(torch.device("cpu")),
    }  # fmt: skip
    with pytest.raises(KernelLimit, match=words):
        gemm("sm_90a", epilogue, **{**given, **changes})
