"""What a night found: the worst first, with cause and remedy, from rows alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from test_what_a_page_tells import GATE, NIGHT_8B, decoded, page_of, row

from lab.acceptance.counts import CAUSES as LOSSES
from lab.page import first_screen
from lab.page.explained import explanation_of
from lab.page.findings.causes import cause_of
from lab.page.findings.finding import Level, Night
from lab.page.findings.of_acceptance import WINS_BACK
from lab.page.findings.remedies import OTHERS, REMEDIES, remedy_of
from lab.page.findings.rules import MOST_SENTENCES, findings_of, headline_of
from lab.page.runbook import anchors, sections_for
from lab.parity.faults import FAULTS
from lab.probes.gates.config import load_gates, packaged_gates
from lab.rows.gates import gates_of
from lab.rows.runs import read_whole_summary
from lab.rows.store import Row, read_run

pytestmark = pytest.mark.reference

STORED = (NIGHT_8B, NIGHT_8B.parent / "night")


def gates_of_the_project() -> list[str]:
    """Names of gates: of gates.toml, of stored nights, and those that source and notebooks write down."""
    configs = [load_gates(packaged_gates(geometry)) for geometry in (None, "gpt-oss-120b")]
    names = [
        f"{kind}: {threshold.name}"
        for config in configs
        for mode in config.mode
        for kind in ("micro", "full")
        for _, threshold in mode.thresholds(kind, config.invariants)  # type: ignore[arg-type]
    ]
    names += [gate.name for run in STORED for gate in gates_of(read_run(run))]
    for path in (*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "lab").glob("probes/**/*.py")):
        for text in re.findall(r"exp\.gate\(\s*f?\\?\"([^\"\\]+)", path.read_text(encoding="utf-8")):
            names += [re.sub(r"\{[^}]*\}", "3", text.replace("{kind}", kind)) for kind in ("micro", "full")]
    names += re.findall(r'^\[\[gate\]\]\nname = "([^"]+)', (ROOT / "nightly.toml").read_text(), re.MULTILINE)
    return sorted(set(names) - {"micro: 3", "full: 3"})  # what 42_perf_gates calls the gates of gates.toml


def test_every_gate_has_a_remedy_and_every_remedy_a_place_in_the_runbook() -> None:
    names = gates_of_the_project()
    assert len(names) > 150
    assert not [name for name in names if remedy_of(name) is OTHERS]
    known = anchors()
    assert not [remedy for remedy in (*REMEDIES, OTHERS) if remedy.anchor not in known]


def test_every_remedy_is_one_that_a_gate_or_a_rule_finds() -> None:
    source = "".join(path.read_text() for path in (ROOT / "lab" / "page" / "findings").glob("of_*.py"))
    rules = set(re.findall(r'\(?"([a-z -]+)", (?:Level|refused|slow|disturbed)', source))
    warnings = {remedy.pattern for remedy in REMEDIES if "*" not in remedy.pattern} & rules
    assert warnings >= {"disturbed run", "slow draft", "refused drafts", "head not working", "moved numbers"}
    used = {remedy_of(name) for name in (*gates_of_the_project(), *rules, "unfinished job", "rows not had")}
    assert {remedy.pattern for remedy in REMEDIES if remedy not in used} <= {"thresholds of spec-*"}


def test_every_bug_that_can_be_planted_has_a_cause_in_words_at_its_stage() -> None:
    assert not [name for name, fault in FAULTS.items() if not cause_of(fault.stage, fault.kind)]


def test_every_cause_of_a_loss_says_what_would_win_it_back() -> None:
    assert set(WINS_BACK) == set(LOSSES)


def stage(name: str, kind: str, ratio: float, first_bad: float | None = None) -> Row:
    values: dict[str, Any] = {
        "kind": kind, "stage": name, "status": "fail" if ratio > 1 else "pass", "cells": 10, "max_abs": ratio / 100,
        "tolerance": 0.01, "ratio": ratio, "bad_cells": 4 if ratio > 1 else 0, "first_bad": first_bad,
    }  # fmt: skip
    return row("10_parity_stages", "parity", f"{kind}/{name}", values, parameters={"dtype": "float32"})


def night(rows: list[Row], gates: list[dict[str, Any]] | None = None, **more: Any) -> Night:
    since = {"previous": None, "changes": []}
    jobs = [{"id": job, "notebook": job, "status": "finished"} for job in dict.fromkeys(one.job for one in rows)]
    return Night({"word": "failed", "gates": gates or [], "jobs": jobs, "since": since} | more, rows)


RED = {"name": "stage parity", "word": "fail", "value": 8, "threshold": 0, "detail": "", "job": "10_parity_stages"}


def test_the_first_stage_that_is_wrong_is_named_with_its_cause_and_its_gate_is_told_once() -> None:
    rows = [
        stage("draft.head", "extend", 90.0, 7.0),
        stage("draft.fc", "prefill", 250.0, 3.0),
        stage("target.embed", "prefill", 0.2),
    ]
    found = findings_of(night(rows, [RED]))
    assert [finding.level for finding in found] == [Level.FAILED]
    assert found[0].sentence.startswith(
        "Stage draft.fc (prefill) is the first that disagrees with Hugging Face: its largest error is 2.5, 250 times"
    )
    assert "8 of 30 comparisons fail" in found[0].sentence
    assert "Usual cause: the taps reach fc in another order" in found[0].sentence
    assert found[0].remedy == remedy_of("stage parity")
    assert headline_of("failed", found) == "Failed: draft.fc is the first stage that is wrong"


@pytest.mark.parametrize(
    ("is_within", "told"), [(False, "already the first draft is refused"), (True, "later ones fall")]
)
def test_drifted_acceptance_says_whether_the_first_position_is_low_already(is_within: bool, told: str) -> None:
    lengths = {"measured_length": 2.5, "golden_length": 3.05}
    held = {"n_bugs": 9, "n_positions": 40, "measured_length": 2.5, "expected_length": 3.1}
    rows = [
        row("31_acceptance", "golden_length", "chain-1", {**lengths, "is_within": is_within}),
        row("31_acceptance", "golden_length", "chain-3", {**lengths, "is_within": False}),
        row("31_acceptance", "acceptance_reference", "spec-3", held),
    ]  # fmt: skip
    found = findings_of(night(rows))
    assert [finding.level for finding in found] == [Level.FAILED, Level.FAILED]
    assert all(told in finding.sentence for finding in found)
    assert "at 9 of 40 drafted positions" in found[0].sentence


def test_rounds_that_spread_over_30_per_cent_are_said_to_be_disturbed_in_verdict_and_headline(tmp_path: Path) -> None:
    def rounds(low: float, high: float) -> Row:
        values = {"decode_tokens_per_s": 100.0, "decode_tokens_per_s_p10": low, "decode_tokens_per_s_p90": high}
        return row("30_decode", "decode", "baseline", values)

    gate = row("10_parity_stages", "gate", "g", GATE)
    sentence, text = page_of(tmp_path / "idle", [gate, rounds(86.0, 115.0)])
    assert "disturbed" not in sentence
    assert "<h1>Passed</h1>" in text
    sentence, text = page_of(tmp_path / "busy", [gate, rounds(84.0, 115.0)])
    assert "but the run was disturbed: rounds of baseline spread over 31% of their median (84 to 115 tokens" in sentence
    assert "<h1>Passed, but the run was disturbed</h1>" in text
    assert 'href="#runbook-8-the-run-was-disturbed"' in text


def test_a_draft_that_slows_its_target_down_is_in_the_headline(tmp_path: Path) -> None:
    _, text = page_of(tmp_path, [row("10_parity_stages", "gate", "g", GATE), decoded(0.58, 0.55, 0.61)])
    assert "<h1>Passed, but the draft slows its target down</h1>" in text


def test_a_red_gate_has_its_remedy_beside_it_and_the_runbook_on_the_page(tmp_path: Path) -> None:
    red = row(
        "22_kernels",
        "gate",
        "admit: time over 1.5 x (bytes + passes), worst shape",
        GATE | {"passed": False, "value": 2.2},
    )
    own = row("mine", "gate", "my own gate", GATE | {"passed": False})
    _, text = page_of(tmp_path, [red, own])
    assert text.count('href="#runbook-7-a-kernel-or-a-setting-misses-its-bound"') == 2
    assert '<article id="runbook-7-a-kernel-or-a-setting-misses-its-bound"' in text
    assert '<article id="runbook-a-gate-failed"' in text
    assert '<article id="runbook-5-it-is-slow"' not in text
    assert len(sections_for(anchors())) == len(anchors())


@pytest.mark.parametrize("run", STORED, ids=lambda run: run.name)
def test_a_stored_night_tells_five_to_eight_things_the_worst_first_each_of_a_figure_that_is_there(run: Path) -> None:
    summary = read_whole_summary(run)
    figures = {
        job["id"]: [path.stem for path in (run / "jobs" / job["id"] / "figures").glob("*.json")]
        for job in summary["jobs"]
    }
    whole = Night(summary, read_run(run), figures)
    found = findings_of(whole)
    assert 5 <= len(found) <= MOST_SENTENCES
    assert [finding.level for finding in found] == sorted(finding.level for finding in found)
    assert all(finding.remedy for finding in found if finding.level != Level.TOLD)
    assert all(finding.sentence.endswith(".") for finding in found)
    assert all(finding.figure in figures[finding.job] for finding in found if finding.figure)
    assert sum(bool(finding.figure) for finding in found) >= 4
    numbers = first_screen.numbers(whole)
    assert [number.label for number in numbers] == [
        "Speed-up over plain decoding",
        "Tokens a step",
        "Share of the byte floor",
    ]
    assert all(number.note for number in numbers)
    assert all(number.value for number in numbers[:2])
    job, figure = first_screen.picture(whole, found, ["90_nightly"])
    assert figure in figures[job]


def test_a_number_that_was_not_measured_is_missing_with_the_reason_or_was_not_asked_for() -> None:
    numbers = first_screen.numbers(night([row("31_acceptance", "gate", "g", GATE)]))
    assert [(number.word, number.note) for number in numbers] == [
        ("not asked for", "no job of this run is of 30_decode or 41_bench or 42_perf_gates"),
        ("missing", "31_acceptance left no such row"),
        ("not asked for", "no job of this run is of 41_bench or 42_perf_gates"),
    ]


def test_a_red_gate_told_alone_says_what_binds_and_leads_to_the_figure_that_shows_it() -> None:
    detail = "time above the floor: takes 67.6 times its floor, most in target.attn (8016 us above 76 of bytes)"
    gate = RED | {"name": "micro: single baseline: share of its byte floor", "job": "42", "detail": detail}
    told = Night(night([], [gate]).summary, [], {"42": ["other", "gates"]})
    [alone] = findings_of(told)
    assert alone.sentence.endswith(f"(0); {detail}.")
    assert (alone.job, alone.figure) == ("42", "gates")
    assert headline_of("failed", [alone]) == "Failed: the gate 'single baseline: share of its byte floor'"
    [two] = findings_of(night([], [gate, gate]))
    assert detail not in two.sentence
    assert headline_of("incomplete", [two]) == "Incomplete: 2 gates of 42 failed"


def test_a_job_that_stopped_is_told_once_with_its_cell_and_before_the_numbers(tmp_path: Path) -> None:
    stopped = {"id": "30", "notebook": "30_decode", "status": "raised", "cell": 5, "error": "KeyError: 'verify'"}
    rows = [row("30", "decode", "every row", status="missing", reason="raised in cell 5: KeyError: 'verify'")]
    [found] = findings_of(night(rows, jobs=[stopped]))
    assert found.sentence == "30 did not finish (raised in cell 5): KeyError: 'verify'."
    told = "CheckpointError: tensor d2t is off\n  allowed: the ids that t2d marks\n  do: store offsets"
    jobs = [stopped | {"id": name, "error": told} for name in ("10", "31")]
    [both] = findings_of(night([], jobs=jobs))
    assert both.sentence == (
        "2 jobs did not finish (raised in cell 5, 10, 31): CheckpointError: tensor d2t is off; allowed: the ids that "
        "t2d marks."
    )
    assert both.remedy is not None
    assert both.remedy.text.startswith("Store offsets; then run the same command with the same `--out`")
    refused = row("31", "acceptance", "spec-3", {"acceptance_by_position": [0.0, 0.0]})
    for more, order in (([], "known found"), ([refused], "found known")):
        _, text = page_of(tmp_path / order, [row("31", "gate", "g", GATE), *more])
        places = {"known": text.index('<div class="known">'), "found": text.index('id="found"')}
        assert " ".join(sorted(places, key=lambda name: places[name])) == order


def test_where_text_repeats_the_tokens_lost_are_those_outside_it() -> None:
    values = {
        "acceptance_length": 3.05, "acceptance_length_outside_loops": 2.61, "looped_share": 0.68,
        "lost to outside the draft vocabulary": 0.5, "lost to rank 2 to 4": 0.45,
        "lost outside loops to outside the draft vocabulary": 0.4, "lost outside loops to rank 2 to 4": 0.99,
    }  # fmt: skip
    [found] = findings_of(night([row("31", "acceptance", "spec-3", values)]))
    assert found.sentence.startswith(
        "At spec-3 a step commits 3.05 of at most 4 tokens, and 2.61 outside repeated text; of the 1.39 lost there, "
        "0.99 go to tokens at rank 2 to 4"
    )
    older = {name: value for name, value in values.items() if not name.startswith("lost outside loops")}
    [found] = findings_of(night([row("31", "acceptance", "spec-3", older)]))
    assert "of the 0.95 lost, 0.50 go to tokens outside the draft vocabulary" in found.sentence


def test_the_headline_holds_two_warnings_and_the_page_has_the_others() -> None:
    refused = row("31", "acceptance", "spec-3", {"acceptance_by_position": [0.0, 0.0]})
    values = {"decode_tokens_per_s": 100.0, "decode_tokens_per_s_p10": 60.0, "decode_tokens_per_s_p90": 115.0}
    found = findings_of(night([refused, decoded(0.58, 0.55, 0.61), row("30", "decode", "baseline", values)]))
    assert len([finding for finding in found if finding.level == Level.WARNED]) == 3
    assert headline_of("passed", found) == (
        "Passed, but the target refuses its drafts, and the draft slows its target down"
    )


def test_rows_that_are_not_of_their_kinds_form_cost_their_own_sentence_and_say_why() -> None:
    odd = [row("10", "parity", "x", {"status": "fail"}), row("31", "acceptance", "spec-x", {"acceptance_length": 2.0})]
    found = findings_of(night([*odd, stage("draft.fc", "prefill", 0.5), decoded(1.6, 1.5, 1.7)]))
    told = [finding.sentence for finding in found]
    assert any("(parity, stages): KeyError: 'stage'" in sentence for sentence in told)
    assert any("(acceptance, losses): ValueError" in sentence for sentence in told)
    assert any(sentence.startswith("spec-3 decodes 1.60 times as fast") for sentence in told)


def test_a_section_is_headed_by_its_question_with_what_is_normal_and_words_beside_the_figures_they_are_of() -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        told = explanation_of(path.stem, path)
        assert told.question.endswith("?"), path.name
        assert "<strong>Normal:</strong>" in told.about, path.name
        assert "<strong>How to read it:</strong>" in told.about, path.name
    acceptance = explanation_of("31_acceptance", Path("absent"))
    shown: set[str] = set()
    assert acceptance.before("acceptance-length", shown) == ""
    assert "<h3>Why it is not more</h3>" in acceptance.before("draft-ranks", shown)
    assert acceptance.before("draft-ranks", shown) == "", "once on a page"
    assert explanation_of("90_nightly", Path("absent")).beside == (), "its text goes with a table"
    assert explanation_of("mine", Path("absent")).question == ""


def test_what_moved_since_the_night_before_is_told_with_the_largest_move() -> None:
    def change(word: str, ratio: float) -> dict[str, Any]:
        where = {"notebook": "30_decode", "row": "spec-3", "metric": "decode_tokens_per_s"}
        return {**where, "verdict": {"word": word, "ratio": ratio}}

    since = {"previous": "one", "changes": [change("slower", 0.8), change("slower", 0.9), change("same", 1.0)]}
    [slower] = findings_of(night([], since=since))
    assert slower.sentence == "Since one: 2 slower; most slower is 30_decode spec-3 decode_tokens_per_s, -20.0%."
    assert (slower.level, slower.section) == (Level.MOVED, "since")
    [calm] = findings_of(night([], since={"previous": "one", "changes": [change("same", 1.0)]}))
    assert calm.sentence == "Since one nothing certainly moved; numbers: 1 the same, 0 unsure."


def test_an_empty_night_finds_nothing_and_says_its_word() -> None:
    assert findings_of(night([])) == []
    assert headline_of("incomplete", []) == "Incomplete"
    assert headline_of("not judged", []) == "Finished, nothing was judged", "no gate was set: nothing has passed"


def test_the_doctors_first_cause_is_told_with_its_change_in_place_of_its_gate() -> None:
    def lamp(name: str, place: int, **values: Any) -> Row:
        return row("33_doctor", "draft_lamp", name, {"place": place, **values})

    red = {"colour": "red", "said": "the head accepts more", "change": 'set "rope_theta": 10000.0'}
    lamps = [
        lamp("tap_layers", 1, **{**red, "before": None, "after": None}),
        lamp("rope", 0, **red, before=2.44, after=2.86),
        lamp("norms", 2, colour="green", said="tried"),
    ]
    gate = {"job": lamps[0].job, "name": "no known cause of low acceptance", "word": "fail"}
    found = [one for one in findings_of(Night({"gates": [gate], "jobs": []}, lamps)) if one.level == Level.FAILED]
    assert [finding.kind for finding in found] == ["cause of low acceptance"] * 2
    assert found[0].sentence == "Of the draft head, rope: the head accepts more; mended, 2.44 becomes 2.86."
    assert found[0].remedy is not None
    assert found[0].remedy.text == 'Set "rope_theta": 10000.0.'
    assert headline_of("failed", found) == "Failed: acceptance is low for a known cause, rope"
