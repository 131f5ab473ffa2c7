"""From a night's configuration to jobs: one notebook, one set of parameters, one result folder, one hash.

The hash covers everything a result depends on. A job that finished under an equal hash is not run again, so that
starting the same night with the same `--out` goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lab.errors import ExperimentError
from lab.night.notebook import NotebookOutcome, declared
from lab.night.parameters import check_parameters, find_notebook, read_parameters
from lab.options.values import Seconds
from lab.rows.configuration import read_configuration
from lab.rows.gates import Threshold
from lab.rows.store import JOBS_FOLDER
from lab.rows.stored.files import MOST_LETTERS_OF_A_FOLDER, read_json
from lab.rows.stored.forms import RecordForm, fault_of
from lab.rows.values import shortened, slugged

JOB_FILE = "job.json"
MOST_JOBS = 1000  # of a night
OUTCOME_KEYS = ("status", "seconds", "passed", "error", "cell")
_OUTCOME_FIELDS = {field.name for field in fields(NotebookOutcome)}
# Parameters that the night fills in; a configuration may not set the first two.
PLACE_PARAMETERS = ("run_dir", "job")
PAIR_PARAMETERS = ("target", "draft", "prompts")
# Each names a file that a notebook reads; it is looked for where the command was typed.
FILE_PARAMETERS = ("acceptance", "chat_template", "config", "golden", "reference", "rows", "shapes")
# Files up to this size enter a content hash whole; of larger ones the first and last such part and the size do.
_HASHED_BYTES = 1 << 24

Plain = str | int | float | bool | list[Any] | dict[str, Any]


class PairConfig(BaseModel):
    """Which (target, draft) pair: a packaged one by name, or two directories."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    target: str | None = None
    draft: str | None = None

    @model_validator(mode="after")
    def _named_or_both(self) -> PairConfig:
        directories = (self.target is not None) + (self.draft is not None)
        if directories == 1 or (self.name is None) == (directories == 0):
            raise ValueError('give either name = "shipped" or "random", or both target and draft')
        return self


class JobConfig(BaseModel):
    """One `[[job]]`: a notebook, fixed parameters, and a grid whose every combination is a job of its own."""

    model_config = ConfigDict(extra="forbid")

    notebook: str
    # Tells two jobs of one notebook apart.
    name: str = ""
    parameters: dict[str, Plain] = {}
    grid: dict[str, list[Plain]] = {}
    timeout_s: Seconds = 900.0
    # A notebook that reads what the jobs before it wrote runs again whenever one of them did.
    reads_run: bool = False
    # Of a night that is run in parts, see `lab.night.parts`.
    part: int = Field(default=1, ge=1)
    # What it is expected to take, until earlier nights say better.
    estimate_s: Seconds | None = None


class Budget(BaseModel):
    """How long a night may take, seconds: each of its parts, and all of them."""

    model_config = ConfigDict(extra="forbid")

    part_s: Seconds
    night_s: Seconds


class NightConfig(BaseModel):
    """The whole of a `nightly.toml`; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    pair: PairConfig = PairConfig(name="shipped")
    budget: Budget | None = None
    prompts: str | None = None
    job: list[JobConfig] = Field(min_length=1)
    gate: list[Threshold] = []

    @model_validator(mode="after")
    def _has_jobs_that_can_be_counted(self) -> NightConfig:
        n_jobs = sum(math.prod(len(values) for values in job.grid.values()) for job in self.job)
        if n_jobs > MOST_JOBS:
            raise ValueError(f"{n_jobs:.3g} jobs, at most {MOST_JOBS}")
        return self

    @model_validator(mode="after")
    def _fits_its_budget(self) -> NightConfig:
        if self.budget is None:
            return self
        parts: dict[int, float] = {}
        for job in self.job:
            n_points = math.prod(len(values) for values in job.grid.values())
            parts[job.part] = parts.get(job.part, 0.0) + n_points * (job.estimate_s or 0.0)
        for part, seconds in parts.items():
            if seconds > self.budget.part_s:
                raise ValueError(f"part {part} is expected to take {seconds:g} s of {self.budget.part_s:g}")
        if sum(parts.values()) > self.budget.night_s:
            raise ValueError(f"the night is expected to take {sum(parts.values()):g} s of {self.budget.night_s:g}")
        return self


@dataclass(frozen=True)
class Job:
    """One run of one notebook. `id` names its folder; `hash` covers all that its result depends on."""

    id: str
    notebook: str
    source: Path
    parameters: dict[str, Any]
    timeout_s: float
    reads_run: bool
    hash: str
    part: int = 1
    estimate_s: float | None = None

    def folder(self, run_dir: Path) -> Path:
        """Where its results lie."""
        return run_dir / JOBS_FOLDER / self.id


def load_config(path: Path) -> NightConfig:
    """The configuration in a TOML file.

    Raises:
        ExperimentError: the file is absent, is not TOML, or holds an unknown key or a value of the wrong type.
    """
    return read_configuration(
        path, NightConfig, {"job": JobConfig, "gate": Threshold, "budget": Budget}, like="nightly.toml"
    )


def expand(config: NightConfig, filled: dict[str, str], state: str) -> list[Job]:
    """All jobs of a night in order, each checked against its notebook's declared parameters.

    Args:
        filled: values for `target`, `draft` and `prompts`, given to each notebook that declares them.
        state: identity of source, environment kind and pair content; part of every job's hash.

    Raises:
        ExperimentError: an unknown notebook, parameter or type, or two jobs that would share a folder.
    """
    jobs: list[Job] = []
    for entry in config.job:
        source = find_notebook(entry.notebook)
        for point in _points(entry.grid):
            jobs.append(_job(entry, source, point, filled, state))
    seen: set[str] = set()
    for job in jobs:
        if job.id in seen:
            raise ExperimentError(
                f"two jobs are called {job.id!r}",
                "every notebook, name and grid point once",
                "remove one, use a grid, or give it a name",
            )
        seen.add(job.id)
    return jobs


def _points(grid: dict[str, list[Plain]]) -> Iterable[dict[str, Plain]]:
    return (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))


def _job(entry: JobConfig, source: Path, point: dict[str, Plain], filled: dict[str, str], state: str) -> Job:
    names = declared(source)
    given: dict[str, Any] = {**entry.parameters, **point}
    for name in PLACE_PARAMETERS:
        if name in given:
            raise ExperimentError(
                f"{source.stem}: {name!r} was given", "any other parameter", f"leave {name} to the night"
            )
    parameters = {name: value for name, value in filled.items() if name in names} | given
    check_parameters(read_parameters(source), parameters)
    notebook = source.stem
    words = [notebook, *([entry.name] if entry.name else []), *(str(value) for value in point.values())]
    job_id = "-".join(map(slugged, words))
    if len(job_id) > MOST_LETTERS_OF_A_FOLDER:
        raise ExperimentError(
            f"the job {shortened(job_id)} has a name of {len(job_id)} letters",
            f"at most {MOST_LETTERS_OF_A_FOLDER}, since it names a folder",
            "shorten its name, or the values of its grid",
        )
    identity = json.dumps([notebook, given, state], sort_keys=True)
    digest = hashlib.sha256(source.read_bytes() + identity.encode()).hexdigest()[:16]
    shared = (entry.timeout_s, entry.reads_run, digest, entry.part, entry.estimate_s)
    return Job(job_id, notebook, source, parameters, *shared)


def record(job: Job, run_dir: Path, outcome: NotebookOutcome) -> None:
    """Writes what became of `job` beside its results."""
    content = {
        "id": job.id,
        "notebook": job.notebook,
        "hash": job.hash,
        "parameters": job.parameters,
        "outcome": outcome.as_dict(),
    }
    folder = job.folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{JOB_FILE}.part"
    unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    unfinished.replace(folder / JOB_FILE)


def recorded(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """What `record` wrote in `folder`, and why that cannot be read; neither for a job that never came to an end."""
    path = folder / JOB_FILE
    if not path.exists():
        return None, ""
    try:
        content: dict[str, Any] = read_json(path)
        why = fault_of(content, RecordForm)
    except (OSError, ValueError) as error:
        why = str(error)
    return (None, f"{JOB_FILE} cannot be read: {why}") if why else (content, "")


def finished_outcome(job: Job, run_dir: Path) -> NotebookOutcome | None:
    """The outcome of an earlier, finished run of the very same job; None when it has to run."""
    before, _ = recorded(job.folder(run_dir))
    if before is None or before["hash"] != job.hash or before["outcome"]["status"] != "finished":
        return None
    return NotebookOutcome(**{key: value for key, value in before["outcome"].items() if key in _OUTCOME_FIELDS})


def content_hash(*paths: Path) -> str:
    """Twelve hex digits over the names, sizes and contents of files and folders, wherever they lie."""
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path) if path.is_dir() else ''}:{size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_HASHED_BYTES))
                if size > _HASHED_BYTES:
                    stream.seek(max(_HASHED_BYTES, size - _HASHED_BYTES))
                    digest.update(stream.read(_HASHED_BYTES))
    return digest.hexdigest()[:12]
