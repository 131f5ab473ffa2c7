"""`eagle3lab doctor draft`: the verdict first, then the lamps, then what they rest on."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from eagle3core.checkpoint import preflight
from eagle3core.errors import CheckpointError
from lab.doctor.draft.examine import Diagnosis, base_table, examine, teller
from lab.doctor.draft.given import case_of
from lab.doctor.draft.look import Judged
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.doctor import DraftDoctorOptions
from lab.rows.environment import collect
from lab.rows.maker import RowMaker
from lab.rows.store import RowWriter

NAME = "doctor draft"


def run(options: DraftDoctorOptions) -> int:
    """Examines a head; 0: nothing to mend, 1: a red lamp, 3: the pair cannot be read at all, or a lamp failed."""
    started = time.perf_counter()
    case, source = case_of(
        str(options.target), str(options.draft), "" if options.prompts is None else str(options.prompts),
        k=options.spec_k, n_prompts=options.n_prompts, max_prompt_tokens=options.max_prompt_tokens,
        max_new_tokens=options.max_new_tokens, device=options.device, fast=options.fast, fault=options.fault,
        norm_output=options.norm_output, speed_rows=options.speed_rows,
    )  # fmt: skip
    case = replace(case, reference_target=options.reference_target, claimed=options.claimed, method=options.method)
    try:
        if case.torch_device.type == "cpu" and case.is_small and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # which small products are several times quicker on
        on_lamp = None if options.fast else teller(lambda told: print(told, file=sys.stderr, flush=True))
        diagnosis = examine(
            case, fast=options.fast, limit_s=options.limit_s, processes=options.processes, on_lamp=on_lamp
        )
    except CheckpointError as refused:
        looked = preflight(options.target, options.draft)
        print("\n".join(looked.lines or [str(refused)]))
        print("The head cannot be read, so no lamp can look at it.")
        return EXIT_COULD_NOT_RUN
    print("\n".join(lines(diagnosis, source, time.perf_counter() - started)))
    for refusal in case.refusals:
        print(f"the engine refuses these files: {refusal}")
    if options.out is not None:
        write(diagnosis, options)
    if diagnosis.of("red"):
        return EXIT_GATE_FAILED
    return EXIT_COULD_NOT_RUN if diagnosis.failed or diagnosis.reason else EXIT_PASSED


def lines(diagnosis: Diagnosis, source: str, seconds: float) -> list[str]:
    """The report for people."""
    told = [diagnosis.verdict, ""]
    for i, each in enumerate(diagnosis.of("red")):
        told += _red(i + 1, each)
    told += [f"cannot tell  {each.lamp.name}: {each.finding.said}" for each in diagnosis.of("unknown")]
    n_failed = len(diagnosis.failed)
    told += [f"{n_failed} lamp{'s' * (n_failed > 1)} failed: report it with these lines"] if n_failed else []
    green = [each.lamp.name for each in diagnosis.of("green")]
    told += [f"green        {', '.join(green)}"] if green else []
    told += [f"no figures: {diagnosis.reason}"] if diagnosis.reason else []
    base = diagnosis.base
    if base is not None:
        told += [
            "",
            f"acceptance {diagnosis.length:.2f} tokens a step at spec-{base.k}, {base.n_steps} steps; {source}",
        ]
        told += ["level  fed its own  with the truth"]
        told += [
            f"{row['level']:5d}  {_percent(row['self_fed'])}  {_percent(row['teacher_forced'])}"
            for row in base_table(base)
        ]
    if diagnosis.comparison is not None:
        told.append(diagnosis.comparison.verdict)
    slowest = max(diagnosis.judged, key=lambda each: each.seconds)
    told.append(f"took {seconds:.1f} s; the longest lamp was {slowest.lamp.name}, {slowest.seconds:.1f} s")
    return told


def _red(place: int, each: Judged) -> list[str]:
    repair = each.finding.repair
    assert repair is not None, "a red lamp has its repair"
    given = f" (if fixed: acceptance {repair.counterfactual})" if repair.counterfactual else ""
    return [f"{place}. red       {each.lamp.name}{given}: {each.finding.said}", f"             change: {repair.change}"]


def _percent(share: float | None) -> str:
    return f"{'-':>11}" if share is None else f"{share:>11.0%}"


def write(diagnosis: Diagnosis, options: DraftDoctorOptions) -> None:
    """Appends the rows of a diagnosis."""
    assert options.out is not None, "asked for"
    out = Path(options.out)
    maker = RowMaker(out.stem, NAME, collect().fingerprint)
    parameters = {"pair": f"{options.target.name} + {options.draft.name}", "k": options.spec_k, "fault": options.fault}
    with RowWriter(out) as writer:
        for kind, name, values, reason in diagnosis.records():
            if reason:
                writer.write(maker.missing(kind, name, reason, parameters))
            else:
                writer.write(maker.measured(kind, name, values, parameters))
