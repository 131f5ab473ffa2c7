"""Rows survive torn lines, full disks and newer versions."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from pydantic import ValidationError

from lab.errors import NotComparable, RunFailed
from lab.rows import appending
from lab.rows.store import SCHEMA, Damaged, Row, RowWriter, block, nested, read_lines, read_rows, read_run, utc_now

pytestmark = pytest.mark.reference


def row(name: str = "draft.fc", **changes: object) -> Row:
    facts: dict[str, object] = {
        "run": "r",
        "job": "j",
        "notebook": "n",
        "kind": "parity",
        "name": name,
        "environment": "abc",
        "recorded_at": utc_now(),
    }
    return Row.model_validate(facts | changes)


plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.text(max_size=20)
)


@given(values=st.dictionaries(st.text(min_size=1, max_size=10), st.one_of(plain, st.lists(plain, max_size=4))))
@settings(max_examples=100, deadline=None)
def test_a_row_comes_back_from_its_line_as_it_was(values: dict[str, object]) -> None:
    written = row(values={key: value for key, value in values.items() if value not in ("NaN", "Infinity", "-Infinity")})
    assert Row.model_validate_json(written.line()) == written


def test_a_value_that_is_not_finite_stays_a_number_and_the_line_stays_strict_json() -> None:
    written = row(values={"worst": math.inf, "error": math.nan, "list": [math.nan, 1.0]})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(written.line(), parse_constant=refuse)
    back = Row.model_validate_json(written.line())
    assert back.values["worst"] == math.inf
    assert math.isnan(back.values["error"])  # type: ignore[arg-type]
    assert math.isnan(back.values["list"][0])  # type: ignore[index]


def test_an_unknown_key_and_a_missing_row_without_a_reason_are_refused() -> None:
    with pytest.raises(ValidationError, match="surprise"):
        row(surprise=1)
    with pytest.raises(ValidationError, match="needs a reason"):
        row(status="missing")


def test_rows_are_appended_and_read_in_order(tmp_path: Path) -> None:
    for part in (("a", "b"), ("c",)):
        with RowWriter(tmp_path / "rows.jsonl") as writer:
            for name in part:
                writer.write(row(name))
    assert [found.name for found in read_rows(tmp_path / "rows.jsonl")] == ["a", "b", "c"]


def test_an_absent_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "rows.jsonl") == []


def test_a_torn_last_line_becomes_a_warning_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row("a").line() + row("b").line()[:40])
    found = read_rows(path)
    assert [(one.kind, one.name) for one in found] == [("parity", "a"), ("warning", "store.torn_line")]
    assert "line 2 of rows.jsonl" in str(found[1].reason)


def test_opening_a_torn_file_cuts_the_tail_so_that_the_next_row_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row("a").line() + row("b").line()[:40])
    with RowWriter(path) as writer:
        writer.write(row("c"))
    assert [one.name for one in read_rows(path)] == ["a", "c"]


def test_opening_a_torn_file_may_keep_the_tail_as_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row("a").line() + row("b").line()[:40])
    before = path.read_bytes()
    with RowWriter(path, keeps_torn=True) as writer:
        writer.write(row("c"))
    assert path.read_bytes().startswith(before)
    found = [line for _, line in read_lines(path)]
    assert [isinstance(line, Damaged) for line in found] == [False, True, False]


@pytest.mark.parametrize("keeps_torn", [False, True])
def test_a_last_row_that_only_lacks_its_end_is_whole_and_stays(tmp_path: Path, keeps_torn: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row("a").line() + row("b").line().rstrip())
    assert [one.name for one in read_rows(path)] == ["a", "b"]
    with RowWriter(path, keeps_torn=keeps_torn) as writer:
        assert writer.n_rows == 2
        writer.write(row("c"))
    assert [one.name for one in read_rows(path)] == ["a", "b", "c"]


def test_a_row_of_schema_1_is_read_as_one_of_today(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    old = json.loads(row("a", timer="cuda graph replay").line()) | {"schema_version": 1}
    path.write_text(json.dumps(old) + "\n" + json.dumps(old | {"timer": "perf_counter"}) + "\n")
    assert [(one.schema_version, one.timer) for one in read_rows(path)] == [
        (SCHEMA, "cuda_graph/1"),
        (SCHEMA, "perf_counter"),
    ]


def test_blocks_of_values_are_dictionaries_when_they_are_nested() -> None:
    flat = {"time_us": 1.0, **block("peers", {"F.linear": 2.0}), **block("shape", {"m": 3})}
    assert flat == {"time_us": 1.0, "peers.F.linear": 2.0, "shape.m": 3}
    assert nested(flat) == {"time_us": 1.0, "peers": {"F.linear": 2.0}, "shape": {"m": 3}}


def test_a_file_has_one_writer_at_a_time_and_loses_no_row_to_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "PATIENCE_S", 0.0)
    path = tmp_path / "rows.jsonl"
    with RowWriter(path) as first:
        first.write(row("a"))
        with pytest.raises(RunFailed) as caught:
            RowWriter(path)
        first.write(row("b"))
    assert caught.value.what.startswith("rows.jsonl is being written by another process")
    dropped = RowWriter(path)
    dropped.write(row("c"))
    del dropped
    with RowWriter(path) as last:
        last.write(row("d"))
    assert [one.name for one in read_rows(path)] == ["a", "b", "c", "d"]


FOREIGN = [
    b"thesis, chapter 1",
    b"thesis\n\nchapter 1\n",
    b'{"weights": [1, 2',
    b'{"name": "somebody\'s settings"}\n',
    b"\x80\x03\n" * 40 + b"\x00" * 40,
    b"[" * 9000,
]


@pytest.mark.parametrize("keeps_torn", [False, True])
@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_what_is_no_file_of_rows_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes, keeps_torn: bool) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(RunFailed, match=r"line \d of model.safetensors is not a row"):
        RowWriter(path, keeps_torn=keeps_torn)
    assert path.read_bytes() == content


def test_a_line_among_rows_that_is_none_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row("a").line() + "not json\n" + row("b").line() + row("c").line()[:40])
    before = path.read_bytes()
    with pytest.raises(RunFailed, match=r"line 2 of rows.jsonl is not a row"):
        RowWriter(path)
    assert path.read_bytes() == before


def test_a_first_row_that_was_torn_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for n_bytes in (5, 40):
        path.write_text(row("a").line()[:n_bytes])
        with RowWriter(path) as writer:
            assert writer.n_rows == 0
            writer.write(row("b"))
        assert [one.name for one in read_rows(path)] == ["b"]


def test_a_number_of_a_row_is_measured_and_no_truth_value() -> None:
    values = {"n": 3, "word": "3", "holds": True, "list": [3]}
    assert [row(values=values).number(name) for name in (*values, "none")] == [3.0, None, None, None, None]
    assert row(values=values, status="missing", reason="taken back").number("n") is None


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="could not be written"):
        RowWriter(tmp_path)


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row("a").line() + "not json\n" + row("b").line())
    with pytest.raises(RunFailed, match=r"line 2 of rows.jsonl is not a row"):
        read_rows(path)


def test_a_newer_schema_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row("a").line() + json.dumps({"schema_version": SCHEMA + 1, "wonder": 1}) + "\n")
    with pytest.raises(NotComparable) as caught:
        read_rows(path)
    assert f"row schema {SCHEMA + 1}" in caught.value.what
    assert f"schema {SCHEMA} or older" in caught.value.allowed


def test_a_run_is_read_across_its_jobs(tmp_path: Path) -> None:
    for folder, name in (("", "night"), ("jobs/b", "b"), ("jobs/a", "a")):
        with RowWriter(tmp_path / folder / "rows.jsonl") as writer:
            writer.write(row(name))
    assert [one.name for one in read_run(tmp_path)] == ["night", "a", "b"]


FILLS_THE_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_store import row
from lab.errors import LabError
from lab.rows.store import RowWriter
sys.dont_write_bytecode = True
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with an OSError, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
writer = RowWriter(Path(sys.argv[1]))
try:
    for number in range(100):
        writer.write(row(f"row {number}"))
except LabError as error:
    print(type(error).__name__, writer.n_rows)
    print(error)
"""


def test_a_full_disk_loses_nothing_that_was_written_and_says_how_much_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            FILLS_THE_DISK,
            str(path),
            str(ROOT),
            str(ROOT / "tests" / "support"),
            str(Path(__file__).parent),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    kind, n_safe = done.stdout.splitlines()[0].split()
    found = read_rows(path)
    assert kind == "RunFailed"
    assert len(found) == int(n_safe) > 2
    assert [one.name for one in found] == [f"row {number}" for number in range(len(found))]
    assert path.read_bytes().endswith(b"\n")
    assert f"the {n_safe} rows before it are safe" in done.stdout
    assert "File too large" in done.stdout
