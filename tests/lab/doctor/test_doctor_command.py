"""`eagle3lab doctor draft`: both doctors are commands, the fast part runs nothing, and the verdict comes first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from broken_heads import HEAD_CAUSES
from random_pairs import rewrite_config, write_random_pair
from safetensors.torch import load_file, save_file

from lab.cli import parsed, run
from lab.doctor.draft.examine import Diagnosis, examine, teller
from lab.doctor.draft.given import case_of
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.lamps import LAMPS
from lab.doctor.draft.look import Judged
from lab.pairs import shipped_pair
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference


def test_the_doctor_of_machines_and_the_doctor_of_heads_are_both_typed() -> None:
    assert parsed(["doctor"])[0].name == "doctor"
    assert parsed(["doctor", "--target", "T", "--draft", "D"])[0].name == "doctor"
    command, options = parsed(["doctor", "draft", "D", "--target", "T", "-k", "5", "--fast"])
    assert command.name == "doctor draft"
    assert options.model_dump(include={"draft", "target", "spec_k", "fast"}) == {
        "draft": Path("D"), "target": Path("T"), "spec_k": 5, "fast": True,
    }  # fmt: skip


def test_the_fast_part_names_a_map_of_absolute_ids_and_stores_every_lamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = next(cause for cause in HEAD_CAUSES if cause.variant == "absolute ids")
    broken, out = cause.make(tmp_path), tmp_path / "doctor.jsonl"
    assert run(["doctor", "draft", str(broken.draft), "--target", str(broken.target), "--fast", "--out", str(out)]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("vocabulary_map: ")
    assert "it holds absolute ids" in first
    assert any("the engine refuses these files" in line for line in rest)
    assert {row.name for row in read_rows(out)} == {lamp.name for lamp in LAMPS}


def test_the_fast_part_of_a_healthy_head_is_quick_and_has_no_red_lamp() -> None:
    pair = shipped_pair()
    case, _ = case_of(str(pair.target), str(pair.draft), fast=True, device="cpu")
    start = time.process_time()
    assert examine(case, fast=True).of("red") == []
    assert time.process_time() - start < 5


def test_a_head_that_cannot_be_read_gives_the_findings_of_the_preflight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_random_pair(tmp_path)
    stored = load_file(draft / "model.safetensors")
    del stored["fc.weight"]
    save_file(stored, draft / "model.safetensors")
    assert run(["doctor", "draft", str(draft), "--target", str(target)]) == 3
    assert "fc.weight" in capsys.readouterr().out


def judged(name: str, repair: Repair | None, weight: float = 0.5) -> Judged:
    finding = Finding(name, "red" if repair else "green", f"{name} was looked at", repair, weight)
    return Judged(Lamp(name, "?", lambda _: finding), finding, 0.0)


def test_an_examination_says_in_a_line_a_lamp_how_far_it_is() -> None:
    said = list[str]()
    tell = teller(said.append)
    tell(judged("norms", None))
    tell(judged("rope", Repair("turn it", 1.31, 2.74)))
    assert said == [f"[1/{len(LAMPS)}] norms: green (0.0 s)", f"[2/{len(LAMPS)}] rope: red (0.0 s)"]


def test_the_verdict_is_a_sentence_with_cause_counterfactual_and_change() -> None:
    lamps = (judged("rope", Repair("turn it", 1.31, 2.74)), judged("norms", None))
    assert Diagnosis(lamps, None, 1.31, None, 0.0).verdict == (
        "rope: rope was looked at; if fixed: acceptance 1.31 -> 2.74. Change: turn it"
    )
    assert Diagnosis(lamps[1:], None, 2.74, None, 0.0).verdict == (
        "No known cause of low acceptance was found (1 lamps are green). 2.74 tokens a step are what this head gives."
    )


def test_a_head_whose_norm_output_could_mean_two_things_is_examined_once_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_random_pair(tmp_path)
    rewrite_config(draft, norm_output=True)
    asked = ["doctor", "draft", str(draft), "--target", str(target), "--fast"]
    run(asked)
    assert "norm_output" in capsys.readouterr().out.partition("the engine refuses these files")[2]
    run([*asked, "--norm-output", "feedback"])
    assert "the engine refuses" not in capsys.readouterr().out


def test_rows_of_speed_are_given_to_the_lamp_that_asks_for_them() -> None:
    _, options = parsed(["doctor", "draft", "D", "--target", "T", "--speed-rows", "speed.jsonl"])
    assert options.model_dump()["speed_rows"] == Path("speed.jsonl")
