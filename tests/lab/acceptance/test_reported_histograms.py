"""Histograms that vLLM, SGLang and TensorRT-LLM report: read in every form, and compared position by position."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lab import cli
from lab.acceptance.reported.files import read_acceptance
from lab.acceptance.reported.forms import Acceptance
from lab.acceptance.reported.positions import differences, sentence
from lab.errors import ExperimentError
from lab.rows.store import Row, RowWriter, read_rows

pytestmark = pytest.mark.reference

HISTOGRAM = (200, 200, 200, 400)  # 1000 steps, 1800 accepted drafts
SCRAPED = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m/x"} 600.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m/x"} 400.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m/x"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m/x"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m/x"} 1800.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m/x",position="0"} 500.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m/x",position="0"} 300.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m/x",position="1"} 600.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m/x",position="2"} 400.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m/x",position="0"} 1.7e+09
"""
METRICS = [
    {"name": "vllm:spec_decode_num_drafts", "value": 1000, "labels": {}},
    {"name": "vllm:spec_decode_num_draft_tokens", "value": 3000},
    {"name": "vllm:spec_decode_num_accepted_tokens", "value": 1800},
    {"name": "vllm:spec_decode_num_accepted_tokens_per_pos", "values": [800, 600, 400]},
]
RESULT = {
    "spec_decode_acceptance_rate": 60.0, "spec_decode_acceptance_length": 2.8, "spec_decode_num_drafts": 1000,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.4],
}  # fmt: skip


def response(histogram: list[int], accepted: int | None = None, name: str = "spec_accept_histogram") -> dict[str, Any]:
    """SGLang's answer to a request."""
    meta = {"spec_verify_ct": sum(histogram), name: histogram, "spec_draft_token_num": 3 * sum(histogram)}
    return {"text": "x", "meta_info": meta if accepted is None else {**meta, "spec_accept_token_num": accepted}}


def iteration(accepted: int, requests: int = 1, rank: int = 0) -> dict[str, Any]:
    """TensorRT-LLM's statistics of an iteration of spec-3."""
    spec = {
        "numDraftTokens": 3 * requests, "numAcceptedTokens": accepted, "numRequestsWithDraftTokens": requests,
        "acceptanceLength": 1 + accepted / requests,
    }  # fmt: skip
    return {"iter": 1, "attentionDpRank": rank, "specDecodingStats": spec}


def read(path: Path, *documents: Any) -> Acceptance:
    path.write_text("\n".join(json.dumps(document) for document in documents))
    [one] = read_acceptance(path)
    return one


FORMS: dict[str, list[Any]] = {
    "vllm metrics": [METRICS],
    "vllm result": [RESULT],
    "sglang requests": [response([150, 100, 50, 200]), response([50, 100, 150, 200])],
    "sglang list": [[response([200, 200, 200, 400], 1800, "spec_correct_drafts_histogram")]],
    "sglang with the bonus counted": [response([0, 200, 200, 200, 400], 1800)],
    "sglang chat": [{"choices": [response([200, 200, 200, 400])]}],
    "sglang lengths": [{"meta_info": {"accept_lens": [1] * 200 + [2] * 200 + [3] * 200 + [4] * 400}}],
    "tensorrt-llm": [iteration(a) for a, n in enumerate(HISTOGRAM) for _ in range(n)]
    + [iteration(3, rank=1), {"iter": 0, "specDecodingStats": {"numDraftTokens": 0}}],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_histogram_and_what_follows_from_it(tmp_path: Path, form: str) -> None:
    one = read(tmp_path / "x.jsonl", *FORMS[form])
    assert one.system == form.split()[0]
    assert (one.histogram, one.n_steps) == (HISTOGRAM, 1000)
    values = one.values()
    assert values["acceptance_length"] == pytest.approx(2.8)
    assert values["mean_accepted_draft_tokens"] == pytest.approx(1.8)
    assert values["acceptance_by_position"] == pytest.approx([0.8, 0.6, 0.4])
    assert values["acceptance_given_prefix"] == pytest.approx([0.8, 0.75, 2 / 3])
    assert values["mean_acceptance_rate"] in (None, pytest.approx(0.6))


def test_the_text_of_vllms_metrics_is_added_up_over_engines(tmp_path: Path) -> None:
    (tmp_path / "metrics.txt").write_text(SCRAPED)
    [one] = read_acceptance(tmp_path / "metrics.txt")
    assert (one.histogram, one.n_steps, one.rate) == (HISTOGRAM, 1000, pytest.approx(0.6))
    (tmp_path / "two.txt").write_text(SCRAPED.replace("m/x", "m/y", 1))
    with pytest.raises(ExperimentError, match="metrics of m/x, m/y"):
        read_acceptance(tmp_path / "two.txt")
    (tmp_path / "s.txt").write_text('sglang:spec_accept_length{model_name="m"} 2.5\nsglang:spec_accept_rate 0.5\n')
    [one] = read_acceptance(tmp_path / "s.txt")
    assert (one.system, one.length, one.rate) == ("sglang", 2.5, 0.5)


def test_sums_over_several_requests_give_a_mean_and_no_histogram(tmp_path: Path) -> None:
    one = read(tmp_path / "t.jsonl", iteration(5, 2), iteration(1))
    assert (one.length, one.n_steps, one.histogram, one.rate) == (3.0, 3, (), pytest.approx(6 / 9))


def test_means_of_tensorrt_llm_are_weighted_by_iterations(tmp_path: Path) -> None:
    average = {"acceptance_length_percentiles": {"average": 2.8}, "draft_acceptance_rate_percentiles": {"average": 0.6}}
    one = read(tmp_path / "b.json", {"decoding_stats": average})
    assert (one.system, one.length, one.rate) == ("tensorrt-llm", 2.8, 0.6)
    answers = [
        {"choices": [{"avg_decoded_tokens_per_iter": mean}], "usage": {"completion_tokens": n}}
        for mean, n in ((2.0, 20), (3.0, 90))
    ]
    assert read(tmp_path / "r.jsonl", *answers).length == pytest.approx(110 / 40)


@pytest.mark.parametrize(
    "document",
    [
        response([200, 200], 7),
        response([-5, 200]),
        {"meta_info": {"accept_lens": [0, 2]}},
        {**iteration(1), "specDecodingStats": {"numDraftTokens": 3}},
        {"spec_decode_num_drafts": 10, "spec_decode_num_accepted_tokens": 5,
         "spec_decode_num_accepted_tokens_per_pos": [3, 1]},
        iteration(9),
    ],
    ids=["contradicts", "negative", "length 0", "no counts", "other sum", "more than drafted"],
)  # fmt: skip
def test_counts_that_cannot_be_are_refused_with_the_files_name(tmp_path: Path, document: Any) -> None:
    with pytest.raises(ExperimentError, match=r"x\.json"):
        read(tmp_path / "x.json", document)


def test_a_position_that_differs_is_named_and_chance_is_not() -> None:
    ours = [2000, 2000, 2000, 4000]
    assert sentence(differences(HISTOGRAM, ours)) == "None of 3 positions differs beyond chance."
    theirs = [200, 320, 160, 320]  # position 2: 480 of 800 in place of 600
    found = differences(theirs, ours)
    assert [one.differs for one in found] == [False, True, False]
    assert sentence(found) == "Position 2 is the first that differs: theirs is accepted less often than ours."
    assert found[1].line().startswith("differs position 2: theirs 0.6000 of 800 that reached it, ours 0.7500 of 8000")
    assert "none was compared" in sentence(differences([5], ours))


def drawn(random: random.Random, shares: tuple[float, ...], n: int) -> list[int]:
    """The histogram of `n` steps whose positions are accepted with these shares."""
    counts = [0] * (len(shares) + 1)
    for _ in range(n):
        counts[next((i for i, share in enumerate(shares) if random.random() > share), len(shares))] += 1
    return counts


def test_equal_systems_are_called_different_as_seldom_as_stated() -> None:
    source = random.Random(1)
    shares, n_runs = (0.8, 0.7, 0.6), 400
    pairs = [(drawn(source, shares, 150), drawn(source, shares, 120)) for _ in range(n_runs)]
    wrong = sum(any(one.differs for one in differences(*pair)) for pair in pairs)
    assert wrong <= 36, wrong  # 5% are 20, with a standard deviation of 4.4


def test_the_command_names_the_first_position_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, known, out = tmp_path / "s.jsonl", tmp_path / "ours.jsonl", tmp_path / "rows.jsonl"
    read(source, response([200, 320, 160, 320]))
    values = {"acceptance_length": 2.8, "accepted_histogram": [2000, 2000, 2000, 4000], "mean_acceptance_rate": 0.6,
              "acceptance_by_position": [0.8, 0.6, 0.4]}  # fmt: skip
    with RowWriter(known) as writer:
        writer.write(Row(run="r", job="j", notebook="n", kind="acceptance", name="spec-3", values=values,
                         environment="m", recorded_at="2026-01-01T00:00:00+00:00"))  # fmt: skip
    assert cli.run(["import", str(source), "--against", str(known), "--out", str(out)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert "Position 2 is the first that differs: theirs is accepted less often than ours." in lines
    assert json.loads(last)["first_positions"] == [2]
    assert read_rows(out)[0].values["accepted_histogram"] == [200, 320, 160, 320]
