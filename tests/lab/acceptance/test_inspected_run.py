"""A stored run is told request by request, as its engine counted it, with what other drafts would have given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_runs import add_rows, plan
from tiny_engines import Pair, engine_config, new_tokens, random_prompts, write_tiny_pair

from eagle3core import Engine, Response, SpeculativeConfig
from lab import cli
from lab.acceptance.paths import count_paths
from lab.acceptance.stored.inspected_run import lines_of
from lab.acceptance.stored.logged import Account, account_of_log, read_log
from lab.acceptance.stored.what_if import guesses, relative_cost
from lab.errors import ExperimentError, NotComparable
from lab.options.acceptance import InspectRunOptions, read_costs

pytestmark = pytest.mark.reference

TREE = {"choices": [[0], [1], [0, 0], [0, 1], [1, 0]]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


def logged(pair: Pair, folder: Path, **draft: Any) -> tuple[Path, list[Response]]:
    """A run folder with a log of four requests, and their responses."""
    path = folder / "jobs" / "j" / "acceptance.jsonl"
    path.parent.mkdir(parents=True)
    spec = SpeculativeConfig(model=str(pair[1]), **draft)
    config = engine_config(pair, None, speculative_config=spec, acceptance_log=path, collect_draft_ranks=True)
    return path, Engine.from_pretrained(pair[0], config).generate(random_prompts([5, 9, 3, 12]), new_tokens(20))


@pytest.fixture(scope="module")
def chain(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Response]]:
    return logged(pair, tmp_path_factory.mktemp("chain"), num_speculative_tokens=3)


@pytest.fixture(scope="module")
def tree(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Response]]:
    return logged(pair, tmp_path_factory.mktemp("tree"), **TREE)


def account_of(run: tuple[Path, list[Response]]) -> Account:
    return account_of_log("log", read_log(run[0]))


def line(request: int, accepted: int, cut: bool = False, rank: int | None = None, k: int = 3) -> dict[str, Any]:
    """A line of a chain of k whose first miss has that rank."""
    ranks = None if rank is None else [0] * accepted + [rank] * (accepted < k)
    return {
        "schema_version": 1, "request": request, "step": 0, "start": 1, "depth": k, "drafted": list(range(k)),
        "parents": None, "tree_ranks": None, "target": [*range(accepted), 9], "accepted": accepted,
        "accepted_ids": list(range(accepted)), "committed": accepted + 1 - cut, "cut": cut, "ranks": ranks,
        "acceptance": None,
    }  # fmt: skip


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_every_request_is_counted_as_the_engine_counts_it(
    chain: tuple[Path, list[Response]], tree: tuple[Path, list[Response]]
) -> None:
    for run in (chain, tree):
        for counts, response in zip(account_of(run).requests, run[1], strict=True):
            info = response.req_metrics.spec_info
            assert info is not None
            assert (counts.n_steps, counts.n_cut) == (info.n_complete, info.num_cut_steps)
            assert counts.histogram == info.accepted_histogram
            assert counts.length == info.mean_acceptance_length


def test_paths_of_a_logged_tree_are_those_of_its_records(tree: tuple[Path, list[Response]]) -> None:
    account = account_of(tree)
    counted = count_paths(step for response in tree[1] for step in response.req_metrics.steps)
    assert account.paths == counted
    assert account.n_nodes == 6
    [run, same, narrow, deeper] = guesses(account, ["best-6", "chain-2", "chain-3"], ())
    assert run.length == pytest.approx(same.length)
    assert narrow.length == pytest.approx(1 + counted.share((0,)) + counted.share((0, 0)))
    assert (narrow.n_unknown, deeper.n_unknown) == (0, 1)
    assert deeper.length == narrow.length


def test_a_hand_written_log_gives_hand_counted_numbers(tmp_path: Path) -> None:
    log = written(
        tmp_path / "log.jsonl", line(0, 3, rank=0), line(0, 1, rank=2), line(7, 0, rank=-1), line(7, 0, rank=1),
        line(7, 2, cut=True, rank=5),
    )  # fmt: skip
    account = account_of_log("log", read_log(log))
    assert [(each.name, each.n_steps, each.n_cut, each.length) for each in account.requests] == [
        ("0", 2, 0, 3.0), ("7", 2, 1, 1.0),
    ]  # fmt: skip
    assert account.all.histogram == (2, 1, 0, 1)
    assert account.losses == {"outside the draft vocabulary": 0.75, "rank 2 to 4": (2 + 3) / 4}
    known = {"chain-1": 1.5, "chain-2": 1.75, "chain-3": 2.0}
    assert {guess.name: guess.length for guess in guesses(account, list(known), ())[1:]} == known
    choices = tmp_path / "choices.json"
    choices.write_text('{"choices": [[0], [1], [0, 0], [0, 2], [1, 0]]}')
    [_, fixed] = guesses(account, [str(choices)], read_costs("1:100,4:106,8:130"))
    assert fixed.length == pytest.approx(1 + 0.5 + 0.25 + 0.25 + 0.25)
    assert fixed.n_unknown == 1, "nothing was drafted below the second-likeliest first token"
    assert fixed.cost == pytest.approx(1.18)
    assert fixed.speed_up == pytest.approx(fixed.length / 1.18)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_a_shorter_chain_never_gives_more_and_the_whole_one_gives_what_was_measured(accepted: list[int]) -> None:
    steps = [json.dumps(line(0, a)) + "\n" for a in accepted]
    from lab.acceptance.stored.logged import LoggedStep

    account = account_of_log("log", [LoggedStep.model_validate_json(step) for step in steps])
    lengths = [guess.length for guess in guesses(account, ["chain-1", "chain-2", "chain-3"], ())]
    assert lengths[0] == pytest.approx(lengths[3])
    assert 1 <= lengths[1] <= lengths[2] <= lengths[3] + 1e-12
    assert account.losses == {}


def test_the_page_of_a_log_has_a_line_a_request_and_says_the_rest(
    chain: tuple[Path, list[Response]], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = chain[0].parents[2]
    arguments = ["inspect", "run", str(run_dir), "--requests", "2", "--what-if", "chain-1", "mc_sim_7b_63"]
    assert cli.main([*arguments, "--costs", "1:100,64:200"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("jobs/j/acceptance.jsonl: 4 requests, ")
    assert [row.split()[0] for row in text.splitlines()[2:6]] == ["request", *order_of(chain[1])[:2], "all"]
    assert "(2 more with higher lengths: --requests 4)" in text
    assert "drafts of a path are lost a step, by the first miss: " in text
    assert "of its nodes were never drafted here" in text
    assert "An estimate: each node adds" in text
    assert "Costs and speed-ups are over a plain step." in text


def order_of(responses: list[Response]) -> list[str]:
    """Requests by acceptance length, the lowest first."""
    infos = [response.req_metrics.spec_info for response in responses]
    lengths = {str(i): info.mean_acceptance_length or 9.0 for i, info in enumerate(infos) if info is not None}
    return sorted(lengths, key=lambda name: lengths[name])


def test_without_a_log_rows_say_what_they_know(tmp_path: Path) -> None:
    run_dir = plan(tmp_path / "night")
    values = {"accepted_histogram": [1, 1, 0, 2], "num_cut_steps": 1, "lost to rank 2 to 4": 1.25}
    add_rows(
        run_dir,
        {"kind": "acceptance", "name": "spec-3", "values": values},
        {"kind": "tree_acceptance", "name": "dynamic", "values": {"accepted_histogram": [2, 2], "n_nodes": 5}},
        {"kind": "acceptance", "name": "empty", "values": {"accepted_histogram": [0, 0]}},
    )
    lines = lines_of(InspectRunOptions(run_dir=run_dir, what_if=("chain-1",)))
    assert lines[0].startswith("night: sums over all requests; each request's own need a log: eagle3lab run")
    assert lines[3].split() == ["spec-3", "4", "1", "2.75", "12", "7", "4", "1", "1", "0", "2"]
    assert lines[4].split() == ["dynamic", "4", "0", "1.50", "16", "2", "4", "2", "2", "0", "0"]
    assert any("rank 2 to 4 1.25" in each for each in lines)
    assert any(each.split()[:3] == ["chain-1", "2", "1.75"] for each in lines)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("{empty}",), "holds neither a log nor a row of acceptance"),
        (("{empty}/none",), "which does not exist holds neither"),
        (("{log}", "--what-if", "dynamic-60/7/10"), "--what-if 'dynamic-60/7/10'"),
        (("{log}", "--what-if", "chain-2", "--costs", "1:100,2:110"), "--costs end at 2 nodes"),
        (("{log}", "--what-if", "chain-2", "--costs", "2:100"), "--costs"),
        (("{log}", "--costs", "1:100"), "--costs without --what-if"),
    ],
)
def test_what_cannot_be_told_is_refused_in_three_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], what: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"empty": tmp_path / "empty", "log": written(tmp_path / "log.jsonl", line(0, 1))}
    assert cli.main(["inspect", "run", *(each.format(**places) for each in arguments)]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert "\n  allowed: " in said
    assert "\n  do: " in said


def test_damaged_logs_are_refused_with_their_line_and_a_line_being_written_is_left_out(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", line(0, 1))
    log.write_text(log.read_text() + '{"schema_v')
    assert len(read_log(log)) == 1
    for text, error in (("x\n", "is no JSON"), ("{}\n", "is no step"), ("[]\n", "is no step")):
        log.write_text(json.dumps(line(0, 1)) + "\n" + text)
        with pytest.raises(ExperimentError, match=f"line 2 of log.jsonl {error}"):
            read_log(log)
    with pytest.raises(NotComparable):
        read_log(written(log, {**line(0, 1), "schema_version": 2}))
    with pytest.raises(ExperimentError, match="no complete step"):
        account_of_log("log", read_log(written(log, line(0, 1, cut=True))))


def test_costs_lie_on_the_lines_between_those_given() -> None:
    costs = read_costs("1:100, 3:104, 64:200")
    assert [relative_cost(costs, n) for n in (1, 2, 3, 64)] == pytest.approx([1.0, 1.02, 1.04, 2.0])
    assert relative_cost((), 7) is None
