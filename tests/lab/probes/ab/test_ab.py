"""Two sides in turns: the words, rows that are held back, lost or timed another way, and commits side by side."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab import cli
from lab.errors import ExperimentError, RunFailed
from lab.probes.ab.judging import judge, tagged, verdict_rows
from lab.probes.ab.slowdown import unexpected
from lab.probes.ab.turns import HERE, Side, read_side, take_turns
from lab.rows.history import Change
from lab.rows.store import Row, RowWriter
from lab.rows.verdict import FALSE_ALARM, MIN_ROUNDS, compare_rounds, interval_depth

pytestmark = pytest.mark.reference


def main(options: list[str]) -> int:
    return cli.run(["ab", *options])


OWN = "target.mlp/gemm_swiglu"
PARTS = {  # microseconds of a step like the 8B pair's on an H200
    "kernel": {OWN: 1640.0, "target.mlp/gemm_residual": 830.0, "target.attn/gemm_qkv": 350.0, "tree/open_step": 4.0},
    "stage": {"target.mlp": 2470.0, "target.attn": 700.0, "target.head": 230.0, "tree": 9.0, "between steps": 6.0},
    "step": {"timed": 3550.0, "profiled": 3570.0},
}
ADDED = 0.05 * PARTS["kernel"][OWN]


def round_rows(side: str, number: int, source: random.Random, planted: float = ADDED) -> list[Row]:
    """One side's round: noise of 0.3%, a drift over the rounds that both sides share, and side B's slowdown."""
    rows = []
    for kind, parts in PARTS.items():
        for part, time_us in parts.items():
            holds_it = kind == "step" or part in (OWN, "target.mlp")
            added = planted if side == "B" and holds_it else 0.0
            value = (time_us + added) * (1 + 0.002 * number) * source.gauss(1, 0.003)
            rows.append(
                Row(
                    run="ab", job="ab", notebook="ab", kind=kind, name=f"Baseline/{part}", timer="cupti",
                    values={"own_us": value}, environment="m", recorded_at="2026-01-01T00:00:00+00:00",
                )
            )  # fmt: skip
    return tagged(rows, side, number)


def rounds(n: int = 13, seed: int = 0, **options: Any) -> list[Row]:
    source = random.Random(seed)
    return [row for i in range(1, n + 1) for side in "AB" for row in round_rows(side, i, source, **options)]


def words(rows: list[Row]) -> dict[str, str]:
    return {f"{one.kind} {one.row.partition('/')[2]}": one.verdict.word for one in judge(rows)}


def altered(rows: list[Row], part: str, side: str, **changes: Any) -> list[Row]:
    def is_it(row: Row) -> bool:
        return row.name.endswith(f"/{part}") and row.parameters["side"] == side

    return [row.model_copy(update=changes) if is_it(row) else row for row in rows]


# ---- Statistics.


def test_the_interval_of_order_statistics_misses_seldom_enough_and_is_no_wider_than_it_has_to_be() -> None:
    assert [interval_depth(n) for n in (8, 11, 12, 13, 15, 20)] == [1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("tails", [False, True])
def test_unchanged_sides_are_called_apart_at_most_once_in_a_hundred(tails: bool) -> None:
    source, n = random.Random(5), 600

    def times() -> list[float]:
        noise = [source.gauss(0, 0.05) / (source.uniform(0.2, 1) if tails else 1) for _ in range(13)]
        return [100 * (1 + abs(one) if tails else 1 + one) for one in noise]

    false = sum(compare_rounds(times(), times(), "lower").word in ("slower", "faster") for _ in range(n))
    assert false <= 2.5 * FALSE_ALARM * n  # three standard deviations above the rate


def test_too_few_rounds_say_nothing_certain() -> None:
    few = compare_rounds([1.0] * (MIN_ROUNDS - 1), [2.0] * (MIN_ROUNDS - 1), "lower")
    assert few.word == "unsure"
    assert compare_rounds([1.0] * MIN_ROUNDS, [2.0] * MIN_ROUNDS, "lower").word == "slower"
    assert compare_rounds([1.0] * MIN_ROUNDS, [2.0] * MIN_ROUNDS, "higher").word == "faster"


def test_a_certain_move_within_the_timers_resolution_is_unsure_and_one_beyond_it_is_not() -> None:
    before, ticks = [2.25] * 13, 1 / 16
    within = compare_rounds(before, [2.25 + ticks] * 13, "lower", resolution=ticks)
    assert (within.word, "within the timer's resolution of 0.0625" in within.reason) == ("unsure", True)
    assert compare_rounds(before, [2.25 + 2 * ticks] * 13, "lower", resolution=ticks).word == "slower"
    assert compare_rounds(before, [2.25 + ticks] * 13, "lower").word == "slower"


def test_a_row_of_few_ticks_is_judged_by_the_resolution_it_names() -> None:
    name = "kernel tree/open_step"
    slower = [
        row.model_copy(update={"values": {"own_us": 4.0 if row.parameters["side"] == "A" else 4.05}})
        for row in rounds() if row.name.endswith("tree/open_step")
    ]  # fmt: skip
    known = [row.model_copy(update={"parameters": {**row.parameters, "resolution": 1 / 16}}) for row in slower]
    assert (words(slower)[name], words(known)[name]) == ("slower", "unsure")


# ---- The planted slowdown.


@pytest.mark.parametrize("seed", range(8))
def test_five_per_cent_in_one_kernel_are_found_in_its_row_in_what_holds_it_and_nowhere_else(seed: int) -> None:
    changes = judge(rounds(seed=seed))
    assert unexpected(changes, OWN) == []
    own = next(one for one in changes if one.row.endswith(OWN))
    assert own.verdict.ratio == pytest.approx(1.05, abs=0.005)


def test_without_a_slowdown_its_row_is_the_same_and_that_is_told() -> None:
    changes = judge(rounds(planted=0.0))
    assert {one.verdict.word for one in changes} <= {"same", "unsure"}
    assert any(OWN in fault and "is same" in fault for fault in unexpected(changes, OWN))
    assert unexpected(changes, "target.mlp/none")[-1] == "no row of target.mlp/none"


def test_a_row_of_another_kernel_that_is_slower_is_told() -> None:
    rows = [
        row.model_copy(update={"values": {"own_us": row.values["own_us"] * 1.2}})  # type: ignore[operator]
        if row.name.endswith("gemm_qkv") and row.parameters["side"] == "B" else row
        for row in rounds()
    ]  # fmt: skip
    assert unexpected(judge(rows), OWN) == ["kernel Baseline/target.attn/gemm_qkv own_us is slower"]


# ---- Altered cells.


def test_a_cell_whose_clocks_were_held_back_is_unsure_and_says_so() -> None:
    rows = rounds()
    held = altered(rows, OWN, "B", values={"own_us": 1900.0, "throttled": "sw thermal slowdown"})
    assert words(held)[f"kernel {OWN}"] == "unsure"
    assert "sw thermal slowdown" in next(one for one in judge(held) if one.row.endswith(OWN)).verdict.reason
    others = {name: word for name, word in words(rows).items() if OWN not in name}
    assert others.items() <= words(held).items()


def test_a_cell_that_one_side_lost_is_missing_with_its_reason() -> None:
    removed = [row for row in rounds() if not (row.name.endswith(OWN) and row.parameters["side"] == "B")]
    assert words(removed)[f"kernel {OWN}"] == "missing"
    lost = altered(rounds(), OWN, "B", status="missing", reason="the device was lost", values={})
    [own] = [one for one in judge(lost) if one.row.endswith(OWN)]
    assert (own.verdict.word, own.verdict.reason) == ("missing", "the device was lost")
    both = altered(lost, OWN, "A", status="missing", reason="the device was lost", values={})
    assert words(both)[f"kernel {OWN}"] == "missing"


def test_a_cell_timed_another_way_is_two_series() -> None:
    [own] = [one for one in judge(altered(rounds(), OWN, "B", timer="cupti/2")) if one.row.endswith(OWN)]
    assert own.verdict.word == "unsure"
    assert "two series" in own.verdict.reason


def test_stored_rows_are_judged_again_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rounds()
    with RowWriter(tmp_path / "ab.jsonl") as writer:
        for row in [*rows, *verdict_rows(judge(rows), rows[0])]:
            writer.write(row)
    assert main(["--judge", str(tmp_path / "ab.jsonl"), "--plant", OWN]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["unexpected"] == []
    assert main(["--judge", str(tmp_path / "ab.jsonl")]) == 1, "something is slower"
    with RowWriter(tmp_path / "one.jsonl") as writer:
        for row in rounds():
            if row.parameters["side"] == "A":
                writer.write(row)
    assert main(["--judge", str(tmp_path / "one.jsonl")]) == 3, "one side is lost, so nothing was compared"


# ---- Commits and settings.

SIDE = """\
import json, os, sys
out = sys.argv[sys.argv.index("--out") + 1]
speed = {speed} * float(os.environ.get("EAGLE3_FACTOR", 1))
row = dict(schema_version=1, run="r", job="bench", notebook="bench", kind="bench", name="point", environment="m",
           values=dict(decode_tokens_per_s=speed, argv=" ".join(sys.argv[1:-4])), timer="t",
           recorded_at="2026-01-01T00:00:00+00:00")
open(out, "a").write(json.dumps(row) + "\\n")
"""


def git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(["git", "-C", str(root), *who, *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of two commits, the second one half as fast."""
    root = tmp_path_factory.mktemp("project")
    git(root, "init", "-q")
    for speed in (100.0, 50.0):
        (root / "lab").mkdir(exist_ok=True)
        (root / "lab" / "__init__.py").touch()  # or an installed lab would be found before it
        (root / "lab" / "__main__.py").write_text(SIDE.format(speed=speed))
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", str(speed))
    return root


def test_two_commits_run_in_turns_each_in_a_tree_of_its_own(project: Path) -> None:
    told: list[str] = []
    rows = list(take_turns(project, (Side("HEAD~1"), Side("HEAD")), ["bench"], 3, told.append))
    assert [row.parameters["side"] for row in rows] == ["A", "B"] * 3
    assert [row.values["decode_tokens_per_s"] for row in rows] == [100.0, 50.0] * 3
    assert len(git(project, "worktree", "list").splitlines()) == 1, "nothing is left behind"


def test_settings_are_variables_in_capitals_or_options_of_one_side(project: Path) -> None:
    sides = read_side(HERE, []), read_side(HERE, ["EAGLE3_FACTOR=0.5", "spec=0,3"])
    rows = list(take_turns(project, sides, ["bench"], 1, lambda line: None))
    assert [row.values["decode_tokens_per_s"] for row in rows] == [50.0, 25.0]
    assert [row.values["argv"] for row in rows] == ["bench", "bench --spec 0,3"]


def test_what_cannot_run_is_refused_in_three_parts(project: Path) -> None:
    with pytest.raises(ExperimentError, match="no-such-commit"):
        list(take_turns(project, (Side("no-such-commit"), Side(HERE)), ["bench"], 1, lambda line: None))
    with pytest.raises(ExperimentError, match="setting 'x'"):
        read_side(HERE, ["x"])
    with pytest.raises(RunFailed, match="ended with 1"):
        list(take_turns(project, (Side(HERE, (("EAGLE3_FACTOR", "x"),)), Side(HERE)), ["bench"], 1, lambda line: None))
    with pytest.raises(ExperimentError, match="--rounds 3"):
        main([".", ".", "--rounds", "3"])


def test_a_verdict_is_a_row_that_names_what_it_is_about() -> None:
    rows = rounds()
    changes: list[Change] = judge(rows)
    made = verdict_rows(changes, rows[0])
    assert {row.kind for row in made} == {"ab"}
    assert next(row for row in made if OWN in row.name).values["word"] == "slower"
