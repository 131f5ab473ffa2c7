"""`eagle3lab startup`: options, a row as soon as a kind of start was measured, one JSON line last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lab.ending import tell_summary
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_PASSED
from lab.options.bench import StartOptions
from lab.probes.bench.command import chosen_device, chosen_dtype
from lab.probes.start.measure import FILE, StartPlan, measure_starts
from lab.rows.environment import collect
from lab.rows.maker import RowMaker
from lab.rows.store import Row, RowWriter

JOB = "start"


def run(options: StartOptions) -> int:
    """Measures; 0, or 3 if a kind of start could not be measured."""
    device = chosen_device(options.device, options.geometry)
    plan = StartPlan(
        options.geometry, options.spec, options.context, options.batch, options.rounds,
        chosen_dtype(options.dtype, device), device,
    )  # fmt: skip
    rows = write_starts(plan, options.out, print)
    missing = [row.name for row in rows if row.status == "missing"]
    first = {row.name: row.values["first_token_s"] for row in rows if row.status == "measured"}
    tell_summary({"command": "startup", "first_token_s": first, "missing": missing})
    return EXIT_COULD_NOT_RUN if missing else EXIT_PASSED


def measured(
    folder: Path,
    *,
    geometry: str,
    ks: Sequence[int],
    context: int,
    rounds: int,
    device: str,
    tell: Callable[[str], None],
) -> Path:
    """Rows of this machine, fresh, in `folder`: what notebook 43_start asks for."""
    resolved = chosen_device(device, geometry)
    plan = StartPlan(geometry, tuple(ks), context, 1, rounds, chosen_dtype(None, resolved), resolved)
    write_starts(plan, folder / FILE, tell)
    return folder / FILE


def write_starts(plan: StartPlan, out: Path | None, tell: Callable[[str], None]) -> list[Row]:
    """Rows of a plan, each on disk as soon as it is made."""
    maker = RowMaker(out.stem if out else JOB, JOB, collect().fingerprint)
    if out is None:
        return measure_starts(plan, maker, lambda row: None, tell)
    with RowWriter(out) as writer:
        return measure_starts(plan, maker, writer.write, tell)
