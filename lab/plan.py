"""A night that is ready to begin: everything that can be refused is refused here, before anything is started."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab import environment, history, jobs, parts
from lab.configuration import packaged
from lab.errors import ExperimentError, RunFailed
from lab.jobs import Job, NightConfig
from lab.notebook import declared
from lab.parameters import check_parameters, find_notebook, parse_value, read_parameters
from lab.parts import Part
from lab.progress import duration
from lab.store import JOBS_FOLDER, utc_now
from lab.summary import RUN_FILE, read_plan

PACKAGED_CONFIG = "nightly.toml"


@dataclass(frozen=True)
class NightOptions:
    """What the command line may say; each beats the configuration file."""

    config: Path | None = None
    target: Path | None = None
    draft: Path | None = None
    prompts: Path | None = None
    out: Path | None = None
    require_gpu: bool = False
    strict_undecided: bool = False
    dry_run: bool = False
    part: str | None = None
    pack: Path | None = None
    resume_from: Path | None = None


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


def prepare(options: NightOptions, config: NightConfig | None = None, *, gate_required: bool = True) -> Plan:
    """Reads and checks everything; starts and writes nothing."""
    config = with_options(config or jobs.load_config(options.config or packaged_config()), options)
    machine = environment.collect()
    if options.require_gpu and not machine.gpus:
        raise RunFailed(
            f"--require-gpu was given and there is no GPU: {machine.no_gpu_reason}",
            "a CUDA device that torch can use",
            "run `eagle3lab doctor` to see why not, or leave --require-gpu away",
        )
    run_dir = (options.out or Path("reports") / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")).resolve()
    paths = pair_paths(config)
    # Relative to a job's folder, where its notebook runs: a report folder then holds no absolute path.
    job_folder = run_dir / JOBS_FOLDER / "job"
    filled = {name: os.path.relpath(path, job_folder) for name, path in paths.items()}
    content = jobs.content_hash(*(paths[name] for name in sorted(paths)))
    state = json.dumps([machine.source, machine.fingerprint, content])
    planned = jobs.expand(config, filled, state)
    digest = config_hash(planned, content)
    check_resumable(run_dir, digest, machine.fingerprint)
    part = parts.read_part(options.part or "1/1")
    if part.of > 1:
        part.jobs_of(planned)
    started = str(read_plan(run_dir)["started_at"]) if (run_dir / RUN_FILE).exists() else utc_now()
    earlier = history.comparable_runs(run_dir, machine.fingerprint, digest, started)
    return Plan(run_dir, planned, machine, config, digest, earlier, options.strict_undecided, gate_required, part)


def one_notebook(notebook: str, settings: list[str], timeout_s: float) -> NightConfig:
    """The configuration of a night with a single job; `settings` are `name=value` texts.

    Raises:
        ExperimentError: a setting is not `name=value`, or its name or type is wrong.
    """
    specs = {spec.name: spec for spec in read_parameters(find_notebook(notebook))}
    given: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ExperimentError(f"-p {setting!r} has no '='", "-p name=value", "write the name, =, and the value")
        if name in jobs.PAIR_PARAMETERS:
            raise ExperimentError(f"-p {name}=... was given", f"--{name} PATH", f"use --{name} instead")
        given[name] = parse_value(specs[name], text) if name in specs else text
    return NightConfig(job=[jobs.JobConfig(notebook=notebook, parameters=given, timeout_s=timeout_s)])


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
    return config.model_copy(update=update)


def pair_paths(config: NightConfig) -> dict[str, Path]:
    """Existing paths for those of `target`, `draft` and `prompts` that some notebook declares.

    Raises:
        ExperimentError: a directory or file that a notebook needs is not there.
    """
    needed = set().union(*(declared(find_notebook(job.notebook)) for job in config.job)) & set(jobs.PAIR_PARAMETERS)
    if not needed:
        return {}
    from lab import pairs  # here, so that a night without a pair needs none

    pair = config.pair
    if pair.target and pair.draft:
        found = pairs.pair_on_disk(Path(pair.target), Path(pair.draft))
    elif pair.name == "shipped":
        found = pairs.shipped_pair()
    else:
        raise ExperimentError(f"no pair is called {pair.name!r}", '"shipped"', "name it, or give target and draft")
    paths = {"target": found.target, "draft": found.draft}
    prompts = Path(config.prompts) if config.prompts else found.prompts
    if prompts is not None:  # else the notebooks fall back on prompts of their own, and say so
        paths["prompts"] = prompts
    for name, path in paths.items():
        if not path.exists():
            raise ExperimentError(f"{name} {str(path)!r} does not exist", "an existing path", "check the path")
    return {name: path.resolve() for name, path in paths.items() if name in needed}


def config_hash(planned: list[Job], content: str) -> str:
    """Twelve hex digits over what is measured: jobs, their resolved parameters, the pair's content; no paths."""
    measured = []
    for job in planned:
        resolved = check_parameters(read_parameters(job.source), job.parameters)
        hidden = (*jobs.PAIR_PARAMETERS, *jobs.PLACE_PARAMETERS)
        measured.append([job.id, {name: value for name, value in resolved.items() if name not in hidden}])
    return hashlib.sha256(json.dumps([measured, content], sort_keys=True).encode()).hexdigest()[:12]


def check_resumable(run_dir: Path, digest: str, fingerprint: str) -> None:
    """A run folder may be new, empty, or hold this very configuration on this very machine.

    Raises:
        ExperimentError: it holds another run, another machine's run, or other files.
    """
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
    """Prints the jobs, which of them are done already, and how long the rest took before."""
    seconds = history.job_seconds(plan.earlier)
    for index, job in enumerate(plan.due, start=1):
        done = jobs.finished_outcome(job, plan.run_dir) is not None
        about = duration(seconds[job.id]) if job.id in seconds else "time not known yet"
        shown = {name: value for name, value in job.parameters.items() if name not in jobs.PAIR_PARAMETERS}
        print(f"{index:3}. {job.id}: {'already finished' if done else about}; {json.dumps(shown)}")
    of = f" of part {plan.part}" if plan.part.of > 1 else ""
    print(f"{len(plan.due)} jobs{of}, into {plan.run_dir.name}/; nothing was started (--dry-run)")
