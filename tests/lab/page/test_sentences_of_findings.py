"""Each finding in a sentence that says what is wrong, with its cause, and whether it stands in the headline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nights_of_rows import GATE, decoded, night, page_of, row, stage

from lab.page.findings.finding import Level, Night
from lab.page.findings.remedies import remedy_of
from lab.page.findings.rules import findings_of, headline_of
from lab.rows.store import Row

pytestmark = pytest.mark.reference

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
