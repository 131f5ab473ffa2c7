"""`eagle3lab export RUN|FILE... --out NAME.parquet|NAME.csv`: stored rows as one table that any dashboard reads.

The table is long: a line for every value of every row, so that it stays one table whatever rows are about. Its columns
are `COLUMNS`, described in docs/measuring.md. Source: docs/requirements.md (rows with a versioned schema).
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.ending import tell_summary
from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.exchange import ExportOptions
from lab.rows.carried.upgrade import files_of
from lab.rows.environment import Environment
from lab.rows.runs import ENVIRONMENT_FILE, read_environment
from lab.rows.store import Row, read_rows
from lab.rows.values import number_of

if TYPE_CHECKING:
    import pyarrow

# Name and type (of Arrow) of every column, in order. A column is never renamed; new ones come at the end.
COLUMNS: Mapping[str, str] = {
    "schema_version": "int32", "run": "string", "job": "string", "notebook": "string",
    "kind": "string", "name": "string", "status": "string", "reason": "string", "parameters": "string",
    "value": "string", "unit": "string", "number": "float64", "text": "string", "list": "string",
    "timer": "string", "warmup": "int32", "repeats": "int32", "recorded_at": "timestamp[ms, UTC]",
    "environment": "string", "gpu": "string", "commit": "string",
}  # fmt: skip
LINES_AT_ONCE = 50_000
# Units are suffixes of names (`lab.rows.store`), the longest first.
_UNIT = re.compile(r"_(gb_per_s|tokens_per_s|per_second|per_s|us|ms|s|seconds|bytes|mib|mhz|w|ratio)$")

Line = dict[str, Any]


def run(options: ExportOptions) -> int:
    """Writes the table and says what is in it; 0.

    Raises:
        ExperimentError: nothing to export, a file that is there, or Parquet without pyarrow.
    """
    if options.out.exists():
        raise ExperimentError(
            f"{options.out.name} exists", "a file that does not", "name another, or remove it: an export is whole"
        )
    files = files_of(options.paths)
    part = options.out.with_name(f"{options.out.name}.{os.getpid()}.part")
    try:
        n_rows, n_lines = _written(part, options.out.suffix, lines_of(files))
        if not n_rows:
            raise ExperimentError(
                f"no row in {len(files)} files", "run folders, or files of rows", "name a folder under reports/"
            )
        part.replace(options.out)
    finally:
        part.unlink(missing_ok=True)
    summary = {"command": "export", "files": len(files), "rows": n_rows, "lines": n_lines, "out": options.out.name}
    tell_summary(summary)
    return EXIT_PASSED


def lines_of(files: Iterable[Path]) -> Iterator[list[Line]]:
    """The lines of every row, row by row.

    Raises:
        RunFailed: a file that cannot be read, or holds something else than rows.
        NotComparable: rows of a newer version of the lab.
    """
    for path in files:
        rows = read_rows(path)
        machines = machines_of(path, rows)
        for row in rows:
            yield lines_of_row(row, machines.get(row.environment))


def lines_of_row(row: Row, machine: Environment | None) -> list[Line]:
    """A line a value; one without a value for a row that has none, such as one that is missing."""
    shared: Line = {
        "schema_version": row.schema_version, "run": row.run, "job": row.job, "notebook": row.notebook,
        "kind": row.kind, "name": row.name, "status": row.status, "reason": row.reason,
        "parameters": json.dumps(row.parameters, sort_keys=True), "timer": row.timer, "warmup": row.warmup,
        "repeats": row.repeats, "recorded_at": row.recorded_at, "environment": row.environment,
        "gpu": (", ".join(gpu.name for gpu in machine.gpus) or None) if machine else None,
        "commit": machine.commit if machine else None,
    }  # fmt: skip
    return [{**shared, **_of_value(name, value)} for name, value in row.values.items()] or [shared]


def _of_value(name: str, value: object) -> Line:
    found, unit = number_of(value), _UNIT.search(name)
    line: Line = {"value": name, "unit": unit.group(1) if unit else None}
    if isinstance(value, bool):
        return {**line, "number": float(value), "text": str(value).lower()}
    if isinstance(value, list):
        return {**line, "list": json.dumps(value)}
    return {**line, "number": found, "text": value if isinstance(value, str) else None}


def machines_of(path: Path, rows: Sequence[Row]) -> dict[str, Environment]:
    """Records of the machines of a file's rows by fingerprint: its own rows of them, and the run folder's file."""
    found = {}
    for folder in path.parents[:3]:
        if (folder / ENVIRONMENT_FILE).is_file():
            machine = read_environment(folder)
            found[machine.fingerprint] = machine
            break
    for row in rows:
        record = row.values.get("record")
        if row.kind == "environment" and isinstance(record, list):
            for text in record:
                machine = Environment.model_validate_json(str(text))
                found[machine.fingerprint] = machine
    return found


def _written(part: Path, suffix: str, rows: Iterable[list[Line]]) -> tuple[int, int]:
    """How many rows and lines were written."""
    counted = _Counted(rows)
    write = _write_parquet if suffix == ".parquet" else _write_csv
    write(part, counted.lines())
    return counted.n_rows, counted.n_lines


class _Counted:
    def __init__(self, rows: Iterable[list[Line]]) -> None:
        self._rows, self.n_rows, self.n_lines = rows, 0, 0

    def lines(self) -> Iterator[Line]:
        for lines in self._rows:
            self.n_rows += 1
            self.n_lines += len(lines)
            yield from lines


def _write_csv(part: Path, lines: Iterable[Line]) -> None:
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS), restval="")
        writer.writeheader()
        writer.writerows(lines)


def _write_parquet(part: Path, lines: Iterable[Line]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ExperimentError(
            "a .parquet file without pyarrow", "the extra that brings it, or a name that ends in .csv",
            'install it: pip install "eagle3lab[parquet]"',
        ) from error  # fmt: skip
    schema = _arrow_schema(pyarrow)
    with parquet.ParquetWriter(part, schema, compression="zstd") as writer:
        left = iter(lines)
        while some := list(islice(left, LINES_AT_ONCE)):
            columns = {name: [line.get(name) for line in some] for name in COLUMNS}
            moments = pyarrow.array(columns.pop("recorded_at"), "string")
            table = {**columns, "recorded_at": moments.cast(schema.field("recorded_at").type)}
            writer.write_table(pyarrow.table([table[name] for name in COLUMNS], schema=schema))


def _arrow_schema(pyarrow: Any) -> pyarrow.Schema:
    def type_of(name: str) -> Any:
        return pyarrow.timestamp("ms", tz="UTC") if name.startswith("timestamp") else pyarrow.type_for_alias(name)

    return pyarrow.schema([(name, type_of(kind)) for name, kind in COLUMNS.items()])
