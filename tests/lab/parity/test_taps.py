"""Recorded stages on disk: written, read back, refused where they do not fit, and used as the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from agreeing_pairs import write_agreeing_pair
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lab import cli
from lab.errors import ExperimentError, NotComparable
from lab.parity import run_stage_parity
from lab.parity.stages import StageReport
from lab.parity.taps import read_taps, write_taps

pytestmark = pytest.mark.reference

Pair = tuple[Path, Path]
PROMPTS = [[5, 17, 99, 230, 301, 44, 8, 412, 77], [1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_agreeing_pair(tmp_path_factory.mktemp("agreeing"))


@pytest.fixture(scope="module")
def taps(agreeing: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_taps(*agreeing, tmp_path_factory.mktemp("taps") / "ours.safetensors", prompts=PROMPTS, k=3, steps=3)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return dict(opened.metadata())


def changed(path: Path, out: Path, name: str, change: float) -> Path:
    """A copy of a taps file with one number of one tensor changed."""
    tensors = load_file(path)
    tensors[name].view(-1)[0] += change
    save_file(tensors, out, metadata=metadata_of(path))
    return out


def against(agreeing: Pair, reference: Path, **options: object) -> StageReport:
    return run_stage_parity(*agreeing, prompts=PROMPTS, k=3, steps=3, reference=reference, **options)  # type: ignore[arg-type]


def test_a_file_says_which_tokens_and_sizes_it_holds(taps: Path) -> None:
    metadata = metadata_of(taps)
    assert json.loads(metadata["prompts"]) == PROMPTS
    assert (metadata["k"], metadata["steps"], metadata["dtype"]) == ("3", "3", "float32")
    shapes = json.loads(metadata["shapes"])
    assert shapes["prompt0/prefill/target.taps"] == [9, 3 * 64]
    assert shapes["prompt1/step2/chain2/draft.head"] == [1, 128]
    assert str(taps.parent) not in json.dumps(metadata)


def test_our_own_recording_is_a_reference_that_agrees_exactly(agreeing: Pair, taps: Path) -> None:
    report = against(agreeing, taps)
    assert report.passed, report.verdict
    assert max(cell.max_abs or 0.0 for cell in report.cells) == 0.0
    assert "recorded reference" in report.verdict


def test_a_plain_models_recording_says_what_attention_gave_and_agrees_too(
    agreeing: Pair, taps: Path, tmp_path: Path
) -> None:
    tensors = load_file(taps)
    for name in [name for name in tensors if name.endswith("draft.attn")]:
        tensors[name] = tensors[name] - tensors[name.replace("draft.attn", "draft.fc")]
        tensors[name.replace("draft.attn", "draft.mlp")] = torch.zeros(1)  # which no step forms
    plain = tmp_path / "plain.safetensors"
    save_file(tensors, plain, metadata={**metadata_of(taps), "schema": "1"})
    report = against(agreeing, plain)
    assert report.passed, report.verdict
    assert "step1/chain2/draft.attn" in read_taps(plain, PROMPTS, k=3, steps=3)[0]


def test_a_recording_in_another_dtype_is_judged_by_the_tolerance_of_ours(agreeing: Pair, tmp_path: Path) -> None:
    path = write_taps(*agreeing, tmp_path / "exact.safetensors", prompts=PROMPTS, dtype="float64", k=3, steps=3)
    report = against(agreeing, path)
    assert report.passed, report.verdict
    assert max(cell.max_abs or 0.0 for cell in report.cells) > 0.0


@pytest.mark.parametrize(
    ("name", "change"), [("step1/chain2/draft.attn", 0.01), ("prefill/target.3.mlp", 1.0), ("step0/tree.tokens", 1)]
)
def test_the_stage_where_a_recording_differs_is_named(
    agreeing: Pair, taps: Path, tmp_path: Path, name: str, change: float
) -> None:
    report = against(agreeing, changed(taps, tmp_path / "other.safetensors", f"prompt0/{name}", change))
    first = report.first_divergent
    assert first is not None
    assert f"{first.pass_name}/{first.stage}" == name
    assert sum(cell.status != "pass" for cell in report.cells) == 1


def test_a_recording_far_from_the_truth_cannot_make_ours_pass(agreeing: Pair, taps: Path, tmp_path: Path) -> None:
    tensors = {k: v * 3 if v.is_floating_point() else v for k, v in load_file(taps).items()}
    save_file(tensors, tmp_path / "loud.safetensors", metadata=metadata_of(taps))
    assert not against(agreeing, tmp_path / "loud.safetensors").passed


def test_stages_a_recording_lacks_fail_unless_the_comparison_is_narrowed_to_others(
    agreeing: Pair, taps: Path, tmp_path: Path
) -> None:
    kept = {name: tensor for name, tensor in load_file(taps).items() if name.endswith(("draft.fc", "draft.head"))}
    save_file(kept, tmp_path / "few.safetensors", metadata=metadata_of(taps))
    report = against(agreeing, tmp_path / "few.safetensors")
    assert not report.passed
    assert {cell.status for cell in report.cells} == {"pass", "missing"}
    narrowed = against(agreeing, tmp_path / "few.safetensors", stages=("draft.fc", "draft.head"))
    assert narrowed.passed, narrowed.verdict
    assert {cell.stage for cell in narrowed.cells} == {"draft.fc", "draft.head"}
    with pytest.raises(ExperimentError, match=r"'draft\.fcc'") as refused:
        against(agreeing, tmp_path / "few.safetensors", stages=("draft.fcc",))
    assert "draft.fc," in refused.value.allowed


def test_files_of_other_runs_are_refused(taps: Path, tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match="other prompts"):
        read_taps(taps, [[1, 2, 3]], k=3, steps=3)
    with pytest.raises(NotComparable, match="3 steps of 3 drafts"):
        read_taps(taps, PROMPTS, k=2, steps=3)
    with pytest.raises(NotComparable, match="at least 4 steps"):
        read_taps(taps, PROMPTS, k=3, steps=4)
    newer = tmp_path / "newer.safetensors"
    save_file(load_file(taps), newer, metadata={**metadata_of(taps), "schema": "3"})
    with pytest.raises(NotComparable, match="schema '3'"):
        read_taps(newer, PROMPTS, k=3, steps=3)


def test_unusable_files_are_refused_by_name(taps: Path, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"absent\.safetensors cannot be read"):
        read_taps(tmp_path / "absent.safetensors", PROMPTS, k=3, steps=3)
    short = tmp_path / "short.safetensors"
    short.write_bytes(taps.read_bytes()[:-100])
    with pytest.raises(ExperimentError, match=r"short\.safetensors cannot be read"):
        read_taps(short, PROMPTS, k=3, steps=3)
    bare = tmp_path / "bare.safetensors"
    save_file({"prompt0/first_token": torch.tensor([1])}, bare)
    with pytest.raises(ExperimentError, match="no metadata schema, prompts"):
        read_taps(bare, PROMPTS, k=3, steps=3)


def test_the_command_writes_a_file_for_a_pair_on_disk(
    agreeing: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sub" / "ours.safetensors"
    options = ["--spec-k", "2", "--steps", "1", "--n-prompts", "1", "--dtype", "bfloat16"]
    assert (
        cli.run(["taps", "--target", str(agreeing[0]), "--draft", str(agreeing[1]), "--out", str(out), *options]) == 0
    )
    assert "1 steps of spec-2 in bfloat16" in capsys.readouterr().out
    assert load_file(out)["prompt0/step0/chain1/draft.fc"].dtype == torch.bfloat16
    with pytest.raises(ExperimentError, match=r"\.safetensors"):
        write_taps(*agreeing, tmp_path / "ours.bin", prompts=PROMPTS)


@pytest.mark.parametrize("wrong", [{"prompts": "[[1, 2"}, {"k": "three"}, {"steps": "3.5"}])
def test_metadata_that_cannot_be_read_is_refused_with_the_files_name(
    taps: Path, tmp_path: Path, wrong: dict[str, str]
) -> None:
    save_file(load_file(taps), tmp_path / "odd.safetensors", metadata={**metadata_of(taps), **wrong})
    with pytest.raises(ExperimentError, match=r"odd\.safetensors has metadata"):
        read_taps(tmp_path / "odd.safetensors", PROMPTS, k=3, steps=3)


@pytest.mark.slow
def test_inspect_states_names_the_first_stage_that_differs_in_a_file_of_recorded_ones(
    agreeing: Pair, taps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--target", str(agreeing[0]), "--draft", str(agreeing[1])]
    assert cli.run(["inspect", "states", str(taps), *pair]) == 0
    other = changed(taps, tmp_path / "other.safetensors", "prompt1/step1/extend/draft.fc", 0.5)
    kept = {name: tensor for name, tensor in load_file(other).items() if "/draft.concat" not in name}
    save_file(kept, other, metadata=metadata_of(other))  # what a system did not record is not asked for
    words = ["--repro", str(tmp_path / "repro"), "--out", str(tmp_path / "rows.jsonl")]
    assert cli.run(["inspect", "states", str(other), *pair, *words]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["first"] == "step1/extend/draft.fc"
    assert (tmp_path / "repro" / "step1-extend-draft.fc" / "repro.py").is_file()
    assert "draft.concat" not in (tmp_path / "rows.jsonl").read_text()
