"""Kernels over W in e4m3: which a product gets, what they are called and kept under, and what none of them takes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import BY_MEANING, device_runner, write_nano_pair
from gemm_examples import FP8_STORE, STORE, example
from quantised_heads import write_fp8

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import ARCHES, SHARED_BYTES
from eagle3core.kernels.gemm import tiling_for, workspace
from eagle3core.kernels.gemm.candidates import fp8_candidates
from eagle3core.kernels.gemm.card import gemm_variants_of
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.tiling import Fp8Tiling, choose_fp8_tiling
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.order.weight import pack_weight
from eagle3core.kernels.gemm.tiling import Tiling
from eagle3core.kernels.gemm.tiling import ruled_tiling as ruled
from eagle3core.kernels.tuned import NO_FILE, TUNED_VARIABLE
from eagle3core.step.gemm_audit import products_of
from lab.probes.sweeps.machines import variants_of

OF_BLOCKS = {"operands": {"scales": torch.ones(3, 2, 2)}}


@pytest.mark.reference
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 9, 16, 20, 64, 512])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 8192), (4096, 14336), (32000, 4096), (48, 272), (64, 80)])
def test_every_shape_has_a_tiling_that_fits_and_that_the_launcher_takes(
    arch: str, rows: int, n: int, k: int, blocks: bool
) -> None:
    tiling = choose_fp8_tiling(arch, rows, n // 16, k, blocks=blocks)
    assert tiling.blocks == blocks
    meta = {"device": "meta"}
    operands = {"scales": torch.empty((n // 16, -(-k // 128), 2) if blocks else n, **meta)}
    for each in (tiling, *fp8_candidates(arch, rows, n // 16, k, blocks)):
        assert each.shared_bytes <= SHARED_BYTES[arch]
        *_, launch = gemm(
            arch, Epilogue("store"), x=torch.empty(rows, k, dtype=torch.bfloat16, **meta),
            w=torch.empty(n, -(-k // 32) * 32, dtype=torch.float8_e4m3fn, **meta),
            y=torch.empty(rows, n, dtype=torch.bfloat16, **meta), k=k, packed=True, weight_rows=n, tiling=each,
            scratch=workspace(torch.device("meta")), operands=operands,
        )  # fmt: skip
        assert launch.operands["scales"] is operands["scales"]
        assert launch.operands["ordered"] is None
        assert launch.variant.name.endswith(
            f"{each.name}_packed{'_ragged' if k % 32 and each.kernel != 'group' else ''}"
        )


@pytest.mark.reference
def test_a_ring_over_e4m3_takes_half_of_w_and_all_of_x() -> None:
    tiling = Tiling("ring", 2, 2, 2, 4)
    half, whole = Fp8Tiling("ring", 2, 2, 2, 4), tiling.shared_bytes
    assert whole == 4 * 4 * 2 * (4 + 2) * 512
    assert half.shared_bytes == 4 * 4 * 2 * (2 + 2) * 512
    assert half.name == f"{tiling.name}_fp8"
    assert isinstance(replace(half, stages=3), Fp8Tiling)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("arch", "n", "k", "name"),
    [("sm_90a", 4096, 4096, "ring_1x1_u4_p6_fp8"), ("sm_90a", 4224, 4096, "ring_1x1_u4_p6_fp8"),
     ("sm_90a", 4240, 4096, "bulk_1x1_u8_p2_fp8"), ("sm_90a", 28672, 4096, "bulk_1x1_u8_p2_fp8"),
     ("sm_80", 28672, 4096, "ring_1x1_u4_p4_fp8"), ("sm_90a", 28672, 1536, "ring_1x1_u4_p4_fp8"),
     ("sm_90a", 4096, 288, "ring_1x1_u1_p16_fp8")],
)  # fmt: skip
def test_up_to_8_rows_rings_are_small_and_the_smaller_the_more_tiles_a_processor_has(
    arch: str, n: int, k: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TUNED_VARIABLE, NO_FILE)
    for rows in (1, 8):
        assert choose_fp8_tiling(arch, rows, n // 16, k).name == name


@pytest.mark.reference
@pytest.mark.parametrize(("rows", "x_tiles"), [(1, 1), (8, 1), (9, 2), (16, 2)])
def test_what_competes_holds_all_rows_at_once_and_no_more(rows: int, x_tiles: int) -> None:
    for blocks in (False, True):
        found = fp8_candidates("sm_90a", rows, 256, 4096, blocks)
        assert len(found) > 8
        assert {one.x_tiles for one in found} == {x_tiles}


@pytest.mark.reference
def test_more_rows_get_the_kernels_of_16_bit_weights_with_deeper_rings() -> None:
    for rows, n in ((64, 28672), (512, 4096)):
        wide, ours = (choose("sm_90a", rows, n // 16, 4096) for choose in (ruled, choose_fp8_tiling))
        assert (ours.kernel, ours.split, ours.w_tiles) == ("group", wide.split, wide.w_tiles)
        assert ours.units * ours.stages > wide.units * wide.stages
    # Sums of blocks and of their stream beside each other: 96 rows a block at most.
    assert choose_fp8_tiling("sm_90a", 512, 256, 4096, blocks=True).x_tiles == 11
    assert choose_fp8_tiling("sm_90a", 512, 256, 2880, blocks=True).kernel == "ring"
    assert choose_fp8_tiling("sm_80", 512, 256, 4096).kernel == "tile"


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


@pytest.mark.emulated
def test_products_of_a_target_stored_in_blocks_have_keys_and_cases_of_their_own(tmp_path: Path) -> None:
    pair = write_nano_pair(tmp_path, n_layers=1, vocab=64, taps=(0, 1), hidden=256)
    stored = write_fp8(pair[0], tmp_path / "stored", "fp8", block=(16, 128)), pair[1]
    runner = device_runner(stored, 2, BY_MEANING, n_slots=1)
    products = {product for program in runner.all_programs for product in products_of(program)}
    dtypes = {product.tag: product.key.dtype for product in products if product.tag.startswith("BASE")}
    assert dtypes["BASE_QKV"] == dtypes["BASE_FFN_GATE_UP"] == "bf16_fp8_blocks"
    assert dtypes["BASE_O"] == dtypes["BASE_FFN_DOWN"] == "bf16_fp8", "of at most 128 columns a row has one scale"
    assert dtypes["BASE_LM_HEAD"] == "bf16"
    for product in products:
        if product.key.dtype == "bf16_fp8_blocks":
            assert product.case["fp8"] == "blocks"
            tiling = tiling_for("sm_90a", product.m, product.key)
            assert variants_of("gemm", "sm_90a", product.case, asdict(tiling))[-1].constants["blocks"] is True


@pytest.mark.reference
def test_kernels_over_16_bit_weights_are_named_and_made_as_before() -> None:
    for case in ({**STORE, "m": 1}, {**STORE, "m": 16}):
        (plain,) = gemm_variants_of("sm_90a", case)
        (fp8,) = gemm_variants_of("sm_90a", {**case, "fp8": True})
        assert "fp8" not in plain.name
        assert "fp8" not in plain.constants
        assert fp8.constants["fp8"] is True
        assert plain.parameters == fp8.parameters, "scales are the last of both, so the others keep their places"


@pytest.mark.reference
@pytest.mark.parametrize(
    ("changes", "words"),
    [({"packed": False}, "W in e4m3 by rows"), ({"operands": {}}, "W in e4m3 packed with no scales"),
     ({"operands": {"scales": torch.ones(48, dtype=torch.float64)}}, r"scales \[48\] torch.float64"),
     ({"operands": {"scales": torch.ones(16)}}, r"scales \[16\] torch.float32"),
     ({"operands": {"scales": torch.ones(3, 3, 2)}}, r"or \[3, 2, 2\] of blocks"),
     ({"tiling": Tiling("tile", 2, 2, 1, 3, 2, 2)}, "a tile of W a warp"),
     ({"tiling": Tiling("tile", 2, 2, 1, 3, 2, 1), **OF_BLOCKS}, "and scales of rows"),
     ({"tiling": Tiling("bulk", 1, 1, 8, 3), **OF_BLOCKS}, "at most 4 units a stage"),
     ({"tiling": Tiling("group", 13, 4, 1, 3), **OF_BLOCKS}, "whole blocks a stream")],
)  # fmt: skip
def test_what_no_kernel_over_e4m3_takes_is_refused(changes: dict[str, Any], words: str) -> None:
    inputs = example(FP8_STORE)
    epilogue = Epilogue("store")
    given: dict[str, Any] = {
        "x": inputs["x"], "w": pack_weight(inputs["w"], epilogue), "y": torch.empty(3, 48, dtype=torch.bfloat16),
        "k": 256, "packed": True, "weight_rows": 48, "operands": {"scales": inputs["scales"]},
        "scratch": workspace(torch.device("cpu")),
    }  # fmt: skip
    with pytest.raises(KernelLimit, match=words):
        gemm("sm_90a", epilogue, **{**given, **changes})
