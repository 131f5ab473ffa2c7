"""`eagle3lab prove`: parts in order, a row as soon as a check is judged, a table at the end, one JSON line last."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from eagle3core.kernels import ARCHES
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError
from lab.pairs.planted import GEOMETRIES
from lab.probes.proofs.check import Check, Finding, TimeLimit, Verdict, run_checks
from lab.probes.proofs.plans import PARTS, SHIPPED, Plans, Proofs, build
from lab.rows.environment import collect
from lab.rows.store import RowWriter


def main(arguments: Sequence[str]) -> int:
    """Runs parts; 0 if all held, 1 if any failed, 3 if any could not run."""
    given = _parser().parse_args(list(arguments))
    parts = read_parts(given.parts)
    plans = Plans(geometry=given.geometry)
    if given.build is not None:
        n_made = build(plans, parts, given.arch, given.build, share=read_share(given.share))
        print(json.dumps({"command": "prove", "built": n_made}))
        return EXIT_PASSED
    limit = TimeLimit(given.limit_s)
    if not torch.cuda.is_available():
        return conclude(prove(parts, without_a_gpu, limit, given.out))
    proofs = Proofs(plans)
    try:
        return conclude(prove(parts, proofs.checks, limit, given.out))
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
    print(json.dumps({"command": "prove", "parts": by_part, "failed": failed}))
    if failed:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if counts["held"] and not counts["missing"] else EXIT_COULD_NOT_RUN


def read_parts(names: Sequence[str]) -> list[str]:
    """The parts named, all of them for none.

    Raises:
        ExperimentError: there is no such part.
    """
    for name in names:
        if name not in PARTS:
            raise ExperimentError(f"no part {name!r}", ", ".join(PARTS), "name parts to prove, or none for all")
    return list(names) or list(PARTS)


def read_share(text: str) -> tuple[int, int]:
    """(which, n) of "which/n".

    Raises:
        ExperimentError: another form.
    """
    which, _, n = text.partition("/")
    if not (which.isdigit() and n.isdigit() and int(which) < int(n)):
        raise ExperimentError(f"share {text!r}", "WHICH/N with WHICH below N, e.g. 0/2", "correct --share")
    return int(which), int(n)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3lab prove",
        description="Prove the GPU engine. Exit 0: all held, 1: something failed, 3: something could not run.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default all)")
    parser.add_argument("--out", type=Path, help="append rows to this file, NAME.jsonl")
    parser.add_argument("--limit-s", type=float, default=240.0, help="no check begins after this time (default 240)")
    parser.add_argument(
        "--geometry",
        choices=tuple(name for name in GEOMETRIES if name != SHIPPED),
        default="llama-3.1-8b",
        help="of the planted pair (default 8B)",
    )
    parser.add_argument("--build", type=Path, metavar="DIR", help="compile the kernels the parts need into DIR instead")
    parser.add_argument("--arch", choices=ARCHES, default="sm_90a", help="to compile for (default sm_90a)")
    parser.add_argument("--share", default="0/1", metavar="WHICH/N", help="compile every N-th kernel (default 0/1)")
    return parser
