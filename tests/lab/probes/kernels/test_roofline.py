"""Shares, means and thresholds of the kernels, by hand-counted numbers: what is missing is never held."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.probes.ceilings import known_gb_per_s
from lab.probes.kernels import thresholds as musts
from lab.probes.kernels.roofline import (
    Cell,
    Check,
    Proof,
    allowed_us,
    floor_us,
    geometric_mean,
    on_every_cell,
    on_mean,
    peer_ratio,
    shape_text,
    share_of_floor,
)
from lab.probes.kernels.rows import Bench
from lab.probes.kernels.thresholds import judge, masked_advantage, sdpa_ratio

pytestmark = pytest.mark.reference

SMALL = {"embedding": ({"rows": 1, "dtype": "bf16"}, {"rows": 4, "dtype": "bf16"})}
H200 = 4578.0  # GB/s
PROOFS = [Proof(op, True, n_cases=3) for op in ("gemm", "attention", "embedding")]


def gemm_cell(m: int, n: int, k: int, us: float = 9.0) -> Cell:
    """Floor 8, F.linear 10: by default 0.9 of the library and 89% of the floor."""
    shape = {"kind": "store", "m": m, "n": n, "k": k, "dtype": "bf16", "packed": True}
    return Cell("gemm", shape, us, 8.0, 2 * n * k, peers={"F.linear": 10.0})


def attention_cell(dim: int, batch: int, kv: int, tokens: int) -> Cell:
    """Floor 9 of 10: share 0.9; 1.0 of SDPA; 1.5 times as fast as the best library under the mask."""
    heads, kv_heads = musts.ATTENTION_HEADS[dim]
    shape = {"dtype": "bf16", "dim": dim, "heads": heads, "kv_heads": kv_heads, "batch": batch, "kv": kv}
    libraries = {"sdpa_cudnn": 10.0, "sdpa_flash": 12.0} if tokens == 1 else {"sdpa_cudnn": 90.0, "flex": 20.0}
    if tokens > 1:
        libraries |= {"flash_tail_merge": 15.0, "flash, no mask": 5.0}
    return Cell("attention", {**shape, "tokens": tokens}, 10.0, 9.0, 100, peers=libraries)


def good_cells() -> list[Cell]:
    """Every cell that is asked for, all within the musts."""
    rows = musts.FEW_ROWS + musts.MANY_ROWS
    cells = [gemm_cell(m, n, k) for m, (n, k) in product(rows, musts.GEMM_SIZES)]
    cells += [
        attention_cell(dim, batch, kv, tokens)
        for dim, (batch, kv), tokens in product(musts.ATTENTION_HEADS, musts.ATTENTION_LENGTHS, musts.ATTENTION_TOKENS)
    ]
    cut = [replace(gemm_cell(m, *musts.HEADS[1]), us=2.0) for m in musts.FEW_ROWS]
    return cells + cut + [Cell("embedding", shape, 1.9, 0.001, 4578) for shape in SMALL["embedding"]]


def outcome(checks: list[Check]) -> dict[str, bool | None]:
    return {check.name: check.holds for check in checks if check.is_must}


def test_a_cut_head_has_to_take_a_quarter_of_the_whole_ones_time() -> None:
    name = "gemm M <= 8: a head of 32,768 tokens over one of 201,088"
    assert outcome(judge(good_cells(), PROOFS, SMALL, H200))[name] is True
    slow = replace(gemm_cell(3, *musts.HEADS[1]), us=2.5)
    assert outcome(judge([*good_cells(), slow], PROOFS, SMALL, H200))[name] is False
    whole = [cell for cell in good_cells() if cell.shape.get("n") != musts.HEADS[1][0]]
    assert outcome(judge(whole, PROOFS, SMALL, H200))[name] is None


def test_a_small_kernel_is_held_to_its_own_gpu_and_to_nothing_where_no_rate_is_known() -> None:
    name = "embedding: time over 1.5 x (bytes + passes), worst shape"
    cells = [Cell("embedding", shape, 30.0, 0.001, 50_000_000) for shape in SMALL["embedding"]]
    assert outcome(judge(cells, PROOFS, SMALL, H200))[name] is False, "12.2 us are allowed on an H200"
    assert outcome(judge(cells, PROOFS, SMALL, 2000.0))[name] is True, "39 us are allowed where memory is slower"
    [missing] = [check for check in judge(cells, PROOFS, SMALL, None) if check.name == name]
    assert missing.holds is None
    assert missing.detail == "no read ceiling: none was measured, and none is known of the GPU"
    assert Bench("a", gpu="NVIDIA H200", gb_per_s=4000.0).held_to_gb_per_s == known_gb_per_s("NVIDIA H200") == H200
    other = Bench("a", gpu="NVIDIA L4", gb_per_s=280.0)
    assert other.held_to_gb_per_s == 280.0
    assert other.line().endswith("280 GB/s read ceiling, none known of this GPU")
    assert Bench("a", gpu="NVIDIA L4").held_to_gb_per_s is None


def test_a_floor_is_bytes_over_the_ceiling_and_a_share_is_the_floor_over_the_time() -> None:
    assert floor_us(4578e3, 4578.0) == pytest.approx(1.0)
    assert share_of_floor(12.5, 10.0) == pytest.approx(0.8)


def test_a_small_kernel_may_take_half_more_than_its_bytes_and_its_passes() -> None:
    assert allowed_us(4578e3, 2, 4578.0) == pytest.approx(1.5 * (1.0 + 2.6))


def test_a_mean_is_geometric_and_of_nothing_there_is_none() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([]) is None


def test_a_ratio_needs_every_library_of_the_row_and_not_those_that_saw_no_mask() -> None:
    cell = attention_cell(128, 1, 32768, 16)
    assert cell.best_peer == "flash_tail_merge"
    assert peer_ratio(cell) == pytest.approx(10 / 15)
    assert peer_ratio(replace(cell, is_complete=False)) is None
    assert masked_advantage(cell) == pytest.approx(1.5)
    assert masked_advantage(replace(cell, quoted={"flashinfer, another run": 11.0})) == pytest.approx(1.1)
    assert masked_advantage(replace(cell, peers={**cell.peers, "flex": None})) is None
    assert sdpa_ratio(replace(cell, peers={"flex": 3.0})) is None
    assert sdpa_ratio(replace(cell, is_complete=False)) is None, "another backend might have been faster"


def test_a_shape_is_the_same_text_before_and_after_json() -> None:
    torch = pytest.importorskip("torch")
    assert shape_text({"rows": 1, "dtype": torch.bfloat16}) == shape_text({"dtype": "torch.bfloat16", "rows": 1})
    assert shape_text({"rows": (1, 2)}) == shape_text({"rows": [1, 2]})
    assert shape_text({"rows": 1}) != shape_text({"rows": 2})


def test_all_musts_hold_on_cells_that_meet_them() -> None:
    checks = judge(good_cells(), PROOFS, SMALL, H200)
    assert set(outcome(checks).values()) == {True}
    values = {check.name: check.value for check in checks if check.is_must}
    assert values["gemm M <= 8: geometric mean of time over F.linear"] == pytest.approx(0.9)
    assert values["gemm M <= 8: geometric mean of share of floor"] == pytest.approx(8 / 9)
    assert values["attention T >= 4: best library's time over ours, worst cell"] == pytest.approx(1.5)


def test_nothing_holds_and_nothing_fails_without_rows() -> None:
    checks = judge([], [], SMALL, None)
    assert {check.holds for check in checks} == {None}
    assert all(check.value is None and check.detail for check in checks)
    assert not [check for check in checks if "missing" not in check.line()]


@pytest.mark.parametrize("index", range(0, len(good_cells()), 17))
def test_one_lost_cell_makes_something_missing_and_nothing_else_false(index: int) -> None:
    cells = good_cells()
    del cells[index]
    found = set(outcome(judge(cells, PROOFS, SMALL, H200)).values())
    assert found == {True, None}


def test_a_missing_or_failed_proof_is_told_apart() -> None:
    proofs = [Proof("gemm", False, "m=3: y: error 1, allowed 0.1", 5), Proof("attention", True, n_cases=2)]
    found = outcome(judge(good_cells(), proofs, SMALL, H200))
    assert found["gemm: numbers and bits proven on the GPU"] is False
    assert found["attention: numbers and bits proven on the GPU"] is True
    assert found["embedding: numbers and bits proven on the GPU"] is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda c: replace(c, us=10.3), "gemm M <= 8: time over F.linear, worst cell"),
        (lambda c: replace(c, floor_us=0.001), "gemm M <= 8: geometric mean of share of floor"),
        (lambda c: replace(c, us=900.0), "gemm M <= 8: geometric mean of time over F.linear"),
    ],
)
def test_one_bad_gemm_cell_fails_its_threshold(change: object, name: str) -> None:
    cells = good_cells()
    cells[0] = change(cells[0])  # type: ignore[operator]
    assert outcome(judge(cells, PROOFS, SMALL, H200))[name] is False


@pytest.mark.parametrize(
    ("tokens", "us", "name"),
    [
        (1, 10.4, "attention T=1: time over SDPA's best backend, worst cell"),
        (64, 12.6, "attention T >= 4: best library's time over ours, worst cell"),
        (4, 12.6, "attention T >= 4: best library's time over ours, worst cell"),
        (8, 12.8, "attention d=128 batch 1 T=8: share of floor"),
    ],
)
def test_one_slow_attention_cell_fails_its_threshold(tokens: int, us: float, name: str) -> None:
    wanted = attention_cell(128, 1, 32768, tokens)
    cells = [replace(c, us=us) if c.shape == wanted.shape else c for c in good_cells()]
    assert outcome(judge(cells, PROOFS, SMALL, H200))[name] is False


def test_a_small_kernel_that_takes_too_long_fails_even_where_other_shapes_are_missing() -> None:
    slow = Cell("embedding", SMALL["embedding"][0], 2.0, 0.001, 4578)  # allowed: 1.5 x (0.001 + 1.3)
    found = {check.name: check for check in judge([slow], PROOFS, SMALL, H200)}
    check = found["embedding: time over 1.5 x (bytes + passes), worst shape"]
    assert check.holds is False
    assert check.value == pytest.approx(2.0 / (1.5 * 1.301))
    assert "1 of 2 cells not measured" in check.detail


@pytest.mark.parametrize(("share", "holds"), [(0.71, True), (0.69, False), (None, None)])
def test_experts_are_held_to_seven_tenths_of_their_bytes_at_1_4_and_16_rows_and_at_no_other(
    share: float | None, holds: bool | None
) -> None:
    shapes = tuple({"m": m, "experts": n} for m in (1, 4, 16, 64) for n in (32, 128))
    cells = [Cell("experts", shape, 10.0, 9.0 if shape["m"] < 64 else 1.0, 100) for shape in shapes]
    cells = [cell for cell in cells if cell.shape != shapes[3]]
    cells += [] if share is None else [Cell("experts", shapes[3], 10.0, 10 * share, 100)]
    checks = {check.name: check for check in judge(cells, [], {"experts": shapes}, H200)}
    found = [checks[f"experts of {rows} rows: share of floor, worst model"].holds for rows in (1, 4, 16)]
    assert found == [True, holds, True]
    assert not any(name.startswith("experts of 64") for name in checks)


def test_of_experts_in_fp8_no_share_is_asked() -> None:
    shapes = tuple({"m": 1, "form": form} for form in ("plain", "mxfp4", "fp8", "fp8_blocks"))
    cells = [
        Cell("experts", shape, 10.0, 5.0 if str(shape["form"]).startswith("fp8") else 9.0, 100) for shape in shapes
    ]
    checks = {check.name: check for check in judge(cells, [], {"experts": shapes}, H200)}
    assert checks["experts of 1 rows: share of floor, worst model"].value == 0.9


def test_of_two_measurements_of_one_cell_the_later_counts() -> None:
    cells = [*good_cells(), gemm_cell(1, 4096, 4096, us=10.3)]
    assert outcome(judge(cells, PROOFS, SMALL, H200))["gemm M <= 8: time over F.linear, worst cell"] is False
    cells.append(gemm_cell(1, 4096, 4096))
    assert outcome(judge(cells, PROOFS, SMALL, H200))["gemm M <= 8: time over F.linear, worst cell"] is True


def test_a_cell_of_another_kind_dtype_or_window_does_not_stand_for_the_one_that_is_asked_for() -> None:
    product_cell, attended = gemm_cell(1, 4096, 4096, us=99.0), replace(attention_cell(128, 1, 32768, 8), us=99.0)
    for cell, other in (
        (product_cell, {"kind": "residual"}), (product_cell, {"dtype": "fp16"}),
        (attended, {"window": 128}), (attended, {"earlier": 8}), (attended, {"dtype": "fp16"}),
        (attended, {"fp8": True}), (attended, {"paths": True}),
    ):  # fmt: skip
        cells = [*good_cells(), replace(cell, shape={**cell.shape, **other})]
        assert set(outcome(judge(cells, PROOFS, SMALL, H200)).values()) == {True}, other


def test_an_aim_is_named_as_one_and_comes_after_the_musts() -> None:
    checks = judge(good_cells(), PROOFS, SMALL, H200)
    places = [check.is_must for check in checks]
    assert places == sorted(places, reverse=True)
    aims = [check for check in checks if not check.is_must]
    assert aims
    assert all("(aim)" in check.line() for check in aims)
    assert any(check.holds is False for check in aims)


@given(st.lists(st.one_of(st.none(), st.floats(0.01, 100.0)), max_size=6), st.floats(0.1, 10.0))
def test_a_threshold_holds_only_when_every_cell_is_there_and_within(values: list[float | None], most: float) -> None:
    named = {str(index): value for index, value in enumerate(values)}
    whole = bool(values) and None not in values
    every, mean = on_every_cell("x", named, "at most", most), on_mean("x", named, "at most", most)
    known = [value for value in values if value is not None]
    assert (every.holds is True) == (whole and max(known) <= most)
    assert (every.holds is False) == any(value > most for value in known)
    assert (mean.holds is None) == (not whole)
    if whole:
        assert mean.value == pytest.approx(math.exp(sum(map(math.log, known)) / len(known)))
