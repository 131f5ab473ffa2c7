"""Stored rows come out as one table with the same numbers, in CSV and Parquet."""

from __future__ import annotations

import math
from pathlib import Path

import pandas
import pytest

from lab.errors import ExperimentError, RunFailed
from lab.options.exchange import ExportOptions
from lab.rows.carried.export import COLUMNS, run
from lab.rows.store import Row, RowWriter, read_run

pytestmark = pytest.mark.reference

NIGHT = Path(__file__).parents[3] / "reports/reference/h200/night"


def row(name: str, **about) -> Row:
    return Row(**{
        "run": "r", "job": "j", "notebook": "n", "kind": "k", "name": name, "environment": "e",
        "recorded_at": "2026-11-23T08:41:52.856+00:00", **about,
    })  # fmt: skip


def exported(folder: Path, rows: list[Row], name: str = "rows.csv") -> Path:
    with RowWriter(folder / "some.jsonl") as writer:
        for each in rows:
            writer.write(each)
    assert run(ExportOptions(paths=(folder / "some.jsonl",), out=folder / name)) == 0
    return folder / name


def numbers_of(rows: list[Row]) -> list[tuple[str, str, str, float]]:
    return sorted(
        (r.job, r.name, name, float(value))
        for r in rows for name, value in r.values.items() if isinstance(value, (int, float)) and math.isfinite(value)
    )  # fmt: skip


def numbers_in(table: pandas.DataFrame) -> list[tuple[str, str, str, float]]:
    held = table[table.number.abs() < math.inf]
    return sorted(zip(held.job, held.name, held.value, held.number.astype(float), strict=True))


def test_a_night_read_back_by_pandas_has_the_numbers_of_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "night.csv"
    assert run(ExportOptions(paths=(NIGHT,), out=out)) == 0
    table = pandas.read_csv(out, dtype=str, keep_default_na=False)
    table["number"] = table.number.replace("", "NaN").astype(float)
    expected = numbers_of(read_run(NIGHT))
    assert len(expected) > 1000
    assert list(table.columns) == list(COLUMNS)
    assert numbers_in(table) == expected
    assert set(table.gpu) == {"NVIDIA H200"}


def test_every_kind_of_value_has_its_column(tmp_path: Path) -> None:
    values = {"step_us": 3.5, "n": 2, "held": True, "found": 'a "word",\nanother', "step_us_samples": [1, 2.5]}
    table = pandas.read_csv(exported(tmp_path, [row("one", values=values, parameters={"k": 3})]))
    lines = table.set_index("value")
    assert lines.number["step_us"] == 3.5
    assert lines.unit["step_us"] == "us"
    assert (lines.number["held"], lines.text["held"]) == (1.0, "true")
    assert lines.text["found"] == values["found"]
    assert lines["list"]["step_us_samples"] == "[1, 2.5]"
    assert set(table.parameters) == {'{"k": 3}'}


def test_a_row_that_is_missing_keeps_its_reason(tmp_path: Path) -> None:
    table = pandas.read_csv(exported(tmp_path, [row("gone", status="missing", reason="no GPU")]))
    assert [(line.status, line.reason) for line in table.itertuples()] == [("missing", "no GPU")]


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    out = exported(tmp_path, [row("one", values={"n": 1})])
    before = out.read_bytes()
    with pytest.raises(ExperimentError, match=r"rows\.csv exists"):
        run(ExportOptions(paths=(tmp_path / "some.jsonl",), out=out))
    assert out.read_bytes() == before


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"no": "row"}\n{"no": "row"}\n')
    with pytest.raises(RunFailed, match="not a row"):
        run(ExportOptions(paths=(tmp_path / "bad.jsonl",), out=tmp_path / "out.csv"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExperimentError, match="no row"):
        run(ExportOptions(paths=(tmp_path / "empty",), out=tmp_path / "out.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "empty"]


def test_parquet_holds_the_same_numbers_with_their_types(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    out = tmp_path / "night.parquet"
    assert run(ExportOptions(paths=(NIGHT,), out=out)) == 0
    table = pandas.read_parquet(out)
    assert numbers_in(table) == numbers_of(read_run(NIGHT))
    assert str(table.recorded_at.dtype).endswith("UTC]")


def test_duckdb_counts_what_pandas_counts(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    out = tmp_path / "night.parquet"
    assert run(ExportOptions(paths=(NIGHT,), out=out)) == 0
    asked = f"select count(*), sum(number) from '{out}' where unit is not null and isfinite(number)"
    n, total = duckdb.connect().execute(asked).fetchall()[0]
    table = pandas.read_parquet(out)
    table = table[table.unit.notna()]
    assert (n, total) == (len(table), pytest.approx(table.number.sum(), rel=1e-12))


def test_parquet_without_the_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ExperimentError, match="without pyarrow") as refused:
        run(ExportOptions(paths=(NIGHT,), out=tmp_path / "night.parquet"))
    assert "eagle3lab[parquet]" in refused.value.remedy
    assert not list(tmp_path.iterdir())
