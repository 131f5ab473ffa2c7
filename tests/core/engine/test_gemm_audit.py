"""The products of an engine's programs: tagged, counted, logged, and held against the tuned file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3core.backend import Backend
from eagle3core.errors import ConfigError, InvariantViolated
from eagle3core.kernels import tuned
from eagle3core.kernels.gemm.tiling import ruled_tiling
from eagle3core.performance.mode import VARIABLE, Watch
from eagle3core.step.gemm_audit import SHAPE_LOG_VARIABLE, GemmAudit, audit, read_shapes, write_shapes
from eagle3core.step.program import Program
from eagle3core.trace import Trace
from lab.pairs.planted import find_geometry
from lab.probes.proofs.plans import shapes_of
from lab.probes.proofs.subject import Setting

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    """Programs of the nano pair at three drafts and two slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SHAPE_LOG_VARIABLE, raising=False)
        runner = shapes_of(find_geometry("nano"), "sm_90a").runner(Setting(3, 2, 256))
    return list(runner.all_programs)


def test_every_product_of_an_engine_has_the_tag_of_its_map(programs: list[Program]) -> None:
    found = audit("sm_90a", programs)
    geometry = find_geometry("nano")
    layers, block = geometry.target.n_layers, geometry.target.block
    of = {product.tag: product for product in found.counts}
    assert set(of) == {
        "BASE_QKV", "BASE_O", "BASE_FFN_GATE_UP", "BASE_FFN_DOWN", "BASE_LM_HEAD", "EAGLE3_FC", "EAGLE3_QKV",
        "EAGLE3_O", "EAGLE3_FFN_GATE_UP", "EAGLE3_FFN_DOWN", "EAGLE3_LM_HEAD_SMALLVOC",
    }  # fmt: skip
    gate_up, down = of["BASE_FFN_GATE_UP"], of["BASE_FFN_DOWN"]
    assert (gate_up.n, gate_up.k) == (2 * block.intermediate_size, block.hidden_size)
    assert (down.n, down.k) == (block.hidden_size, block.intermediate_size)
    # Two step programs run all layers, four chunks all but what their last one does with q, k and v, and the ends of
    # prompts that last one. Three drafts are one pass over the new tokens and two levels.
    assert found.by_tag()["BASE_QKV"] == (0, 6 * layers + 1)
    assert found.by_tag()["BASE_O"] == found.by_tag()["BASE_FFN_DOWN"] == (0, 2 * layers + 4 * (layers - 1) + 1)
    assert found.by_tag()["EAGLE3_FFN_DOWN"] == (0, 2 * 3)
    assert {product.m for product in found.counts if product.tag == "BASE_O"} >= {4, 8}


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', '{"shapes": ["x"]}', '{"shapes": [{"tag": "O"}]}'])
def test_a_shape_log_that_is_none_is_refused_with_what_to_do(
    programs: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "foreign.json").write_text(text)
    monkeypatch.setenv(SHAPE_LOG_VARIABLE, str(tmp_path / "foreign.json"))
    with pytest.raises(ConfigError, match=r"foreign\.json holds no shapes") as refused:
        audit("sm_90a", programs)
    assert SHAPE_LOG_VARIABLE in refused.value.remedy
    assert (tmp_path / "foreign.json").read_text() == text


def test_a_logged_shape_is_a_case_of_the_card_and_the_log_adds_up(
    programs: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "logs" / "shapes.json"
    monkeypatch.setenv(SHAPE_LOG_VARIABLE, str(log))
    counts = audit("sm_90a", programs).counts
    assert read_shapes(log) == counts
    audit("sm_90a", programs)
    assert read_shapes(log) == {product: 2 * n for product, n in counts.items()}
    row = json.loads(log.read_text())["shapes"][0]
    assert {"tag", "m", "n", "k", "dtype", "layout", "count"} <= set(row)
    for product in counts:
        assert product.case["kind"] == product.kind
        assert product.case.get("n", 0) in (0, product.n, product.n // 2)
    write_shapes(tmp_path / "other.json", dict.fromkeys(counts, 1))
    assert sum(read_shapes(tmp_path / "other.json").values()) == len(counts)


def test_hits_are_launches_whose_shape_has_an_entry_and_misses_matter_where_a_file_exists(
    programs: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = audit("sm_90a", programs)
    assert (plain.hits, plain.misses, plain.is_required) == (0, [], False)
    down = next(product for product in plain.counts if product.tag == "EAGLE3_FFN_DOWN" and product.m <= 8)
    setting = asdict(ruled_tiling("sm_90a", down.m, down.n // 16, down.k))
    origin = {"rows": "x", "baked_us": 1.0, "best_us": 1.0, "default_us": 1.0}
    entry = {"key": down.key._asdict(), "setting": setting, **origin}
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"schema": 1, "gpu": "a GPU", "arch": "sm_90a", "gemm": [entry]}))
    monkeypatch.setenv(tuned.TUNED_VARIABLE, str(path))
    monkeypatch.setattr(tuned, "gpu_kind", lambda arch: "a GPU")
    found: GemmAudit = audit("sm_90a", programs)
    assert found.hits == sum(n for product, n in plain.counts.items() if product.key == down.key) > 0
    assert found.is_required
    assert {product.tag for product in found.misses} >= {"EAGLE3_FC", "BASE_LM_HEAD"}
    assert down not in found.misses
    assert replace(found, is_required=False).misses == []


def test_in_performance_mode_a_product_without_an_entry_ends_the_run_before_its_first_step(
    programs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHAPE_LOG_VARIABLE, raising=False)
    subject, setting = shapes_of(find_geometry("nano"), "sm_90a"), Setting(3, 2, 256)
    runner, speculation = subject.runner(setting), SimpleNamespace(enabled=True, reason="")
    backend = Backend(torch.device("cpu"), "a test's device", "kernels", "sm_90a")
    watch = Watch(subject.config(setting), backend, runner, speculation)  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, "1")
    watch.begin(Trace())  # no tuned file for this machine: nothing to miss
    runner.gemms = replace(runner.gemms, is_required=True)
    with pytest.raises(InvariantViolated, match="untuned_products") as refused:
        watch.begin(Trace())
    assert "BASE_QKV 64x" in refused.value.what
    assert refused.value.remedy
    runner.gemms = replace(runner.gemms, tuned=frozenset(runner.gemms.counts))
    watch.begin(Trace())
    monkeypatch.delenv(VARIABLE)
    runner.gemms = replace(runner.gemms, tuned=frozenset())
    watch.begin(Trace())


def test_passes_of_untuned_products_are_left_out_where_every_product_has_to_be_tuned_but_never_the_largest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(SHAPE_LOG_VARIABLE, raising=False)
    runner = shapes_of(find_geometry("nano"), "sm_90a").runner(Setting(3, 2, 256))
    every = [shape.rows for shape in runner.chunks]
    runner.keep_tuned_passes()  # no tuned file for this machine: nothing to miss
    assert [shape.rows for shape in runner.chunks] == every == [64, 128, 256, 512]
    known = frozenset(product for product in runner.gemms.counts if product.m != 128 and product.m != 512)
    runner.gemms = replace(runner.gemms, tuned=known, is_required=True)
    runner.keep_tuned_passes()
    assert [shape.rows for shape in runner.chunks] == [64, 256, 512]
    assert "no passes of [128] rows" in caplog.text
    assert 128 not in {product.m for product in runner.gemms.counts}
    assert runner.largest_pass(200).rows == 64
