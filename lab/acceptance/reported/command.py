"""`eagle3lab import`: acceptance that another system reported, as rows beside ours, and parity with them.

Every row says mean acceptance length with the bonus token and without, acceptance rate as a share, and, where positions
are known, the share of steps that commit two tokens or more, the histogram of accepted drafts, and acceptance by
position among the steps that reached it.
Source: docs/requirements.md R-140; 1.X-19 for the terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.acceptance.reported.files import read_acceptance
from lab.acceptance.reported.forms import LENGTH, RATE, TWO, Acceptance
from lab.acceptance.reported.positions import differences, sentence
from lab.ending import tell_summary
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError
from lab.options.exchange import ImportOptions
from lab.rows.environment import collect
from lab.rows.maker import RowMaker
from lab.rows.store import Row, RowWriter, read_rows
from lab.rows.values import number_of

KIND = "acceptance"
# How far apart two systems may be on the same prompts: near-ties between their kernels move a token here and there.
TOLERANCE = {LENGTH: 0.05, RATE: 0.05, TWO: 0.05}
OF_A_REQUEST = "eagle_speculation."  # before the names that a response has


def run(options: ImportOptions) -> int:
    """Reads a file; 0, or 1 if --against finds a value outside its tolerance."""
    found = read_acceptance(options.file)
    rows = [_row(one, options.name or options.file.stem, number) for number, one in enumerate(found, start=1)]
    if options.out is not None:
        with RowWriter(options.out) as writer:
            for row in rows:
                writer.write(row)
    for row in rows:
        print(f"{row.name}: {row.values[LENGTH]:.3f} tokens a step, bonus included, rate {row.values[RATE]}")
        if row.values["accepted_histogram"]:
            print(f"  steps by accepted drafts, from 0: {row.values['accepted_histogram']}")
    if options.against is None:
        tell_summary({"command": "import", "n": len(rows)})
        return EXIT_PASSED
    ours = our_row(options.against, options.row)
    apart = [parity(row.values, ours.values) for row in rows]
    print("\n".join(line for lines in apart for line in lines.values()))
    positions = [_by_position(one, ours) for one in found]
    print("\n".join(line for lines, _ in positions for line in lines))
    outside = [name for lines in apart for name, line in lines.items() if line.startswith("fail")]
    tell_summary({"command": "import", "n": len(rows), "against": ours.name, "outside": outside,
                      "first_positions": [first for _, first in positions]})  # fmt: skip
    return EXIT_GATE_FAILED if outside else EXIT_PASSED


def our_row(path: Path, name: str) -> Row:
    """The measured row of that name; rows of 31_acceptance (`spec-3`) and of the bench both serve.

    Raises:
        ExperimentError: none.
    """
    rows = [row for row in read_rows(path) if row.status == "measured" and row.values.get(LENGTH) is not None]
    for row in reversed(rows):
        if name in ("", row.name):
            return row
    known = ", ".join(dict.fromkeys(row.name for row in rows)) or "none"
    raise ExperimentError(f"no row {name!r} with an acceptance length in {path.name}", known, "name one with --row")


def parity(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, str]:
    """A line a value: "pass" within its tolerance (relative for the length), "fail", or "missing" with a side."""
    ours_of = {
        LENGTH: ours.get(LENGTH),
        RATE: ours.get(RATE, ours.get(f"{OF_A_REQUEST}{RATE}")),
        TWO: _two_or_more(ours),
    }
    lines = {}
    for name, tolerance in TOLERANCE.items():
        their, our = number_of(theirs.get(name)), number_of(ours_of[name])
        if their is None or our is None:
            lines[name] = f"missing {name}: theirs {their}, ours {our}"
            continue
        apart = abs(our - their) / (their if name == LENGTH else 1.0)
        word = "pass" if apart <= tolerance else "fail"
        lines[name] = f"{word} {name}: theirs {their:.4g}, ours {our:.4g}, apart {apart:.3f} (at most {tolerance})"
    return lines


def _by_position(one: Acceptance, ours: Row) -> tuple[list[str], int | None]:
    """Lines that compare positions, and the first that differs; what is missing where a side has no histogram."""
    values = ours.values
    counted = values.get("accepted_histogram") or values.get(f"{OF_A_REQUEST}accepted_histogram")
    if not one.histogram or not isinstance(counted, list) or not all(isinstance(n, int) for n in counted):
        side = one.system if not one.histogram else f"our row {ours.name}"
        return [f"missing positions: {side} tells no histogram of accepted drafts"], None
    found = differences(one.histogram, [n for n in counted if isinstance(n, int)])
    first = next((difference.position for difference in found if difference.differs), None)
    return [*(difference.line() for difference in found), sentence(found)], first


def _two_or_more(values: Mapping[str, Any]) -> object:
    """The share of steps that commit at least two tokens: those that accept the first draft."""
    shares = values.get("acceptance_by_position") or values.get(f"{OF_A_REQUEST}acceptance_by_position")
    return shares[0] if isinstance(shares, list) and shares else None


def _row(one: Acceptance, name: str, number: int) -> Row:
    maker = RowMaker("import", "import", collect().fingerprint)
    return maker.measured(KIND, f"{name}/{one.system}", one.values(), {"system": one.system, "entry": number})
