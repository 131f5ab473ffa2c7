"""Acceptance that vLLM and SGLang report is read whatever its form, and held against ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab import cli
from lab.acceptance.reported.command import parity
from lab.acceptance.reported.files import read_acceptance
from lab.acceptance.reported.forms import LENGTH, RATE, TWO
from lab.errors import ExperimentError
from lab.rows.store import Row, RowWriter, read_rows

pytestmark = pytest.mark.reference

VLLM = {
    "output_throughput": 812.5, "spec_decode_acceptance_rate": 60.0, "spec_decode_acceptance_length": 2.8,
    "spec_decode_num_drafts": 1000, "spec_decode_draft_tokens": 3000, "spec_decode_accepted_tokens": 1800,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.4],
}  # fmt: skip
COUNTERS = {
    "vllm:spec_decode_num_drafts_total": 1000, "vllm:spec_decode_num_draft_tokens_total": 3000,
    "vllm:spec_decode_num_accepted_tokens_total": 1800, "vllm:spec_decode_num_accepted_tokens_per_pos": [800, 600, 400],
}  # fmt: skip


def written(path: Path, *documents: Any) -> Path:
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return path


@pytest.mark.parametrize("document", [VLLM, COUNTERS], ids=["result", "counters"])
def test_both_forms_of_vllm_say_the_same(tmp_path: Path, document: dict[str, Any]) -> None:
    [one] = read_acceptance(written(tmp_path / "v.json", document))
    assert (one.system, one.n_steps) == ("vllm", 1000)
    assert one.values()[LENGTH] == pytest.approx(2.8)
    assert one.values()[RATE] == pytest.approx(0.6)
    assert one.values()[TWO] == pytest.approx(0.8)


@pytest.mark.parametrize(
    "document",
    [
        {"accept_length": 2.5, "output_throughput": 100.0},
        {"internal_states": [{"avg_spec_accept_length": 2.4}, {"avg_spec_accept_length": 2.6}]},
        {"text": "x", "meta_info": {"spec_accept_length": 2.5}},
    ],
)
def test_the_forms_of_sglang_give_its_length(tmp_path: Path, document: dict[str, Any]) -> None:
    [one] = read_acceptance(written(tmp_path / "s.jsonl", document))
    assert (one.system, one.length) == ("sglang", 2.5)
    assert one.values()[TWO] is None


def test_lines_of_several_runs_give_an_entry_each(tmp_path: Path) -> None:
    found = read_acceptance(written(tmp_path / "s.jsonl", {"accept_length": 2.0}, {"accept_length": 3.0}))
    assert [one.length for one in found] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ('{"output_throughput": 5}', "reports no acceptance"),
        ('{"accept_length": 0.4}', "0.4 tokens a step"),
        ('{"accept_length": null}', "reports no acceptance"),
    ],
)
def test_what_reports_none_is_refused_with_the_forms_that_do(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ExperimentError, match=words):
        read_acceptance(tmp_path / "x.json")
    with pytest.raises(ExperimentError, match="cannot be read"):
        read_acceptance(tmp_path / "absent.json")


def ours(length: float = 2.8, rate: float = 0.6, first: float = 0.8) -> Row:
    values = {"acceptance_length": length, "mean_acceptance_rate": rate, "acceptance_by_position": [first, 0.6, 0.4]}
    return Row(
        run="r", job="j", notebook="31_acceptance", kind="acceptance", name="spec-3", values=values, environment="m",
        recorded_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def test_parity_holds_within_the_tolerance_fails_beyond_it_and_is_missing_without_a_value() -> None:
    theirs = {LENGTH: 2.8, RATE: 0.6, TWO: None}
    words = {name: line.split()[0] for name, line in parity(theirs, ours(2.9, 0.5).values).items()}
    assert words == {LENGTH: "pass", RATE: "fail", TWO: "missing"}


@pytest.mark.parametrize("shares", [0.8, "0.8", [], {"1": 0.8}, None, [None]])
def test_shares_of_ours_that_are_no_list_of_numbers_are_missing(shares: Any) -> None:
    lines = parity({LENGTH: 2.8, RATE: 0.6, TWO: 0.8}, {**ours().values, "acceptance_by_position": shares})
    assert {name: line.split()[0] for name, line in lines.items()} == {LENGTH: "pass", RATE: "pass", TWO: "missing"}


def test_the_command_writes_rows_and_fails_where_acceptance_is_not_at_par(tmp_path: Path) -> None:
    source, out, known = written(tmp_path / "v.json", VLLM), tmp_path / "rows.jsonl", tmp_path / "ours.jsonl"
    for row, code in ((ours(), 0), (ours(length=2.2), 1)):
        known.unlink(missing_ok=True)
        with RowWriter(known) as writer:
            writer.write(row)
        assert cli.run(["import", str(source), "--out", str(out), "--against", str(known), "--row", "spec-3"]) == code
    assert [row.name for row in read_rows(out)] == ["v/vllm"] * 2
    with pytest.raises(ExperimentError, match="no row 'spec-9'"):
        cli.run(["import", str(source), "--against", str(known), "--row", "spec-9"])


@pytest.mark.parametrize(
    "text",
    [
        '{"accept_length": NaN}',
        '{"spec_decode_acceptance_length": 2.5, "spec_decode_per_position_acceptance_rates": [0.8, null]}',
        '{"spec_decode_acceptance_length": 2.5, "spec_decode_num_drafts": Infinity}',
    ],
)
def test_a_value_that_is_no_number_is_refused_with_the_files_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ExperimentError, match=r"run\.json"):
        read_acceptance(tmp_path / "run.json")
