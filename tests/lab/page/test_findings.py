"""What a night found: the worst first, from rows alone, and a cause and a remedy for whatever can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nights_of_rows import GATE, decoded, night, page_of, row, stage
from places import NIGHT_8B, ROOT

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
from lab.rows.store import read_run

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


def test_an_empty_night_finds_nothing_and_says_its_word() -> None:
    assert findings_of(night([])) == []
    assert headline_of("incomplete", []) == "Incomplete"
    assert headline_of("not judged", []) == "Finished, nothing was judged", "no gate was set: nothing has passed"
