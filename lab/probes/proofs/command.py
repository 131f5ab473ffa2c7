"""`eagle3lab prove`: parts in order, a row as soon as a check is judged, a table at the end, one JSON line last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from lab.ending import tell_summary
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError
from lab.options.proofs import ProveOptions
from lab.probes.proofs.check import Check, Finding, TimeLimit, Verdict, run_checks
from lab.probes.proofs.plans import PARTS, Plans, Proofs, build
from lab.probes.proofs.serving.plan import ServingPlan
from lab.rows.environment import collect
from lab.rows.store import RowWriter


def run(options: ProveOptions) -> int:
    """Runs parts; 0 if all held, 1 if any failed, 3 if any could not run."""
    parts = options.parts or PARTS
    serving = ServingPlan(options.clients, options.seconds)
    plans = Plans(geometry=options.geometry, serving=serving)
    if options.build is not None:
        n_made = build(plans, parts, options.arch, options.build, share=options.share)
        tell_summary({"command": "prove", "built": n_made})
        return EXIT_PASSED
    return conclude(_on_this_machine(plans, parts, options.limit_s, options.out))


def measured(folder: Path, part: str, *, geometry: str, limit_s: float) -> Path:
    """Rows of one part on this machine, fresh, in `folder`: what a notebook asks for."""
    out = folder / f"{part}.jsonl"
    _on_this_machine(Plans(geometry=geometry), [part], limit_s, out)
    return out


def _on_this_machine(plans: Plans, parts: Sequence[str], limit_s: float, out: Path | None) -> list[Finding]:
    limit = TimeLimit(limit_s)
    if not torch.cuda.is_available():
        return prove(parts, without_a_gpu, limit, out)
    proofs = Proofs(plans)
    try:
        return prove(parts, proofs.checks, limit, out)
    finally:
        proofs.close()


def prove(
    parts: Sequence[str], checks_of: Callable[[str], Iterable[Check]], limit: TimeLimit, out: Path | None
) -> list[Finding]:
    """Findings of parts; each one's row is on disk before the next check begins.

    A part whose checks cannot even be listed, such as for want of memory for its pair, is one finding.
    """
    environment, findings = collect(), []
    writer = RowWriter(out) if out is not None else None

    def tell(finding: Finding) -> None:
        print(finding.line(), flush=True)
        if writer is not None:
            writer.write(finding.row(out.stem if out else "prove", environment))

    try:
        for part in parts:
            listed: list[Check] = []

            def opened(part: str = part, listed: list[Check] = listed) -> Verdict:
                for check in checks_of(part):  # what was listed before an error is still judged
                    listed.append(check)
                return Verdict(True, f"{len(listed)} checks", {"n_checks": len(listed)})

            findings += run_checks([Check(part, "opened", {}, opened)], limit, tell)
            findings += run_checks(listed, limit, tell)
    finally:
        if writer is not None:
            writer.close()
    return findings


def without_a_gpu(part: str) -> Iterable[Check]:
    """What there is of a part where no GPU is: a reason."""
    raise ExperimentError(
        f"{part} is proven on a GPU and torch sees none", "a CUDA device", "run it on a machine with one"
    )


def conclude(findings: Sequence[Finding]) -> int:
    """Prints the table of what did not hold, the counts, and the JSON line; gives the exit code."""
    counts = {word: sum(finding.word == word for finding in findings) for word in ("held", "FAILED", "missing")}
    others = [finding for finding in findings if finding.word != "held"]
    print(f"\n{counts['held']} held, {counts['FAILED']} failed, {counts['missing']} missing")
    for finding in others:
        print(finding.line())
    by_part: dict[str, dict[str, int]] = {}
    for finding in findings:
        part = by_part.setdefault(finding.check.part, dict.fromkeys(("held", "FAILED", "missing"), 0))
        part[finding.word] += 1
    print(f"\n{'part':10s} {'held':>6s} {'failed':>6s} {'missing':>7s}")
    for name, one in by_part.items():
        print(f"{name:10s} {one['held']:6d} {one['FAILED']:6d} {one['missing']:7d}")
    failed = [finding.check.label for finding in findings if finding.word == "FAILED"]
    tell_summary({"command": "prove", "parts": by_part, "failed": failed})
    if failed:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if counts["held"] and not counts["missing"] else EXIT_COULD_NOT_RUN
