"""Rows of kind "profile": one a range, and what is missing with its reason; read again for the notebook."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError, NotComparable
from lab.probes.bench.scenario import Point
from lab.probes.profiles.ranges import Profile
from lab.probes.profiles.run import Watched
from lab.probes.proofs.steps import WARM_STEPS
from lab.rows.committed import newest_committed
from lab.rows.environment import Environment
from lab.rows.maker import RowMaker
from lab.rows.store import Row, read_rows

KIND = "profile"
FILE, TRACE, WATCHED = "profile.jsonl", "trace.json", "watched.json"
COMMITTED_TRACE = "profile_trace.json.gz"  # what the trace is called beside committed rows
UNKNOWN = "a machine that the capture does not name"
WANTED = f"eagle3lab profile --out DIR, then -p rows=DIR/{FILE}"
NO_ROWS = f"no reports/reference/*/{FILE}; make one: {WANTED}"


@dataclass(frozen=True)
class Told:
    """What stands beside a capture: the steps' own account, and the machine.

    Attributes:
        watched: None for a capture that came alone. machine: its fingerprint. gpu: its name.
    """

    watched: Watched | None
    machine: str
    gpu: str | None

    @classmethod
    def here(cls, watched: Watched, machine: Environment) -> Told:
        """Of steps that ran on this machine."""
        is_gpu = watched.parameters["device"] == "cuda" and machine.gpus
        return cls(watched, machine.fingerprint, machine.gpus[0].name if is_gpu else None)

    @classmethod
    def beside(cls, capture: Path) -> Told:
        """As written beside a stored capture, if it was."""
        path = capture.parent / WATCHED
        if not path.is_file():
            return cls(None, UNKNOWN, None)
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(Watched(**stored["watched"]), stored["machine"], stored["gpu"])

    def write(self, folder: Path) -> None:
        """Leave it beside a capture."""
        (folder / WATCHED).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @property
    def name(self) -> str:
        """What row names begin with."""
        if self.watched is None:
            return "capture"
        of = self.watched.parameters
        return Point(of["context"], of["batch"]).name(of["spec_k"])


def rows_of(
    told: Told, run: str, tool: str, profile: Profile, values: Mapping[str, Mapping[str, Any]], *, on_gpu: bool
) -> list[Row]:
    """A row a range."""
    made, maker = [], RowMaker(run, KIND, told.machine)
    for cost in profile.costs:
        parameters = {"range": cost.name, "level": cost.level, **_parameters(told, tool)}
        more = {"gpu_name": told.gpu, "n_steps": profile.n_steps, "n_unplaced_kernels": profile.n_unplaced}
        row = maker.measured(
            KIND, f"{told.name}/{cost.name}", {**values[cost.name], **more}, parameters,
            timer="cupti" if on_gpu else "torch profiler", warmup=WARM_STEPS, repeats=profile.n_steps,
        )  # fmt: skip
        made.append(row)
    return made


def rows_not_had(
    told: Told, run: str, tool: str, missing: Mapping[str, str], not_asked: Mapping[str, str]
) -> list[Row]:
    """A row for everything that the capture lacks, and for what nobody wanted of it, with its reason."""
    maker, of = RowMaker(run, KIND, told.machine), _parameters(told, tool)
    return [
        make(KIND, f"{told.name}/{what}", reason, {"range": what, **of})
        for make, reasons in ((maker.missing, missing), (maker.not_asked, not_asked))
        for what, reason in reasons.items()
    ]


def _parameters(told: Told, tool: str) -> dict[str, Any]:
    watched = told.watched
    return {"tool": tool, "bytes_by": watched.bytes_by if watched else None, **(watched.parameters if watched else {})}


@dataclass(frozen=True)
class ProfileRows:
    """One file of rows.

    Attributes:
        ranges: values by range name, with "level" beside them. missing: reasons by what is missing.
        not_asked: the same of what nobody wanted.
        trace: the Perfetto trace beside the file, if there is one.
    """

    name: str
    subject: str
    machine: str
    tool: str
    n_steps: int
    ranges: Mapping[str, Mapping[str, Any]]
    missing: Mapping[str, str]
    not_asked: Mapping[str, str]
    trace: Path | None

    @property
    def on_gpu(self) -> bool:
        """Whether times are the GPU's."""
        return any(values["n_kernels"] is not None for values in self.ranges.values())

    def of(self, *levels: str) -> dict[str, Mapping[str, Any]]:
        """Ranges of some levels, in order."""
        return {name: values for name, values in self.ranges.items() if values["level"] in levels}

    def line(self) -> str:
        """Where the numbers come from, for people."""
        return f"{self.name}: {self.subject}, {self.n_steps} steps stage by stage, by {self.tool}, {self.machine}"


def chosen(path: Path | None) -> ProfileRows | None:
    """The rows of `path`, else of the newest committed file, else None."""
    if path is not None:
        return read_profile(path)
    newest = newest_committed(FILE)
    return read_profile(newest) if newest else None


def read_profile(path: Path) -> ProfileRows:
    """The rows of one file, of several for one range the last.

    Raises:
        ExperimentError: no profile in it.
        NotComparable: it holds profiles of unlike subjects.
    """
    rows = [row for row in read_rows(path) if row.kind == KIND]
    measured = [row for row in rows if row.status == "measured"]
    if not measured:
        raise ExperimentError(f"{path.name} has no rows of ranges", "what `eagle3lab profile` writes", WANTED)
    subjects = list(dict.fromkeys(_subject(row) for row in measured))
    if len(subjects) > 1:
        raise NotComparable(f"{path.name} has profiles of {' and '.join(subjects)}", "one a file", "keep them apart")
    ranges = {str(row.parameters["range"]): {**row.values, "level": row.parameters["level"]} for row in measured}
    missing, not_asked = (
        {str(row.parameters["range"]): row.reason or "" for row in rows if row.status == word}
        for word in ("missing", "not asked")
    )
    last = measured[-1]
    traces = (path.parent / name for name in (TRACE, COMMITTED_TRACE))
    return ProfileRows(
        f"{path.parent.name}/{path.name}", subjects[0], str(last.values.get("gpu_name") or last.parameters.get("device")
        or UNKNOWN), str(last.parameters["tool"]), int(last.values["n_steps"]),  # type: ignore[arg-type]
        ranges, missing, not_asked, next((trace for trace in traces if trace.is_file()), None),
    )  # fmt: skip


def _subject(row: Row) -> str:
    of = row.parameters
    if "geometry" not in of:
        return "a capture that came alone"
    return (f"{of['pair']} {of['geometry']}, {of['context']}x{of['batch']}, spec-{of['spec_k']}, {of['dtype']}, "
            f"path {of['path']}")  # fmt: skip


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The public ranges for people."""
    found = []
    for row in rows:
        if row.status != "measured":
            found.append(f"  {row.status}: {row.parameters['range']}: {row.reason}")
        elif row.parameters["level"] != "stage":
            of = row.values
            rate = f", {of['gb_per_s']:.3g} GB/s" if of["gb_per_s"] else ""
            kernels = f", {of['n_kernels']:.0f} kernels" if of["n_kernels"] is not None else ""
            found.append(f"  {row.parameters['range']}: {of['time_us']:.0f} us a step{kernels}{rate}")
    return found
