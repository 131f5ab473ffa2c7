"""`eagle3lab profile`: take a capture of decode steps, or read a stored one; rows, and a trace for Perfetto."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.ending import tell_summary
from lab.errors import EXIT_PASSED, ExperimentError, LabError, RunFailed
from lab.options.reader import read_values
from lab.options.speed import ProfileOptions
from lab.options.values import Point, read_cut_name
from lab.probes.bench.command import chosen_device, chosen_dtype
from lab.probes.bench.run import Tell
from lab.probes.bench.scenario import Scenario
from lab.probes.profiles import tools
from lab.probes.profiles.capture import Capture, chrome_trace, read_chrome_trace
from lab.probes.profiles.ncu import NcuKernel, is_raw_page, read_ncu
from lab.probes.profiles.nsys import RangeSum, is_range_sums, read_range_sums, read_sqlite
from lab.probes.profiles.questions import QUERIES, copy_questions
from lab.probes.profiles.ranges import of_counters, of_sums, summed, values_of
from lab.probes.profiles.rows import FILE, TRACE, Told, lines_of, rows_not_had, rows_of
from lab.probes.proofs.steps import WARM_STEPS
from lab.probes.speed.command import dial
from lab.rows.environment import collect
from lab.rows.store import Row, RowWriter

NCU_STEPS = 1  # every kernel runs several times under it


@dataclass
class Taken:
    """Everything that was captured of one subject.

    Attributes:
        missing: reasons by what is not there. not_asked: the same of what nobody wanted.
    """

    told: Told
    tool: str = ""
    capture: Capture | None = None
    sums: list[RangeSum] = field(default_factory=list)
    counters: list[NcuKernel] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    not_asked: dict[str, str] = field(default_factory=dict)


def run(options: ProfileOptions) -> int:
    """Profiles; 0, or an error that says what could not be done."""
    if options.bare is not None:  # inside a tool that watches from outside
        scenario, point, k = subject_of(options)
        _told(scenario, point, k, options.steps).write(options.bare)
        return EXIT_PASSED
    taken = imported(options.imports, options.out) if options.imports else measure(options, options.out)
    rows = write(taken, options.out)
    print("\n".join(lines_of(rows)))
    tell_summary({
        "command": "profile", "tool": taken.tool, "n_rows": len(rows), "missing": taken.missing,
        "not_asked": taken.not_asked, "files": sorted(path.name for path in options.out.iterdir()),
    })  # fmt: skip
    return EXIT_PASSED


def measured(
    folder: Path, *, geometry: str, at: str, spec_k: int, steps: int, tool: str, device: str, tell: Tell = print
) -> Path:
    """Rows of this machine, fresh, in `folder`: what notebook 50_profile asks for."""
    given = {"geometry": geometry, "at": at, "spec": spec_k, "steps": steps, "tool": tool, "device": device}
    options = read_values(ProfileOptions, given, "eagle3lab profile")
    write(measure(options, folder, tell), folder)
    return folder / FILE


def measure(options: ProfileOptions, folder: Path, tell: Tell = print) -> Taken:
    """Captures by the tools that are wanted and there; every one that is not is named with its reason.

    Raises:
        RunFailed: a tool of Nsight was asked for by name and is not there, or failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scenario, point, k = subject_of(options)
    taken = Taken(Told(None, collect().fingerprint, None))
    child = [sys.executable, "-m", "lab", "profile", *_options(options, scenario), "--bare", str(folder)]
    if options.tool == "torch":
        taken.not_asked = {_LACKS["ncu"]: "torch's profiler alone was asked for"}
    for tool, take in (("nsys", _take_nsys), ("ncu", _take_ncu)):
        if options.tool not in ("auto", tool):
            continue
        try:
            if reason := _why_not(tool, scenario):
                raise RunFailed(reason, "a tool that is here, and a GPU", "use --tool auto or torch")
            take(taken, folder, child, options)
        except LabError as error:
            if options.tool == tool:
                raise RunFailed(f"{tool} was asked for: {error.what}", error.allowed, error.remedy) from error
            taken.missing[_LACKS[tool]] = error.what
    if taken.capture is None and options.tool != "ncu":
        from lab.probes.profiles.run import torch_capture

        taken.capture, watched = torch_capture(scenario, point, k, options.steps, folder)
        taken.told, taken.tool = Told.here(watched, collect()), "torch"
    for what, reason in (taken.missing | taken.not_asked).items():
        tell(f"without {what}: {reason}")
    return taken


def _take_nsys(taken: Taken, folder: Path, child: list[str], options: ProfileOptions) -> None:
    taken.capture = read_sqlite(tools.take_sqlite(folder, [*child, *_steps(options.steps)]))
    taken.told, taken.tool = Told.beside(folder / tools.SQLITE), "nsys"


def _take_ncu(taken: Taken, folder: Path, child: list[str], options: ProfileOptions) -> None:
    taken.counters = read_ncu(tools.take_raw_page(folder, [*child, *_steps(NCU_STEPS)], options.nvtx_include))
    if taken.capture is None:
        taken.told, taken.tool = Told.beside(folder / tools.RAW), "ncu"


_LACKS = {"nsys": "a capture by Nsight Systems", "ncu": "dram bandwidth and occupancy by Nsight Compute"}


def _why_not(tool: str, scenario: Scenario) -> str | None:
    return "the steps run on a CPU" if scenario.device != "cuda" else tools.why_none(tool)


def imported(paths: Sequence[Path], folder: Path) -> Taken:
    """Stored captures of one subject, of any tool, one file each.

    Raises:
        ExperimentError: a file that no reader here knows.
        RunFailed: a report of Nsight without the tool that exports it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = Taken(Told.beside(paths[0]))
    for path in paths:
        path = tools.export_sqlite(path, folder) if path.suffix == ".nsys-rep" else path
        path = tools.export_raw_page(path, folder) if path.suffix == ".ncu-rep" else path
        if path.suffix in (".sqlite", ".db"):
            taken.capture = read_sqlite(path)
        elif path.suffix in (".json", ".gz"):
            taken.capture = read_chrome_trace(path)
        else:
            _take_csv(taken, path)
    taken.tool = taken.capture.tool if taken.capture else "nsys" if taken.sums else "ncu"
    if not taken.counters:
        taken.not_asked[_LACKS["ncu"]] = "none was imported"
    if taken.told.watched is None:
        taken.missing["bytes and bandwidth of ranges"] = "no watched.json beside the capture says what the steps were"
    return taken


def _take_csv(taken: Taken, path: Path) -> None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if is_raw_page(lines):
        taken.counters = read_ncu(path)
    elif is_range_sums(lines):
        taken.sums = read_range_sums(path)
    else:
        raise ExperimentError(
            f"{path.name} is no capture that can be read",
            "nsys SQLite, nsys stats nvtx_gpu_proj_sum as CSV, ncu raw page as CSV, or a trace of torch's profiler",
            "see docs/measuring.md for the commands that write these",
        )


def write(taken: Taken, folder: Path) -> list[Row]:
    """Rows and the trace for Perfetto, in `folder`."""
    watched = taken.told.watched
    if watched is not None:
        taken.told.write(folder)
    if taken.capture is not None:
        profile, on_gpu = summed(taken.capture), taken.capture.has_kernels
        (folder / TRACE).write_text(json.dumps(chrome_trace(taken.capture)), encoding="utf-8")
        copy_questions(folder / QUERIES)
    else:
        profile, on_gpu = of_sums(taken.sums) if taken.sums else of_counters(taken.counters, NCU_STEPS), True
    values = values_of(profile, watched.declared if watched else {}, taken.counters, on_gpu=on_gpu)
    rows = rows_of(taken.told, folder.name, taken.tool, profile, values, on_gpu=on_gpu)
    if profile.n_unplaced:
        taken.missing["kernels without their call"] = f"{profile.n_unplaced}: their calls lie outside the capture"
    rows += rows_not_had(taken.told, folder.name, taken.tool, taken.missing, taken.not_asked)
    (folder / FILE).unlink(missing_ok=True)
    with RowWriter(folder / FILE) as writer:
        for row in rows:
            writer.write(row)
    return rows


def subject_of(options: ProfileOptions) -> tuple[Scenario, Point, int]:
    """Pair, point and depth of the options.

    Raises:
        ExperimentError: they name what is not there.
    """
    k = options.spec
    geometry = options.shapes("shipped" if options.pair == "shipped" else "nano")
    device = chosen_device(options.device, geometry)
    scenario = Scenario(
        geometry=geometry, pair=options.pair, points=(options.at,), ks=(0, k) if k else (0,),
        share=options.share if options.share is not None else dial(options.acceptance_length, k), warmup=WARM_STEPS,
        rounds=options.steps, dtype=chosen_dtype(options.dtype, device), device=device, peers=(), seed=options.seed,
        repeated=options.repeated,
    )  # fmt: skip
    return scenario, options.at, k


def _told(scenario: Scenario, point: Point, k: int, n_steps: int) -> Told:
    from lab.probes.profiles.run import watched_steps

    return Told.here(watched_steps(scenario, point, k, n_steps, None), collect())


def _options(options: ProfileOptions, scenario: Scenario) -> list[str]:
    """The options that say what is profiled, for a child."""
    name, layers = read_cut_name(scenario.geometry)
    cut = [] if layers is None else ["--layers", str(layers)]
    planted = ["--geometry", name, *cut, "--repeated", str(scenario.repeated)]
    pair = ["--pair", options.pair, *(planted if options.pair == "planted" else [])]
    return [
        *pair, "--at", str(options.at), "--spec", str(options.spec), "--share", str(scenario.share),
        "--dtype", scenario.dtype, "--device", scenario.device, "--seed", str(scenario.seed),
    ]  # fmt: skip


def _steps(n: int) -> list[str]:
    return ["--steps", str(n)]
