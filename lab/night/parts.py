"""A night in parts, for machines that are lent for minutes: which jobs run now, and the archive between two parts.

A job belongs to one part and a ratio is measured within one job, so no ratio spans two parts. The archive holds the run
folder as it is; unpacked anywhere, the next part goes on with it, and finished jobs are not run again. Parts that need
nothing of each other may run side by side on machines of one kind; their archives are laid together.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError
from lab.night.archive import Pack, read_pack
from lab.night.jobs import JOB_FILE, Job
from lab.rows.runs import RUN_FILE
from lab.rows.store import JOBS_FOLDER, ROWS_FILE
from lab.rows.stored.files import decoded
from lab.rows.values import slugged


@dataclass(frozen=True)
class Part:
    """Part `index` of `of`, from 1."""

    index: int
    of: int

    @property
    def is_last(self) -> bool:
        """Whether the night is judged after it."""
        return self.index == self.of

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def jobs_of(self, jobs: list[Job]) -> list[Job]:
        """Those of `jobs` that run in it.

        Raises:
            ExperimentError: a job belongs to a part beyond the last, or the part has no job.
        """
        beyond = [job for job in jobs if job.part > self.of]
        if beyond:
            raise ExperimentError(
                f"job {beyond[0].id} is in part {beyond[0].part}, and --part {self} was given",
                f"at least {max(job.part for job in jobs)} parts",
                f"give --part {self.index}/{max(job.part for job in jobs)}, or change `part` of the job",
            )
        chosen = [job for job in jobs if job.part == self.index]
        if not chosen:
            raise ExperimentError(
                f"no job is in part {self.index}",
                f"parts {sorted({job.part for job in jobs})}",
                "give one of these, or put `part` into a [[job]]",
            )
        return chosen


def read_part(text: str) -> Part:
    """A part written as `2/3`.

    Raises:
        ExperimentError: another form, or an index outside 1..n.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ExperimentError(f"--part {text!r}", "I/N with I from 1 to N, e.g. 1/3", "correct it")
    return Part(int(found[1]), int(found[2]))


def unpack(archives: Sequence[Path], run_dir: Path) -> None:
    """Packed runs as one new run folder: the first as it is, and of the others the jobs that it does not hold.

    Every archive is read and checked whole, and the nights compared, before any file is laid out.

    Raises:
        ExperimentError: the folder holds something, an archive is not a run, or they are not parts of one night.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ExperimentError(
            f"--out {run_dir.name!r} holds files, and --resume-from would lay others over them",
            "a new or empty folder",
            "choose another --out, or leave --resume-from away to go on with what is there",
        )
    packs = [read_pack(archive) for archive in archives]
    plans = [_plan_of(pack) for pack in packs]
    for pack, plan in zip(packs[1:], plans[1:], strict=True):
        _check_same_night(pack.path, plan, plans[0])
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run_dir.parent) as folder:
        laid_out = [Path(folder, str(i)) for i in range(len(packs))]
        for pack, target in zip(packs, laid_out, strict=True):
            pack.lay_out(target)
        whole, *others = laid_out
        for other in others:
            _lay_beside(other, whole)
        if run_dir.exists():
            run_dir.rmdir()
        whole.rename(run_dir)


def _plan_of(pack: Pack) -> dict[str, Any]:
    """The night that a pack says it is of, each of its job folders one of the night's.

    Raises:
        ExperimentError: it holds no plan, or jobs that do not belong to it.
    """
    try:
        plan: Any = decoded(pack.read(RUN_FILE))
        hashes = {str(job["id"]): str(job["hash"]) for job in plan["jobs"]}
        what = {name: str(plan[name]) for name in ("run", "config_hash", "fingerprint")}
    except (ValueError, TypeError, KeyError) as error:
        raise _no_run(pack, f"has a {RUN_FILE} that is no night's: {type(error).__name__}: {error}") from error
    odd = [job for job in hashes if job != slugged(job)]
    if odd:
        raise _no_run(pack, f"has a job called {odd[0]!r}, which is no name of a folder")
    for name in pack.files:
        top, _, rest = name.partition("/")
        job, _, inside = rest.partition("/")
        if top == JOBS_FOLDER and job not in hashes:
            raise _no_run(pack, f"holds {name}, and {job!r} is no job of its night")
        if top == JOBS_FOLDER and inside == JOB_FILE:
            _check_job(pack, job, hashes[job])
    return what


def _check_job(pack: Pack, job: str, expected: str) -> None:
    """That the record in a job's folder is that job's, of that night."""
    try:
        record: Any = decoded(pack.read(f"{JOBS_FOLDER}/{job}/{JOB_FILE}"))
        named, digest = record["id"], record["hash"]
    except (ValueError, TypeError, KeyError) as error:
        raise _no_run(pack, f"has a {JOB_FILE} of {job} that cannot be read: {error}") from error
    if (named, digest) != (job, expected):
        raise _no_run(
            pack, f"has in the folder of {job} the record of {named!r} with hash {digest!r}, not {expected!r}"
        )


def _no_run(pack: Pack, what: str) -> ExperimentError:
    return ExperimentError(f"{pack.path.name} {what}", "a run folder packed by --pack", "pack that part's run again")


def _check_same_night(archive: Path, own: dict[str, Any], first: dict[str, Any]) -> None:
    for what in first:
        if own[what] != first[what]:
            raise ExperimentError(
                f"{archive.name} has {what} {own[what]}, the first archive {first[what]}",
                "parts of one night: one configuration, one kind of machine, one name of --out",
                "give the archives of that night, or run the part again",
            )


def _lay_beside(other: Path, whole: Path) -> None:
    """Jobs that only `other` holds are moved, and lines that only its lists of lines hold are added."""
    (whole / JOBS_FOLDER).mkdir(exist_ok=True)
    for job in sorted((other / JOBS_FOLDER).glob("*")):
        if not (whole / JOBS_FOLDER / job.name).exists():
            job.rename(whole / JOBS_FOLDER / job.name)
    for path in sorted(other.glob("*.jsonl")):
        if path.name == ROWS_FILE:
            continue  # the night's own row says what machine it is, and both have it
        known = (whole / path.name).read_text(encoding="utf-8") if (whole / path.name).exists() else ""
        own, lines = path.read_text(encoding="utf-8").splitlines(keepends=True), set(known.splitlines(keepends=True))
        more = "".join(line for line in own if line not in lines)
        (whole / path.name).write_text(known + more, encoding="utf-8")
