"""Tuned settings: found by key, refused if they would change bits, loaded once with one line."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3core.errors import ConfigError
from eagle3core.kernels import tuned
from eagle3core.kernels.attention.card import CARD as ATTENTION
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.overrides import KV_TILE, MAX_TILES, SPLITS_PER_CTA
from eagle3core.kernels.attention.plan import Plan, choose_plan, plan_key, ruled_plan
from eagle3core.kernels.card import SHARED_BYTES
from eagle3core.kernels.gemm.candidates import gemm_candidates
from eagle3core.kernels.gemm.card import CARD as GEMM
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.tiling import Tiling, choose_tiling, ruled_tiling

pytestmark = pytest.mark.reference

ORIGIN = {"rows": "sweep.jsonl", "baked_us": 1.0, "best_us": 1.0, "default_us": 1.1}
KEY = {"dtype": "bf16", "rows": 8, "weight_rows": 64, "k": 256, "packed": True}
TILING = Tiling("ring", 1, 1, 2, 3)
SHAPE = Shape("bf16", 64, 2, 4, 2)
PLAN = Plan(0, 2, 4)


def entry(key: dict[str, Any], setting: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"key": key, "setting": setting, **ORIGIN, **changed}


def plan_entry() -> dict[str, Any]:
    setting = {name: value for name, value in asdict(PLAN).items() if name in tuned.NEUTRAL["attention"]}
    return entry(plan_key(SHAPE, 3, 1, 1, 96)._asdict(), setting)


def write(path: Path, **content: Any) -> Path:
    known = {"gemm": [entry(KEY, asdict(TILING))], "attention": [plan_entry()]}
    path.write_text(json.dumps({"schema": 1, "gpu": "a GPU", "arch": "sm_90a", **known, **content}))
    return path


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = write(tmp_path / "one.json")
    monkeypatch.setenv(tuned.TUNED_VARIABLE, str(path))
    monkeypatch.setattr(tuned, "gpu_kind", lambda arch: None)  # whichever GPU the tests run on
    tuned._active.cache_clear()
    yield path
    tuned._active.cache_clear()


def test_a_tuned_setting_is_used_for_every_row_count_of_its_regime_and_the_rule_elsewhere(known: Path) -> None:
    for rows in (1, 3, 8):
        assert choose_tiling("sm_90a", rows, 4, 256) == TILING
    for other in (("sm_90a", 9, 4, 256), ("sm_90a", 1, 5, 256), ("sm_90a", 1, 4, 512), ("sm_100", 1, 4, 256)):
        assert choose_tiling(*other) == ruled_tiling(*other)
    assert choose_tiling("sm_90a", 1, 4, 256, False) == ruled_tiling("sm_90a", 1, 4, 256, False)
    assert choose_tiling("sm_90a", 1, 4, 256, True, "f16") == ruled_tiling("sm_90a", 1, 4, 256)


@pytest.mark.parametrize("tiling", [Tiling("bulk", 2, 1, 4, 3), Tiling("bulk", 2, 2, 2, 4)])
def test_a_tuned_setting_of_bulk_copies_for_16_rows_is_used_from_9_rows_on(known: Path, tiling: Tiling) -> None:
    write(known, gemm=[entry({**KEY, "rows": 16, "k": 512}, asdict(tiling))])
    for rows in (9, 12, 16):
        assert choose_tiling("sm_90a", rows, 4, 512) == tiling
        x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((rows, 512), (64, 512), (rows, 64)))
        scratch = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
        (launch,) = gemm("sm_90a", Epilogue("store"), x=x, w=w, y=y, k=512, packed=True, weight_rows=64,
                         scratch=scratch, operands={})  # fmt: skip
        assert tiling.name in launch.variant.name
    for rows in (8, 17):
        assert choose_tiling("sm_90a", rows, 4, 512) == ruled_tiling("sm_90a", rows, 4, 512)


def test_a_tuned_plan_is_used_in_its_regime_and_under_its_own_order_of_sums_only(known: Path) -> None:
    assert choose_plan("sm_90a", SHAPE, 3, 1, 1, 96) == PLAN
    other_order = Shape("bf16", 64, 2, 4, 4)
    for shape, tokens, batch, keys in (
        (SHAPE, 5, 1, 96), (SHAPE, 3, 2, 96), (SHAPE, 3, 1, 8192), (other_order, 3, 1, 96)
    ):  # fmt: skip
        ruled = ruled_plan("sm_90a", shape, tokens, batch, 1, keys)
        assert choose_plan("sm_90a", shape, tokens, batch, 1, keys) == ruled


def test_the_file_is_read_once_with_one_line_that_counts_its_entries(
    known: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "eagle3core"):
        for _ in range(3):
            tuned.find("sm_90a", "gemm", tuned.GemmKey(**KEY))
    assert [record.getMessage() for record in caplog.records] == ["[EAGLE3][GEMM_TUNED] loaded entries=2 device=a GPU"]


@pytest.mark.parametrize("kind", ["another GPU", None])
def test_a_kind_of_gpu_without_a_file_uses_the_rule_and_says_so_once(
    known: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str | None
) -> None:
    monkeypatch.setenv(tuned.TUNED_VARIABLE, "")
    monkeypatch.setattr(tuned, "FOLDER", known.parent)
    monkeypatch.setattr(tuned, "gpu_kind", lambda arch: kind)
    with caplog.at_level(logging.INFO, "eagle3core"):
        for _ in range(3):
            assert choose_tiling("sm_80", 1, 4, 256) == ruled_tiling("sm_80", 1, 4, 256)
    told = f"[EAGLE3][GEMM_TUNED] no file for device={kind or 'sm_80'}; the rule decides"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_none_leaves_the_rule_alone(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuned.TUNED_VARIABLE, tuned.NO_FILE)
    assert choose_tiling("sm_90a", 1, 4, 256) == ruled_tiling("sm_90a", 1, 4, 256)


def test_a_file_of_another_gpu_is_refused_and_a_packaged_one_is_passed_over(
    known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "gpu_kind", lambda arch: "another GPU")
    with pytest.raises(ConfigError, match="tuned on a GPU; this is another GPU"):
        tuned.active("sm_90a")
    monkeypatch.setenv(tuned.TUNED_VARIABLE, "")
    monkeypatch.setattr(tuned, "FOLDER", known.parent)
    assert tuned.active("sm_90a") is None
    monkeypatch.setattr(tuned, "gpu_kind", lambda arch: None)  # a machine that compiles ahead
    found = tuned.active("sm_90a")
    assert found is not None
    assert found.gpu == "a GPU"
    assert tuned.active("sm_80") is None


@pytest.mark.parametrize(
    ("op", "name"), [("gemm", "streams"), ("gemm", "unit"), ("attention", "splits"), ("attention", "streams")]
)
def test_an_entry_that_would_change_the_order_of_sums_is_refused(op: str, name: str) -> None:
    good = entry(KEY, asdict(TILING)) if op == "gemm" else plan_entry()
    tuned.checked_entry(op, good, "here")
    with pytest.raises(ConfigError, match="order of sums") as refused:
        tuned.checked_entry(op, {**good, "setting": {**good["setting"], name: 8}}, "here")
    assert "order-neutral" in refused.value.allowed
    assert refused.value.remedy


@pytest.mark.parametrize(
    "bad",
    [
        entry(KEY, {**asdict(TILING), "warps": 2}),
        entry(KEY, {"kernel": "ring"}),
        entry({**KEY, "batch": 1}, asdict(TILING)),
        entry(KEY, {**asdict(TILING), "stages": -3}),
        {"key": KEY, "setting": asdict(TILING), "rows": "x"},
    ],
)
def test_an_entry_that_is_no_setting_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        tuned.checked_entry("gemm", bad, "here")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 99}',
        '{"schema": 1}',
        '{"schema": 1, "gpu": "a GPU", "arch": "sm_90a", "gemm": 3}',
        '{"schema": 1, "gpu": "a GPU", "arch": "sm_90a", "gemm": ["x"]}',
        '{"schema": 1, "gpu": "a GPU", "arch": "sm_90a", "gemm": [{"key": [], "setting": {}}]}',
        '{"schema": 1, "gpu": "a GPU", "arch": "sm_90a", "gemm": [{"key": {"k": []}, "setting": {}}]}',
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "none.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"none\.json"):
        tuned.read_artifact(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        tuned.read_artifact(tmp_path / "absent.json")


def test_a_gpu_that_the_kernels_have_no_target_for_has_no_tuned_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (11, 0))
    assert tuned.gpu_kind.__wrapped__("sm_90a") is None


def test_neutral_and_order_parameters_are_those_of_the_cards() -> None:
    assert set(GEMM.order) == tuned.ORDER["gemm"]
    assert set(GEMM.neutral) - {"packed"} == tuned.NEUTRAL["gemm"] - {"warps_x", "warps_w"}
    assert set(asdict(TILING)) == tuned.NEUTRAL["gemm"]
    assert set(ATTENTION.order) == tuned.ORDER["attention"]
    # The three others follow from what is asked.
    assert set(ATTENTION.neutral) == tuned.NEUTRAL["attention"] == set(asdict(PLAN)) - {"counting", "tiles", "short"}


def test_regimes_have_no_gap_and_hold_their_own_largest() -> None:
    for regime in (tuned.rows_regime, tuned.attention_rows_regime):
        for n in range(1, 1200):
            assert n <= regime(n) == regime(regime(n))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_every_tiling_that_is_tried_fits_and_the_rules_own_is_among_the_first_regimes(arch: str) -> None:
    for rows in (1, 4, 8, 12, 16, 24, 32, 64, 512):
        for n_tiles, k in ((256, 4096), (1792, 4096), (2160, 2880), (256, 14336)):
            found = gemm_candidates(arch, rows, n_tiles, k, True)
            assert found
            assert all(one.shared_bytes <= SHARED_BYTES[arch] for one in found)
            assert len(set(found)) == len(found)
            if arch == "sm_90a" and rows <= 8 and k % 1024 == 0:
                assert ruled_tiling(arch, rows, n_tiles, k) in found


def test_the_attention_kernels_settings_can_be_given_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuned.TUNED_VARIABLE, tuned.NO_FILE)
    ruled = ruled_plan("sm_90a", SHAPE, 3, 1, 1)
    monkeypatch.setenv(KV_TILE, "16")
    monkeypatch.setenv(MAX_TILES, "3")
    monkeypatch.setenv(SPLITS_PER_CTA, "2")
    assert choose_plan("sm_90a", SHAPE, 3, 1, 1) == replace(ruled, units=1, stages=3, run=2)
    for variable, value in ((KV_TILE, "24"), (MAX_TILES, "1"), (SPLITS_PER_CTA, "5"), (SPLITS_PER_CTA, "x")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(ConfigError, match=variable):
                choose_plan("sm_90a", SHAPE, 3, 1, 1)
