"""The log of acceptance: a line for every step and request, which says what the records and the text say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import Pair, engine_config, new_tokens, random_prompts, tiny_engine, tokens_of, write_tiny_pair

from eagle3core import ConfigError, Engine, EngineConfig, Response, SpeculativeConfig
from eagle3core.performance.mode import debug_settings

pytestmark = pytest.mark.reference

LENGTHS = [5, 9, 3, 12]
N_NEW = 14
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "tree": {"choices": [[0], [1], [0, 0], [0, 1], [1, 0]]},
    "dynamic tree": {"use_dynamic_tree": True, "num_speculative_tokens": 2, "dynamic_tree_max_top_k": 3,
                     "max_decoding_tokens": 7},
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


def logged(pair: Pair, path: Path, way: str, **changes: Any) -> tuple[list[dict[str, Any]], list[Response]]:
    """The lines of a short run, and its responses; the first request has id 0."""
    spec = SpeculativeConfig(model=str(pair[1]), **WAYS[way])
    config = engine_config(pair, None, speculative_config=spec, acceptance_log=path, **changes)
    responses = Engine.from_pretrained(pair[0], config).generate(random_prompts(LENGTHS), new_tokens(N_NEW))
    return [json.loads(line) for line in path.read_text().splitlines()], responses


@pytest.mark.parametrize("way", WAYS)
def test_each_step_of_each_request_has_its_line(pair: Pair, tmp_path: Path, way: str) -> None:
    lines, responses = logged(pair, tmp_path / "log.jsonl", way, collect_draft_ranks=way == "chain")
    for number, response in enumerate(responses):
        mine = [line for line in lines if line["request"] == number]
        assert len(mine) == len(response.req_metrics.steps)
        for line, step in zip(mine, response.req_metrics.steps, strict=True):
            assert (line["start"], line["accepted"], line["cut"]) == (step.start, step.n_accepted, step.cut)
            committed = line["target"][: line["committed"]]
            assert committed == response.token_ids[step.start : step.start + step.n_committed]
            assert line["accepted_ids"] == line["target"][: line["accepted"]]
            assert line["acceptance"] is None
            if way == "chain":
                assert line["parents"] is None
                assert line["drafted"][: line["accepted"]] == line["accepted_ids"]
                assert (line["depth"], tuple(line["ranks"])) == (3, step.ranks)
            else:
                assert_a_path_was_accepted(line)
    assert {line["accepted"] for line in lines} >= {0, 1}


def assert_a_path_was_accepted(line: dict[str, Any]) -> None:
    """The accepted tokens lie one below the other in the tree, from the root on."""
    at = 0
    for token in line["accepted_ids"]:
        children = [node for node, parent in enumerate(line["parents"]) if parent == at]
        [at] = [node for node in children if line["drafted"][node - 1] == token]
    assert len(line["parents"]) == len(line["drafted"]) + 1 == len(line["tree_ranks"])


def test_a_log_changes_no_token_and_is_appended_to(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first, responses = logged(pair, path, "chain")
    again, _ = logged(pair, path, "chain")
    assert again == first + first
    assert tokens_of(responses) == tokens_of(tiny_engine(pair, 3).generate(random_prompts(LENGTHS), new_tokens(N_NEW)))


def test_steps_of_chosen_depths_say_their_own(pair: Pair, tmp_path: Path) -> None:
    lines, responses = logged(pair, tmp_path / "log.jsonl", "chain", max_tokens_per_step=6)
    assert {line["depth"] for line in lines} >= {1, 3}
    assert sum(len(line["drafted"]) for line in lines) == sum(
        step.n_draft for response in responses for step in response.req_metrics.steps
    )


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        logged(pair, tmp_path / "no folder" / "log.jsonl", "chain")
    assert caught.value.remedy == "name another file, or leave acceptance_log out"


def test_a_disk_that_refuses_a_line_ends_the_log_and_not_the_run(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    spec = SpeculativeConfig(model=str(pair[1]), num_speculative_tokens=3)
    config = engine_config(pair, None, speculative_config=spec, acceptance_log=full)
    [response] = Engine.from_pretrained(pair[0], config).generate(random_prompts([5]), new_tokens(N_NEW))
    assert len(response.token_ids) == N_NEW
    assert [line for line in caplog.messages if "the log ends at step 0" in line]


def test_performance_mode_counts_a_log_among_what_slows_a_step(tmp_path: Path) -> None:
    config = EngineConfig(speculative_config=SpeculativeConfig(model="draft"), acceptance_log=tmp_path / "log.jsonl")
    assert debug_settings(config) == ["acceptance_log"]
