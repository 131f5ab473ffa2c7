"""What is swept and what is shown of it: regimes and their ranks, contenders, orders of sums, maps."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from stored_sweeps import COLD, DEFAULT, HOT, screen, stored

from eagle3core.kernels import tuned
from eagle3core.kernels.gemm.tiling import Tiling, ruled_tiling
from eagle3core.step.gemm_audit import Product
from lab.cli import parsed
from lab.errors import ExperimentError
from lab.options.sweeps import FmhaOptions, read_orders
from lab.probes.sweeps.command import grid_of
from lab.probes.sweeps.confirm import contenders, named_file
from lab.probes.sweeps.joint import joint_orders
from lab.probes.sweeps.machines import variants_of
from lab.probes.sweeps.pictures import best_table, cells, families, heat_map, missing_cells, unmeasured
from lab.probes.sweeps.regimes import (
    HEADS,
    AttentionGrid,
    attention_regimes,
    gemm_regimes,
    nearest,
)

pytestmark = pytest.mark.reference


def test_regimes_are_ranked_by_the_bytes_of_their_weights_and_the_tail_gets_few_settings(no_file: None) -> None:
    hot, cold = gemm_regimes("sm_90a", {COLD: 1, HOT: 5}, top=1)
    assert (hot.name, hot.tags, hot.count) == (HOT.key.text, ("EAGLE3_FC",), 5)
    assert hot.default == asdict(ruled_tiling("sm_90a", 3, 2, 256))
    assert len(hot.settings) > len(cold.settings) == 3
    assert nearest(hot.settings, 2)[0] == hot.default
    # Of a regime the row counts of the most launches stand for all.
    several = {Product(**{**asdict(HOT), "m": m}): n for m, n in ((1, 3), (2, 9), (4, 5))}
    [regime] = gemm_regimes("sm_90a", several, top=1)
    assert [case["m"] for case in regime.cases] == [2, 4]


def test_a_regime_of_many_rows_is_timed_at_the_most_it_reaches_to_as_well(no_file: None) -> None:
    def rows_of(m: int) -> list[int]:
        [regime] = gemm_regimes("sm_90a", {replace(HOT, m=m): 1}, top=1)
        assert regime.default == asdict(ruled_tiling("sm_90a", regime.cases[-1]["m"], 2, 256))
        return [case["m"] for case in regime.cases]

    assert [rows_of(m) for m in (20, 64, 96, 128, 1500)] == [[20], [64], [96, 128], [128], [1500, 1536]]


def test_kernels_of_a_sweep_are_known_without_operands(no_file: None) -> None:
    [regime] = gemm_regimes("sm_90a", {HOT: 1}, top=1)
    names = {one.name for s in regime.settings for one in variants_of("gemm", "sm_90a", regime.cases[0], s)}
    assert names == {
        f"gemm_bf16_store_{Tiling(**setting).name}_packed" for setting in regime.settings
    }  # fmt: skip
    grid = attention_regimes("sm_90a", AttentionGrid(HEADS))
    assert len(grid) == 20
    wanted = {one.name for r in grid for s in r.settings for one in variants_of("attention", "sm_90a", r.cases[0], s)}
    present = {one.name for r in grid for one in variants_of("attention", "sm_90a", r.cases[0], r.default)}
    assert len(wanted - present) <= 24  # each takes half a minute to compile
    assert all(r.default in r.settings and len({str(s) for s in r.settings}) == len(r.settings) for r in grid)


def test_short_sessions_compete_in_short_rings_and_a_setting_has_to_serve_every_shape_of_a_regime(
    no_file: None,
) -> None:
    points = ((64, 1024), (64, 512), (64, 4096), (64, 32768))
    short, middle, long = attention_regimes("sm_90a", AttentionGrid({128: (32, 8)}, points, tokens=(1,)))
    assert [one.key.keys for one in (short, middle, long)] == [0, tuned.MIDDLE_KEYS, tuned.LONG_KEYS]
    assert [case["kv"] for case in short.cases] == [1024, 512]
    rings = {(one["units"], one["stages"]) for one in short.settings}
    assert rings >= {(1, 2), (1, 3), (2, 3)}
    assert {one["run"] for one in short.settings if (one["units"], one["stages"]) == (1, 2)} == {1, 2, 4, 8, 16}
    assert not any(one["stages"] == 2 for regime in (middle, long) for one in regime.settings)
    assert [len(regime.cases) for regime in (middle, long)] == [1, 1]


def test_a_cache_in_e4m3_is_swept_as_such_and_its_rings_leave_a_processor_room_for_several_blocks(
    no_file: None,
) -> None:
    line = ["sweep", "fmha", "--build", "x", "--dims", "128", "--tokens", "4", "--at", "16384x4"]
    found = []
    for more in ([], ["--cache-dtype", "fp8"]):
        _, options = parsed([*line, *more])
        assert isinstance(options, FmhaOptions)
        found += attention_regimes("sm_90a", grid_of(options))
    of_16_bits, regime = found
    assert (of_16_bits.key.dtype, regime.key.dtype) == ("bf16", "bf16_fp8")
    assert [case.get("fp8") for case in (*of_16_bits.cases, *regime.cases)] == [None, True]
    assert {one["stages"] for one in regime.settings} == {6, 3, 2}
    assert {one["run"] for one in regime.settings if one["stages"] == 2} == {1, 2, 4, 8, 16}
    assert all(variants_of("attention", "sm_90a", regime.cases[0], one) for one in regime.settings)


def test_contenders_are_whole_files_the_default_first_and_named_for_engines_only_inside(
    tmp_path: Path, no_file: None
) -> None:
    found = contenders(stored(), "gemm", "a GPU", "sm_90a")
    assert [one.content["gemm"][0]["setting"]["stages"] for one in found] == [16, 12, 8]
    for one in found:
        with named_file(one.content):
            known = tuned.active("sm_90a") if tuned.gpu_kind("sm_90a") is None else None
            assert known is None or known.settings["gemm"][HOT.key] == one.content["gemm"][0]["setting"]
    assert tuned.active("sm_90a") is None


def test_an_order_of_sums_is_judged_over_all_regimes() -> None:
    rows = [
        {"phase": "joint", "shape": {"dim": 128, "tokens": t}, "setting": {"splits": s, "streams": 4},
         "regime": f"T {t}", "over_default": ratio}
        for s, ratios in ((32, (0.8, 1.25)), (8, (0.9, 0.9))) for t, ratio in zip((1, 4), ratios, strict=True)
    ]  # fmt: skip
    best, other = joint_orders(rows)
    assert (best.splits, best.ratio) == (8, pytest.approx(0.9))
    assert (other.ratio, other.worst, other.worst_regime) == (pytest.approx(1.0), 1.25, "T 4")
    assert read_orders("32x4, 8x4") == ((32, 4), (8, 4))
    for text in ("32", "3x4", "x", "32x0"):
        with pytest.raises(ExperimentError, match="--orders is"):
            parsed(["sweep", "fmha", "--out", "x", "--orders", text])


@pytest.mark.usefixtures("page_style")
def test_a_heat_map_names_the_cells_that_were_not_measured() -> None:
    other = HOT.key._replace(weight_rows=64)
    more = screen(DEFAULT, 10.0) | {"regime": other.text, "key": other._asdict()}
    [(name, rows)] = families("gemm", [*stored(), more]).items()
    fig, table, *_ = heat_map(name, cells("gemm", rows), "stored")
    missing = missing_cells(table)
    assert name == "up to 8 rows"
    assert len(table) == 4
    assert sorted(missing) == [f"{other.text}: ring_1x1_u1_p12", f"{other.text}: ring_1x1_u1_p8"]
    assert unmeasured(missing, table) == f"Not measured: {'; '.join(missing)}."
    assert unmeasured([], table) == "Every cell was measured."
    assert unmeasured(missing * 4, table).startswith("A dash: not measured, 8 of 6 cells"), "many are counted"
    assert fig.axes[0].get_title("left")
    best = best_table("gemm", stored())
    assert list(best["rank"]) == ["default", 1, 2]
    from matplotlib import pyplot as plt

    plt.close(fig)
