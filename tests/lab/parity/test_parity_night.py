"""What the packaged night gives stage parity: inputs that leave no room for the bugs that short prompts hide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rings import exhaustive_but

from lab.night.jobs import PAIR_PARAMETERS, expand, load_config
from lab.night.parameters import check_parameters, find_notebook, read_parameters
from lab.night.plan import packaged_config
from lab.parity import StageReport, faults, inputs, run_stage_parity
from lab.parity.faults.of_experts import EXPERT_FAULTS
from lab.parity.faults.of_formats import FORMAT_FAULTS
from lab.parity.faults.of_reach import REACH_FAULTS
from lab.parity.recording import DEFAULT_CHUNK, PairUnderTest

REACH = sorted({f.name for f in REACH_FAULTS} | {"ignored_target_rope_scaling"})
NOT_OF_THAT_PAIR = {"misread_attention_bias", "misread_tied_head", "misread_hidden_act"}  # it has no such head, no gelu
OF_FORMATS = {fault.name for fault in (*EXPERT_FAULTS, *FORMAT_FAULTS)}  # nor experts, nor fewer bits
NOTEBOOK = "10_parity_stages"


def parity_jobs() -> dict[str, dict[str, Any]]:
    """Parameters of the night's stage parity, by name of the job."""
    jobs = expand(load_config(packaged_config()), dict.fromkeys(PAIR_PARAMETERS, ""), "state")
    declared = read_parameters(find_notebook(NOTEBOOK))
    return {job.id: check_parameters(declared, job.parameters) for job in jobs if job.notebook == NOTEBOOK}


def report_of(given: dict[str, Any], **changed: Any) -> StageReport:
    """The report that the notebook makes of its parameters."""
    given = {**given, **changed}
    pair = inputs.chosen_pair(given["target"], given["draft"])
    ids = inputs.stage_prompt_ids(
        pair[0], given["prompts"], n_prompts=given["n_prompts"], max_tokens=given["max_prompt_tokens"]
    ).ids
    named = ("dtype", "device", "steps", "slots", "prefill_chunk", "fault")
    return run_stage_parity(*pair, prompts=ids, k=given["spec_k"], **{name: given[name] for name in named})


@pytest.mark.reference
def test_the_night_covers_batches_blocks_chunks_refills_every_level_and_a_second_pair() -> None:
    jobs = parity_jobs()
    assert {(given["target"], given["dtype"]) for given in jobs.values()} == {
        (target, dtype) for target in ("", "random") for dtype in ("float32", "bfloat16")
    }
    assert max(given["spec_k"] for given in jobs.values()) == 8
    for given in jobs.values():
        target = inputs.chosen_pair(given["target"], given["draft"])[0]
        ids = inputs.stage_prompt_ids(target, "", n_prompts=given["n_prompts"], max_tokens=given["max_prompt_tokens"])
        lengths = [len(prompt) for prompt in ids.ids]
        assert len(set(lengths)) == len(lengths) > given["slots"] > 1
        assert max(lengths) > DEFAULT_CHUNK
        assert sum(length > given["prefill_chunk"] for length in lengths) > 1
        assert any(length > 64 for length in lengths[given["slots"] :]), "a refilled slot holds two blocks"


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.exhaustive  # `make lab` runs these very jobs, and their gates say the same
@pytest.mark.parametrize("job", sorted(parity_jobs()))
def test_the_nights_stage_parity_passes(job: str) -> None:
    report = report_of(parity_jobs()[job], device="cpu")
    assert report.passed, report.verdict


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_but(REACH[::2], REACH))
def test_the_night_names_the_stage_of_a_bug_that_short_prompts_hide(name: str) -> None:
    assert_named(name, report_of(parity_jobs()["10_parity_stages-random-float32"], fault=name, device="cpu"))


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrong_tap", "misread_taps"])
def test_a_draft_that_asks_for_less_of_the_last_layer_than_it_was_trained_on_is_named_by_its_taps(name: str) -> None:
    assert_named(name, report_of(parity_jobs()["10_parity_stages-random-float32"], fault=name, device="cpu"))


def assert_named(name: str, report: StageReport) -> None:
    fault, first = faults.FAULTS[name], report.first_divergent
    assert first is not None, f"{name} was not found"
    assert (first.stage, first.kind) == (fault.stage, fault.kind), report.verdict


@pytest.mark.gpu
@pytest.mark.parametrize("job", sorted(job for job, given in parity_jobs().items() if given["dtype"] == "bfloat16"))
def test_every_stage_of_the_night_holds_on_the_kernels_path(job: str) -> None:
    given = parity_jobs()[job]
    assert runs_kernels(given)
    report = report_of(given, device="cuda")
    assert report.passed, report.verdict
    assert "missing" not in {cell.status for cell in report.cells}
    assert {cell.stage for cell in report.cells} >= {"target.taps", "draft.qkv", "draft.norm", "tree.parents"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(faults.FAULTS.keys() - NOT_OF_THAT_PAIR - OF_FORMATS))
def test_a_planted_bug_is_named_on_the_kernels_path(name: str) -> None:
    given = parity_jobs()["10_parity_stages-random-bfloat16"]
    assert runs_kernels(given)
    assert_named(name, report_of(given, fault=name, device="cuda"))


def runs_kernels(given: dict[str, Any]) -> bool:
    """Whether an engine of these parameters runs kernels on a GPU."""
    target, draft = (Path(folder) for folder in inputs.chosen_pair(given["target"], given["draft"]))
    engine = PairUnderTest(target, draft, given["dtype"], "cuda").engine(given["spec_k"], n_tokens=128)
    return engine.backend.path == "kernels" and engine.runner.has_kernels
