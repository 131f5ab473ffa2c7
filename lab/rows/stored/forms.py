"""The forms of a run's stored files: what `run.json`, `job.json` and `summary.json` must hold to be believed.

A file is held against its form once, when it is read; whoever has it then asks nothing again. What a form does not name
may be there and is not looked at: a later version may say more. A number that is read is finite, a name is short, and a
name that becomes a folder leads nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from lab.rows.stored.files import MOST_LETTERS, MOST_LETTERS_OF_A_FOLDER
from lab.rows.stored.moments import moment_of

Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=MOST_LETTERS)]


def _moment(text: str) -> str:
    moment_of(text)
    return text


def _folder(name: str) -> str:
    """A name of a folder inside another: `lab.rows.values.slugged` makes no other."""
    if name in ("", ".", "..") or any(letter in "/\\" or not letter.isprintable() for letter in name):
        raise ValueError(f"{name!r} is no name of a folder")
    return name


Moment = Annotated[str, Field(max_length=64), AfterValidator(_moment)]
FolderName = Annotated[str, Field(max_length=MOST_LETTERS_OF_A_FOLDER), AfterValidator(_folder)]


class Form(BaseModel):
    """A stored object; types are taken as they are, since the object itself is what is used."""

    model_config = ConfigDict(extra="allow", strict=True)


class PlannedJob(Form):
    """A job of the plan."""

    id: FolderName
    notebook: FolderName
    hash: str = ""
    reads_run: bool = False


class PlanForm(Form):
    """`run.json`."""

    started_at: Moment
    fingerprint: str
    config_hash: str
    strict_undecided: bool
    gate_required: bool
    pair: dict[str, str] = {}
    gates: list[dict[str, Any]]
    jobs: list[PlannedJob]


class OutcomeForm(Form):
    """What became of a job."""

    status: Text
    seconds: Annotated[Number, Field(ge=0)]
    passed: bool | None
    error: str | None
    cell: int | None
    traceback: str | None = None


class RecordForm(Form):
    """`job.json`."""

    hash: str
    parameters: dict[str, Any]
    outcome: OutcomeForm


class TimedJobForm(Form):
    """A job in the summary of an earlier run: how long it took."""

    id: FolderName
    status: Text
    seconds: Annotated[Number, Field(ge=0)]


class JobForm(OutcomeForm):
    """A job in a summary."""

    id: FolderName
    notebook: FolderName


class GateForm(Form):
    """A judged gate."""

    name: str
    word: Text
    job: str
    value: Any = None
    threshold: Any = None
    detail: str = ""


class VerdictForm(Form):
    """What can be said of a move."""

    word: Text
    reason: str
    ratio: Number | None
    low: Number | None
    high: Number | None


class ChangeForm(Form):
    """A number before and after."""

    notebook: Text
    row: Text
    parameters: dict[str, Any]
    metric: Text
    before: float | None
    after: float | None
    verdict: VerdictForm


class StepForm(Form):
    """A lasting move in a series."""

    at: int
    run: Text
    ratio: Number
    word: Text


class SeriesForm(Form):
    """A number over the nights."""

    notebook: Text
    row: Text
    parameters: dict[str, Any]
    metric: Text
    values: Annotated[list[Number], Field(min_length=1)]
    steps: list[StepForm]
    n_lost: int


class SinceForm(Form):
    """What moved since the run before."""

    previous: FolderName | None
    n_earlier: int
    changes: list[ChangeForm]
    moved: list[str]
    flipped: list[str]
    left_out: list[str] = []


class IdentityForm(Form):
    """Of `summary.json`, what says which runs may be compared, and in which order; the rest where it is there."""

    fingerprint: str
    config_hash: str
    started_at: Moment
    jobs: list[TimedJobForm] = []
    gates: list[GateForm] = []


class SummaryForm(Form):
    """`summary.json`, all that a page is drawn from."""

    fingerprint: str
    config_hash: str
    started_at: Moment
    run: Text
    word: Text
    sentence: str
    seconds: Number
    jobs: list[JobForm]
    gates: list[GateForm]
    since: SinceForm
    nights: list[SeriesForm] = []
    notices: list[str] = []


class MetadataForm(Form):
    """Of a cell."""

    tags: list[str] = []


class CellForm(Form):
    """A cell of a notebook; what it gave is for who shows it."""

    cell_type: str
    source: str | list[str]
    metadata: MetadataForm = MetadataForm()


class NotebookForm(Form):
    """A notebook, before or after it ran."""

    nbformat: Literal[4]
    cells: list[CellForm]


def fault_of(content: Any, form: type[Form]) -> str:
    """The first thing in which `content` is not of that form, in words; empty if it is."""
    try:
        form.model_validate(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ")
    return ""
