"""Every planted bug is found at its stage: by the parity report, and by the notebook that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from agreeing_pairs import write_agreeing_pair
from layout_files import Changes, read_head, write_head
from places import GOLDEN
from random_pairs import ROPE_LLAMA3
from rings import slow_but, slow_from

from lab.errors import ExperimentError
from lab.night.notebook import run_notebook
from lab.night.parameters import find_notebook
from lab.parity import faults, run_stage_parity
from lab.parity.faults.of_draft import DRAFT_FAULTS
from lab.parity.faults.of_experts import EXPERT_FAULTS
from lab.parity.faults.of_formats import FORMAT_FAULTS
from lab.parity.faults.of_layouts import LAYOUT_FAULTS
from lab.parity.faults.of_reach import REACH_FAULTS
from lab.parity.faults.of_target import TARGET_FAULTS
from lab.parity.recording import PairUnderTest
from lab.rows import environment

pytestmark = pytest.mark.reference

Pair = tuple[Path, Path]
PROMPT = [5, 17, 99, 230, 301, 44, 8, 412, 77]
REQUIRED = {  # the draft bugs that a project must find before it is believed
    "wrong_tap", "swapped_concat", "normed_feedback", "rope_query_off_by_one", "missing_d2t", "stale_draft_kv",
}  # fmt: skip
ANY_RUN = sorted(f.name for f in (*TARGET_FAULTS, *DRAFT_FAULTS) if "RoPE" not in f.needs)
REACH = sorted({f.name for f in REACH_FAULTS} | {"ignored_target_rope_scaling"})
LENGTHS = (70, 9, 133, 33)  # for two slots and chunks of 64


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With scaled RoPE, of which the draft says so itself."""
    folder = tmp_path_factory.mktemp("agreeing")
    return write_agreeing_pair(folder, rope=ROPE_LLAMA3, draft_rope=ROPE_LLAMA3)


def assert_named(fault: faults.Fault, pair: Pair, prompts: list[list[int]], **how: object) -> None:
    report = run_stage_parity(*pair, prompts=prompts, fault=fault.name, **how)  # type: ignore[arg-type]
    first = report.first_divergent
    assert first is not None, f"{fault.name} was not found"
    assert (first.stage, first.kind) == (fault.stage, fault.kind), report.verdict


def prompts_of(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(512, (length,), generator=random).tolist() for length in lengths]


@pytest.mark.parametrize("name", slow_but(sorted({*ANY_RUN[::3], *REQUIRED} & {*ANY_RUN}), ANY_RUN))
def test_a_planted_bug_is_named_at_its_stage(agreeing: Pair, name: str) -> None:
    assert_named(faults.FAULTS[name], agreeing, [PROMPT], dtype="float32", k=3, steps=3)


@pytest.mark.parametrize("name", slow_from(1, sorted(REQUIRED)))
def test_a_planted_bug_is_named_at_its_stage_in_bfloat16_too(agreeing: Pair, name: str) -> None:
    assert_named(faults.FAULTS[name], agreeing, [PROMPT], dtype="bfloat16", k=3, steps=3)


# The slow ring plants all of them into the night's own runs (tests/lab/parity/test_parity_night.py).
@pytest.mark.parametrize(
    "name",
    slow_from(2, ["refilled_keys", "chunk_positions", "batch_positions", "late_chain_keys", "second_block_values"]),
)
def test_a_bug_that_short_single_prompts_hide_is_named_at_its_stage(agreeing: Pair, name: str) -> None:
    assert_named(faults.FAULTS[name], agreeing, prompts_of(*LENGTHS), k=4, steps=2, slots=2, prefill_chunk=64)


HIDDEN = sorted(set(REACH) - {"ignored_target_rope_scaling", "wrong_rope_theta", "ignored_rope_scaling"})


@pytest.mark.parametrize("name", slow_from(4, HIDDEN))
def test_one_short_prompt_at_a_small_depth_does_not_show_it(agreeing: Pair, name: str) -> None:
    """So the inputs of the test above, and of the packaged night, are what finds it."""
    assert run_stage_parity(*agreeing, prompts=[PROMPT], k=2, steps=1, fault=name).passed


@pytest.mark.parametrize("name", sorted(REQUIRED - {"stale_draft_kv"}))  # which needs accepted drafts
def test_a_planted_bug_is_named_on_the_golden_pair_too(name: str) -> None:
    assert_named(faults.FAULTS[name], (GOLDEN / "target", GOLDEN / "draft"), [PROMPT], k=2, steps=2)


@pytest.mark.parametrize("name", slow_from(1, ["rope_query_off_by_one", "swapped_kv", "hot_attention"]))
def test_a_bug_of_keys_is_named_on_a_head_that_norms_them_first(agreeing: Pair, tmp_path: Path, name: str) -> None:
    config, weights = read_head(agreeing[1])
    Changes(config, weights, 64, 512).norms_of_heads()
    pair = agreeing[0], write_head(tmp_path / "head", config, weights)
    assert run_stage_parity(*pair, prompts=[PROMPT], k=2, steps=1).passed
    assert_named(faults.FAULTS[name], pair, [PROMPT], k=2, steps=1)


def test_every_kind_of_stage_has_a_bug_to_plant() -> None:
    planted = {fault.stage for fault in faults.FAULTS.values()}
    draft = {
        "tokens", "positions", "taps", "feedback_in", "fc", "concat", "qkv", "rope", "attn", "feedback", "norm", "head"
    }  # fmt: skip
    target = {"embed", "0.attn", "0.mlp", "taps", "norm", "head"}
    assert {f"draft.{stage}" for stage in draft} | {f"target.{stage}" for stage in target} <= planted
    assert set(faults.FAULTS) >= REQUIRED
    tables = (TARGET_FAULTS, EXPERT_FAULTS, FORMAT_FAULTS, DRAFT_FAULTS, REACH_FAULTS, LAYOUT_FAULTS)
    assert len(faults.FAULTS) == sum(map(len, tables))


@pytest.mark.parametrize("name", ["rope_query_off_by_one", "shifted_features", "swapped_kv", "missing_d2t"])
def test_the_engine_that_a_bug_was_planted_beside_stays_right(agreeing: Pair, name: str) -> None:
    engine = PairUnderTest(*agreeing).engine(3, n_tokens=64)
    before = (engine.target, engine.draft, engine.runner.programs)
    spoiled = faults.plant(engine, name)
    assert (engine.target, engine.draft, engine.runner.programs) == before
    assert spoiled.runner is not engine.runner


BESIDE = sorted(faults.FAULTS.keys() - {fault.name for fault in LAYOUT_FAULTS})  # a misread head has other programs


@pytest.mark.parametrize("name", slow_but(BESIDE[::3], BESIDE))
def test_kernels_stay_in_a_spoiled_program(agreeing: Pair, name: str) -> None:
    """A bug adds calls beside those that ship; it takes none away, so it is the same on a GPU."""
    engine = PairUnderTest(*agreeing).engine(4, n_tokens=64, max_batch_size=2)
    ops = [[call.op for stage in program for call in stage.calls] for program in engine.runner.all_programs]
    spoiled = faults.plant(engine, name).runner.all_programs
    kept = [[c.op for stage in program for c in stage.calls if c.op != "planted"] for program in spoiled]
    assert kept == ops


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ExperimentError, match=r"fault is 'gremlin'[\s\S]*stale_draft_kv"):
        PairUnderTest(GOLDEN / "target", GOLDEN / "draft", fault="gremlin")


def outcome_of_the_notebook(pair: Pair, folder: Path, fault: str) -> dict[str, object]:
    """The outcome that 10_parity_stages leaves behind with a bug planted."""
    inputs = {"n_prompts": 3, "max_prompt_tokens": 40, "steps": 4}  # some steps accept drafts, which one bug needs
    given = {"target": str(pair[0]), "draft": str(pair[1]), "fault": fault} | inputs
    run = folder / "run"
    run.mkdir()
    (run / "environment.json").write_text(environment.collect().model_dump_json())
    given |= {"run_dir": str(run), "job": "stages"}
    result = run_notebook(find_notebook("10_parity_stages"), run / "jobs" / "stages", given, timeout_s=120)
    assert result.status == "finished", result
    outcome: dict[str, object] = json.loads((run / "jobs" / "stages" / "outcome.json").read_text())
    return outcome


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("stale_draft_kv", marks=pytest.mark.slow),
        pytest.param("misread_norm_before_residual", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("wrong_tap", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_the_stage_notebook_names_the_stage_of_a_planted_bug(agreeing: Pair, tmp_path: Path, name: str) -> None:
    outcome = outcome_of_the_notebook(agreeing, tmp_path, name)
    gates = outcome["gates"]
    assert isinstance(gates, list)
    assert outcome["passed"] is False
    assert f"the first is {faults.FAULTS[name].stage} in" in gates[0]["detail"]
