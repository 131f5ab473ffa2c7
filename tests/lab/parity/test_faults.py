"""Every planted bug is found at its stage: by the parity report, and by the notebook that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agreeing_pairs import write_agreeing_pair
from places import GOLDEN

from eagle3core.model.draft import DraftModel
from lab.errors import ExperimentError
from lab.night.notebook import run_notebook
from lab.night.parameters import find_notebook
from lab.parity import faults, run_stage_parity
from lab.rows import environment

pytestmark = pytest.mark.reference

Pair = tuple[Path, Path]
PROMPT = [5, 17, 99, 230, 301, 44, 8, 412, 77]
REQUIRED = {  # issue text: the draft bugs that must be found
    "wrong_tap", "swapped_concat", "normed_feedback", "rope_query_off_by_one", "missing_d2t", "stale_draft_kv",
}  # fmt: skip


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_agreeing_pair(tmp_path_factory.mktemp("agreeing"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in sorted(faults.FAULTS)), *((name, "bfloat16") for name in sorted(REQUIRED))],
)
def test_a_planted_bug_is_named_at_its_stage(agreeing: Pair, name: str, dtype: str) -> None:
    fault = faults.FAULTS[name]
    report = run_stage_parity(*agreeing, prompts=[PROMPT], dtype=dtype, k=3, steps=3, fault=name)
    first = report.first_divergent
    assert first is not None, f"{name} was not found"
    assert (first.stage, first.kind) == (fault.stage, fault.kind), report.verdict


@pytest.mark.parametrize("name", sorted(REQUIRED - {"stale_draft_kv"}))  # which needs accepted drafts
def test_a_planted_bug_is_named_on_the_golden_pair_too(name: str) -> None:
    fault = faults.FAULTS[name]
    first = run_stage_parity(
        GOLDEN / "target", GOLDEN / "draft", prompts=[PROMPT], k=2, steps=2, fault=name
    ).first_divergent  # fmt: skip
    assert first is not None
    assert (first.stage, first.kind) == (fault.stage, fault.kind)


def test_every_kind_of_stage_has_a_bug_to_plant() -> None:
    planted = {fault.stage for fault in faults.FAULTS.values()}
    draft = {"tokens", "taps", "fc", "concat", "qkv", "rope", "attn", "mlp", "feedback", "norm", "head"}
    target = {"embed", "0.attn", "0.mlp", "taps", "norm", "head"}
    assert {f"draft.{stage}" for stage in draft} | {f"target.{stage}" for stage in target} <= planted
    assert set(faults.FAULTS) >= REQUIRED


def test_the_engine_is_whole_again_after_a_fault_and_after_an_error_inside_one(agreeing: Pair) -> None:
    before = {name: getattr(DraftModel, name) for name in ("chain", "extend", "concat", "to_target_ids")}
    for name in ("rope_query_off_by_one", "shifted_features", "swapped_concat", "missing_d2t"):
        with pytest.raises(RuntimeError), faults.planted(name):
            raise RuntimeError
    assert {name: getattr(DraftModel, name) for name in before} == before
    assert run_stage_parity(*agreeing, prompts=[PROMPT], k=2, steps=1).passed


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ExperimentError, match=r"fault is 'gremlin'[\s\S]*stale_draft_kv"), faults.planted("gremlin"):
        pass


def outcome_of_the_notebook(pair: Pair, folder: Path, fault: str) -> dict[str, object]:
    """The outcome that 10_parity_stages leaves behind with a bug planted."""
    given = {"target": str(pair[0]), "draft": str(pair[1]), "fault": fault, "n_prompts": 1, "max_prompt_tokens": 9}
    run = folder / "run"
    run.mkdir()
    (run / "environment.json").write_text(environment.collect().model_dump_json())
    given |= {"run_dir": str(run), "job": "stages"}
    result = run_notebook(find_notebook("10_parity_stages"), run / "jobs" / "stages", given, timeout_s=120)
    assert result.status == "finished", result
    outcome: dict[str, object] = json.loads((run / "jobs" / "stages" / "outcome.json").read_text())
    return outcome


@pytest.mark.parametrize(
    "name", ["wrong_tap", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(REQUIRED - {"wrong_tap"}))]
)
def test_the_stage_notebook_names_the_stage_of_a_planted_bug(agreeing: Pair, tmp_path: Path, name: str) -> None:
    outcome = outcome_of_the_notebook(agreeing, tmp_path, name)
    gates = outcome["gates"]
    assert isinstance(gates, list)
    assert outcome["passed"] is False
    assert f"the first is {faults.FAULTS[name].stage} in" in gates[0]["detail"]
