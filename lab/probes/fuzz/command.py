"""`eagle3lab fuzz`: damaged inputs by the thousand, a line a group, a line a finding, a summary last."""

from __future__ import annotations

from lab.ending import tell_summary
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.fuzz import FuzzOptions
from lab.probes.fuzz.group import chosen_groups
from lab.probes.fuzz.run import fuzz, quiet_libraries


def run(options: FuzzOptions) -> int:
    """Runs the cases; 0 if nothing was found, 1 otherwise."""
    quiet_libraries()
    groups = chosen_groups(options.groups)
    first, step = options.share
    numbers = [options.case] if options.case is not None else list(range(options.cases))[first::step]
    tallies, findings = fuzz(groups, numbers, options.seed, tell=_tell, keep=options.keep)
    for finding in findings:
        _tell(finding.line)
    summary = {
        "command": "fuzz",
        "seed": options.seed,
        "groups": {tally.group: dict(tally.counts) for tally in tallies},
        "n_cases": sum(sum(tally.counts.values()) for tally in tallies),
        "slowest_s": round(max((tally.slowest_s for tally in tallies), default=0.0), 3),
        "most_bytes": max((tally.most_bytes for tally in tallies), default=0),
        "n_findings": len(findings),
    }
    tell_summary(summary)
    return EXIT_GATE_FAILED if findings else EXIT_PASSED


def _tell(line: str) -> None:
    print(line, flush=True)
