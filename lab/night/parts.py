"""A night in parts, for machines that are lent for minutes: which jobs run now, and the archive between two parts.

A job belongs to one part and a ratio is measured within one job, so no ratio spans two parts. The archive holds the run
folder as it is; unpacked anywhere, the next part goes on with it, and finished jobs are not run again. Parts that need
nothing of each other may run side by side on machines of one kind; their archives are laid together.
"""

from __future__ import annotations

import re
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.errors import ExperimentError, RunFailed
from lab.night.jobs import Job
from lab.rows.runs import RUN_FILE, read_plan
from lab.rows.store import JOBS_FOLDER, ROWS_FILE


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


def pack(run_dir: Path, archive: Path) -> None:
    """The run folder as one tar file, whole or not at all.

    Raises:
        RunFailed: the file system refused it; the run folder is untouched.
    """
    unfinished = archive.with_name(archive.name + ".part")
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(unfinished, "w") as tar:
            tar.add(run_dir, arcname=".")
        unfinished.replace(archive)
    except OSError as error:
        raise RunFailed(
            f"{archive.name} could not be written: {error.strerror or error}",
            "a folder with room for the run",
            "free some space; the run folder itself is complete, and the same command packs it again",
        ) from error


def unpack(archives: Sequence[Path], run_dir: Path) -> None:
    """Packed runs as one new run folder: the first as it is, and of the others the jobs that it does not hold.

    Raises:
        ExperimentError: the folder holds something, an archive is not a run, or they are not parts of one night.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ExperimentError(
            f"--out {run_dir.name!r} holds files, and --resume-from would lay others over them",
            "a new or empty folder",
            "choose another --out, or leave --resume-from away to go on with what is there",
        )
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run_dir.parent) as folder:
        whole, *others = [_extracted(archive, Path(folder, str(i))) for i, archive in enumerate(archives)]
        for archive, other in zip(archives[1:], others, strict=True):
            _check_same_night(archive, other, whole)
            _lay_beside(other, whole)
        if run_dir.exists():
            run_dir.rmdir()
        whole.rename(run_dir)


def _extracted(archive: Path, folder: Path) -> Path:
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ExperimentError(
            f"{archive.name} cannot be unpacked: {error}", "a file written by --pack", "check the path"
        ) from error
    if not (folder / RUN_FILE).exists():
        raise ExperimentError(f"{archive.name} holds no {RUN_FILE}", "a file written by --pack", "check the path")
    return folder


def _check_same_night(archive: Path, other: Path, whole: Path) -> None:
    own, first = read_plan(other), read_plan(whole)
    for what in ("run", "config_hash", "fingerprint"):
        if own[what] != first[what]:
            raise ExperimentError(
                f"{archive.name} has {what} {own[what]}, the first archive {first[what]}",
                "parts of one night: one configuration, one kind of machine, one name of --out",
                "give the archives of that night, or run the part again",
            )


def _lay_beside(other: Path, whole: Path) -> None:
    """Jobs that only `other` holds are moved, and lines that only its lists of lines hold are added."""
    for job in sorted((other / JOBS_FOLDER).iterdir()):
        if not (whole / JOBS_FOLDER / job.name).exists():
            job.rename(whole / JOBS_FOLDER / job.name)
    for path in sorted(other.glob("*.jsonl")):
        if path.name == ROWS_FILE:
            continue  # the night's own row says what machine it is, and both have it
        known = (whole / path.name).read_text(encoding="utf-8") if (whole / path.name).exists() else ""
        own, lines = path.read_text(encoding="utf-8").splitlines(keepends=True), set(known.splitlines(keepends=True))
        more = "".join(line for line in own if line not in lines)
        (whole / path.name).write_text(known + more, encoding="utf-8")
