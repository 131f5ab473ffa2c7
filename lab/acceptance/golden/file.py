"""`eagle3lab golden`: a run's acceptance lengths kept as what later runs are held against, and the file they lie in.

One JSON file holds the lengths of one pair or of several that lie in one folder. Nothing in it is measured here: rows
of a run say what was measured, and on what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.acceptance import GoldenOptions
from lab.rows.store import Row, read_run
from lab.rows.stored.files import read_json
from lab.rows.values import refuse_newer

KIND = "golden_length"
GOLDEN_FILE = "golden_lengths.json"
SCHEMA = 1
LEAST_TOLERANCE = 0.01  # tokens a step: of one prompt the interval is a point, and rounding still moves a near-tie
Key = tuple[str, str, str, int, bool, str]


class Asked(BaseModel):
    """What a length is the length of.

    Attributes:
        pair: its name (`lengths.pair_name`). shape: of the drafts. prompts: identity of their tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair: str
    shape: str
    prompts: str
    n_prompts: int = Field(ge=1)
    max_new_tokens: int = Field(ge=2)
    ignore_eos: bool
    dtype: str

    def key(self) -> Key:
        """What has to be the same for two lengths to be comparable."""
        return self.pair, self.shape, self.prompts, self.max_new_tokens, self.ignore_eos, self.dtype

    def parameters(self) -> dict[str, Any]:
        """As a row has it beside its name, the shape."""
        return {name: getattr(self, name) for name in Asked.model_fields if name != "shape"}


class Measured(Asked):
    """An acceptance length, bonus included, with its 95% interval over prompts; None without a complete step."""

    length: float | None
    low: float | None
    high: float | None
    n_steps: int


class GoldenLength(Asked):
    """One entry of the file; `tolerance` in tokens a step, either way."""

    length: float = Field(ge=1, allow_inf_nan=False)
    tolerance: float = Field(gt=0, allow_inf_nan=False)
    n_steps: int = Field(ge=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_version: int = Field(ge=1)
    lengths: list[GoldenLength]


def run(options: GoldenOptions) -> int:
    """Keeps the lengths of a run; an entry of the same pair, shape, prompts, tokens and dtype is replaced."""
    measured = lengths_of(read_run(options.run_dir), options.run_dir.name)
    known = {length.key(): length for length in read_golden(options.out)}
    for one in measured:
        kept = _kept(one, options.tolerance)
        before = known.get(kept.key())
        was = f" (was {before.length:.3f} +- {before.tolerance:.3f})" if before else ""
        print(f"{kept.pair}: {kept.shape} in {kept.dtype}: {kept.length:.3f} +- {kept.tolerance:.3f}{was}")
        known[kept.key()] = kept
    _write(options.out, list(known.values()))
    print(f"{len(measured)} lengths kept in {options.out}, {len(known)} in all")
    return EXIT_PASSED


def lengths_of(rows: list[Row], name: str) -> list[Measured]:
    """The lengths that the rows of a run hold.

    Raises:
        ExperimentError: there is none, a row is none of this lab's, or a bug was planted in the run.
    """
    found = []
    for row in rows:
        if row.kind != KIND or row.values.get("measured_length") is None:
            continue
        parameters = dict(row.parameters)
        if fault := parameters.pop("fault", ""):
            raise ExperimentError(
                f"{name!r} was run with the planted bug {fault!r}", "a run without one", "run it again without fault"
            )
        values = {key: row.values.get(f"measured_{key}") for key in ("length", "low", "high")}
        try:
            fields = {**parameters, **values, "shape": row.name, "n_steps": row.values.get("n_steps")}
            found.append(Measured.model_validate(fields))
        except ValidationError as error:
            raise ExperimentError(
                f"{name!r}: the row {row.name!r} is no acceptance length: {_first(error)}", "rows as a notebook "
                "wrote them", "run the notebook again",
            ) from error  # fmt: skip
    if not found:
        raise ExperimentError(
            f"{name!r} holds no acceptance length to keep", "a run of 31_acceptance or 32_trees that measured a "
            "complete step", "run one: eagle3lab run 31_acceptance",
        )  # fmt: skip
    return found


def _kept(measured: Measured, tolerance: float | None) -> GoldenLength:
    """The entry of a length; without a tolerance half its interval, which is how far other prompts would move it."""
    length, low, high = measured.length, measured.low, measured.high
    assert length is not None, "rows without a length were left out"
    assert low is not None, "a length has its interval"
    assert high is not None, "a length has its interval"
    spread = max((high - low) / 2, LEAST_TOLERANCE)
    return GoldenLength(
        shape=measured.shape, **measured.parameters(), length=round(length, 6),
        tolerance=round(spread, 4) if tolerance is None else tolerance, n_steps=measured.n_steps,
    )  # fmt: skip


def read_golden(path: Path, *, is_needed: bool = False) -> list[GoldenLength]:
    """The entries of a file; none where there is no file, unless it `is_needed`.

    Raises:
        ExperimentError: it cannot be read, or holds something else.
        NotComparable: a newer version of the lab wrote it.
    """
    if not path.exists() and not is_needed:
        return []
    try:
        content = read_json(path)
        if isinstance(content, dict):
            refuse_newer(path.name, content, SCHEMA)
        return _File.model_validate(content).lengths
    except ValidationError as error:
        why = _first(error)
    except (OSError, ValueError) as error:
        why = str(error)
    raise ExperimentError(
        f"{path.name} cannot be read: {why}", "golden lengths as `eagle3lab golden` writes them",
        "correct the file, or write it anew from a run",
    )  # fmt: skip


def _write(path: Path, lengths: list[GoldenLength]) -> None:
    """A line an entry, in order, so that a change of one length is a change of one line."""
    entries = sorted(lengths, key=GoldenLength.key)
    lines = ",\n".join(f"  {entry.model_dump_json()}" for entry in entries)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(f'{{"schema_version": {SCHEMA}, "lengths": [\n{lines}\n]}}\n', encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ExperimentError(
            f"{path.name} could not be written: {error.strerror or error}", "a file in a folder that can be written",
            "name another file with --out",
        ) from error  # fmt: skip


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
