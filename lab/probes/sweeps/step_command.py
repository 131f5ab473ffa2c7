"""`eagle3lab sweep step`: settings of matrix products, judged in the passes of whole steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from eagle3core.kernels import cubins, tuned
from eagle3core.step import DeviceRunner, variants_of
from lab.ending import tell_summary
from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.sweeps import StepOptions
from lab.pairs.planted import find_geometry
from lab.probes.proofs.plans import planted_prompts, shapes_of
from lab.probes.proofs.subject import open_subject
from lab.probes.sweeps.command import conclude, machine_of
from lab.probes.sweeps.in_step import (
    StepSweep,
    StepUnderSweep,
    competing_variants,
    regimes_of,
    step_setting,
)
from lab.probes.sweeps.machines import TwinMachine
from lab.probes.sweeps.regimes import Regime
from lab.probes.sweeps.rows import SweepWriter


def run(options: StepOptions) -> int:
    """Sweeps; 0, or 1 if bits differed, or 4 if something could not be decided.

    Raises:
        ExperimentError: there is no GPU, a step has no such name, or no regime is named so.
    """
    if options.rows is not None:
        return conclude("gemm", options, options.rows, options.arch, is_whole=True)
    shapes = shapes_of(find_geometry(options.geometry), options.arch, options.formats)
    runners = {
        name: shapes.runner(step_setting(name, options.context, options.batch)) for name in options.steps
    }  # fmt: skip
    regimes = named_so(regimes_of(runners, options.arch, options.model), options.only)
    if options.build is not None:
        return _build(options, runners, regimes, options.build)
    machine = machine_of(options.device)
    if isinstance(machine, TwinMachine):
        raise ExperimentError(
            "sweep step without a GPU", "a GPU: an emulator's step says nothing of one",
            "run it there; --build and --rows need none",
        )  # fmt: skip
    assert options.out is not None, "the options name a file for rows"
    subject = open_subject(options.geometry, formats=options.formats)
    assert subject.tokens is not None, "the pair is planted"
    prompts = planted_prompts(subject.tokens, options.batch, options.context)
    steps = {
        name: StepUnderSweep(subject, name, prompts, machine.gpu, options.model) for name in options.steps
    }  # fmt: skip
    writer = SweepWriter(options.out, machine.gpu, machine.timer)
    sweep = StepSweep(machine, writer, steps, deadline=time.monotonic() + options.limit_s)
    is_whole = sweep.run(regimes)
    return conclude("gemm", options, options.out, machine.arch, is_whole=is_whole)


def named_so(regimes: list[Regime], text: str) -> list[Regime]:
    """The regimes whose name holds a text.

    Raises:
        ExperimentError: none does.
    """
    found = [one for one in regimes if text in one.name]
    if not found:
        names = ", ".join(repr(one.name) for one in regimes)
        raise ExperimentError(f"--only is {text!r}, of no regime's name", f"a part of {names}", "take one of these")
    return found


def _build(options: StepOptions, runners: Mapping[str, DeviceRunner], regimes: list[Regime], out: Path) -> int:
    """Compile what competes, and what fills the engines."""
    filling = [one for runner in runners.values() for one in variants_of(runner.all_programs)]
    known = tuned.active(options.arch)
    gpu = tuned.gpu_kind(options.arch) or ("" if known is None else known.gpu)
    competing = competing_variants(runners, options.arch, regimes, gpu, options.model)
    wanted = {(one.name, repr(one.constants)): one for one in (*filling, *competing)}
    which, of = options.share
    made = cubins.build_cubins(list(wanted.values())[which - 1 :: of], options.arch, out, tell=print)
    tell_summary({"command": "sweep step", "wanted": len(wanted), "built": made})
    return EXIT_PASSED
