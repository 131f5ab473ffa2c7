"""A night that is ready to begin: everything that can be refused is refused here, before anything is started."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError, RunFailed
from lab.night import jobs, parts
from lab.night.given import check_devices, with_files
from lab.night.jobs import Job, NightConfig
from lab.night.notebook import declared
from lab.night.parameters import check_parameters, find_notebook, read_parameters
from lab.night.parts import Part
from lab.night.progress import duration
from lab.night.settings import with_settings
from lab.options.night import NightOptions
from lab.rows import environment
from lab.rows.configuration import packaged
from lab.rows.runs import RUN_FILE, comparable_runs, job_seconds, read_plan
from lab.rows.store import JOBS_FOLDER, utc_now

PACKAGED_CONFIG = "nightly.toml"


@dataclass(frozen=True)
class Plan:
    """A night that is ready to begin."""

    run_dir: Path
    jobs: list[Job]
    machine: environment.Environment
    config: NightConfig
    config_hash: str
    earlier: list[Path]
    strict_undecided: bool
    gate_required: bool
    part: Part

    @property
    def due(self) -> list[Job]:
        """The jobs of this part."""
        return self.jobs if self.part.of == 1 else self.part.jobs_of(self.jobs)

    def expected_s(self) -> dict[str, float]:
        """Seconds a job takes, by id: as in the latest run that finished it, else as the configuration expects."""
        expected = {job.id: job.estimate_s for job in self.jobs if job.estimate_s is not None}
        return expected | job_seconds(self.earlier)


def prepare(options: NightOptions, config: NightConfig | None = None, *, gate_required: bool = True) -> Plan:
    """Reads and checks everything; starts and writes nothing."""
    config = with_options(config or jobs.load_config(config_path(options.config)), options)
    run_dir = (options.out or Path("reports") / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")).resolve()
    # Relative to a job's folder, where its notebook runs: a report folder then holds no absolute path.
    job_folder = run_dir / JOBS_FOLDER / "job"
    config, files = with_files(config, job_folder)
    machine = environment.collect()
    if options.require_gpu and not machine.gpus:
        raise RunFailed(
            f"--require-gpu was given and there is no GPU: {machine.no_gpu_reason}",
            "a CUDA device that torch can use",
            "run `eagle3lab doctor` to see why not, or leave --require-gpu away",
        )
    paths = pair_paths(config)
    filled = {name: os.path.relpath(path, job_folder) for name, path in paths.items()}
    content = jobs.content_hash(*(paths[name] for name in sorted(paths)), *files)
    state = json.dumps([machine.source, machine.fingerprint, content])
    planned = jobs.expand(config, filled, state)
    check_devices(planned, machine)
    digest = config_hash(planned, content)
    check_resumable(run_dir, digest, machine.fingerprint)
    part = parts.read_part(options.part or "1/1")
    if part.of > 1:
        part.jobs_of(planned)
    started = str(read_plan(run_dir)["started_at"]) if (run_dir / RUN_FILE).exists() else utc_now()
    earlier = comparable_runs(run_dir, machine.fingerprint, digest, started)
    return Plan(run_dir, planned, machine, config, digest, earlier, options.strict_undecided, gate_required, part)


def config_path(given: Path | None) -> Path:
    """The configuration named; a bare name that is no file here is the packaged one of that name, if there is one."""
    if given is None:
        return packaged_config()
    is_bare = given.name == str(given) and not given.exists()
    return packaged(given.name) if is_bare and packaged(given.name).exists() else given


def packaged_config() -> Path:
    """The configuration that is used when none is named."""
    return packaged(PACKAGED_CONFIG)


def with_options(config: NightConfig, options: NightOptions) -> NightConfig:
    """The configuration with the command line's pair and prompts in place of its own.

    Raises:
        ExperimentError: only one of --target and --draft was given.
    """
    if (options.target is None) != (options.draft is None):
        given, absent = ("--target", "--draft") if options.target else ("--draft", "--target")
        raise ExperimentError(f"{given} was given without {absent}", "both or neither", f"add {absent} DIR")
    update: dict[str, Any] = {}
    if options.target and options.draft:
        update["pair"] = jobs.PairConfig(target=str(options.target), draft=str(options.draft))
    if options.prompts:
        update["prompts"] = str(options.prompts)
    if options.settings:
        update["job"] = with_settings(config.job, options.settings)
    return config.model_copy(update=update)


def pair_parameters(config: NightConfig) -> set[str]:
    """Those of `target`, `draft` and `prompts` that some notebook of the night declares."""
    return set().union(*(declared(find_notebook(job.notebook)) for job in config.job)) & set(jobs.PAIR_PARAMETERS)


def pair_paths(config: NightConfig) -> dict[str, Path]:
    """Existing paths for those of `target`, `draft` and `prompts` that some notebook declares.

    Raises:
        ExperimentError: a directory or file that a notebook needs is not there.
    """
    needed = pair_parameters(config)
    if not needed:
        return {}
    # Here, so that a night without a pair does not wait for torch.
    from lab.pairs import pair_on_disk
    from lab.pairs.named import named_pair
    from lab.pairs.prompt_file import read_prompt_file

    pair = config.pair
    if pair.target and pair.draft:
        found = pair_on_disk(Path(pair.target), Path(pair.draft))
    else:
        found = named_pair(str(pair.name))
    paths = {"target": found.target, "draft": found.draft}
    prompts = Path(config.prompts) if config.prompts else found.prompts
    if prompts is not None:  # else the notebooks fall back on prompts of their own, and say so
        paths["prompts"] = prompts
    for name, path in paths.items():
        if not path.exists():
            raise ExperimentError(f"{name} {str(path)!r} does not exist", "an existing path", "check the path")
    if config.prompts:
        read_prompt_file(Path(config.prompts))
    return {name: path.resolve() for name, path in paths.items() if name in needed}


def config_hash(planned: list[Job], content: str) -> str:
    """Twelve hex digits over what is measured: jobs, their resolved parameters, the pair's content; no paths."""
    measured = []
    for job in planned:
        resolved = check_parameters(read_parameters(job.source), job.parameters)
        hidden = (*jobs.PAIR_PARAMETERS, *jobs.PLACE_PARAMETERS, *jobs.FILE_PARAMETERS)  # files count by their content
        measured.append([job.id, {name: value for name, value in resolved.items() if name not in hidden}])
    return hashlib.sha256(json.dumps([measured, content], sort_keys=True).encode()).hexdigest()[:12]


def check_place(run_dir: Path) -> None:
    """A run's place is a folder, or free.

    Raises:
        ExperimentError: it, or what should be a folder above it, is a file.
    """
    there = next((path for path in (run_dir, *run_dir.parents) if path.exists()), None)
    if there is not None and not there.is_dir():
        raise ExperimentError(f"--out: {there.name!r} is a file", "a new or empty folder", "choose another --out")


def check_resumable(run_dir: Path, digest: str, fingerprint: str) -> None:
    """A run folder may be new, empty, or hold this very configuration on this very machine.

    Raises:
        ExperimentError: it holds another run, another machine's run, or other files, or it is a file.
    """
    check_place(run_dir)
    if (run_dir / RUN_FILE).exists():
        held = read_plan(run_dir)
        if held["fingerprint"] != fingerprint:
            raise ExperimentError(
                f"--out {run_dir.name!r} holds a run of another machine ({held['fingerprint']}, here {fingerprint})",
                "a run folder of this machine, or a new one",
                "choose another --out; numbers of two machines are not one run",
            )
        if held["config_hash"] != digest:
            raise ExperimentError(
                f"--out {run_dir.name!r} holds a run of another configuration or pair",
                "a new folder, or one that a night of the same configuration left unfinished",
                "choose another --out",
            )
    elif run_dir.exists() and any(run_dir.iterdir()):
        raise ExperimentError(
            f"--out {run_dir.name!r} holds files that are not a run", "a new or empty folder", "choose another --out"
        )


def show_plan(plan: Plan) -> None:
    """Prints the jobs part by part, which of them are done already, how long each takes, and what that adds up to."""
    seconds = plan.expected_s()
    numbers = itertools.count(1)
    for part in sorted({job.part for job in plan.due}):
        own = [job for job in plan.due if job.part == part]
        if plan.config.budget is not None or plan.part.of > 1:
            print(f"part {part}: {_expected(own, seconds, plan.config.budget.part_s if plan.config.budget else None)}")
        for job in own:
            done = jobs.finished_outcome(job, plan.run_dir) is not None
            about = duration(seconds[job.id]) if job.id in seconds else "time not known yet"
            shown = {name: value for name, value in job.parameters.items() if name not in jobs.PAIR_PARAMETERS}
            print(f"{next(numbers):3}. {job.id}: {'already finished' if done else about}; {json.dumps(shown)}")
    if plan.config.budget is not None or seconds:
        print(f"together {_expected(plan.due, seconds, plan.config.budget.night_s if plan.config.budget else None)}")
    of = f" of part {plan.part}" if plan.part.of > 1 else ""
    print(f"{len(plan.due)} jobs{of}, into {plan.run_dir.name}/; nothing was started (--dry-run)")


def _expected(own: list[Job], seconds: dict[str, float], limit_s: float | None) -> str:
    """What jobs take together, for people."""
    unknown = sum(job.id not in seconds for job in own)
    total = f"{duration(sum(seconds.get(job.id, 0.0) for job in own))} expected"
    more = f", and {unknown} job{'' if unknown == 1 else 's'} of unknown time" if unknown else ""
    return total + more + (f", at most {duration(limit_s)}" if limit_s is not None else "")
