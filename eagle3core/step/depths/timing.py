"""What each step takes before anything runs: over empty slots, by the device's clock, once an engine is made.

Empty slots read no keys, so attention is missing; every matrix product is there with all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median

import torch

from eagle3core.step.depths.kinds import KEEPS, READS

WARM_UP, REPEATS = 2, 5

Times = dict[tuple[int, int], float]


def times_of(steps: Mapping[tuple[int, int], Callable[[], None]], device: torch.device, n_kept: int) -> Times:
    """Microseconds by (drafts, rows), from steps by (kind, rows); those without drafts as they take turns.

    Nothing where the device has no clock of its own: steps are then timed as they run.
    """
    if device.type != "cuda":
        return {}
    found = {key: _took_us(run, device) for key, run in steps.items()}
    return averaged(found, n_kept)


def averaged(times: Times, n_kept: int) -> Times:
    """By (drafts, rows): of `n_kept` steps without drafts one reads and the others keep."""
    made = {key: us for key, us in times.items() if key[0] > READS}
    for (kind, rows), us in times.items():
        if kind == READS:
            kept = times.get((KEEPS, rows), us)
            made[0, rows] = kept + (us - kept) / max(n_kept, 1)
    return made


def _took_us(run: Callable[[], None], device: torch.device) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    for _ in range(WARM_UP):
        run()
    marks[0].record(stream)
    for mark in marks[1:]:
        run()
        mark.record(stream)
    marks[-1].synchronize()
    return 1e3 * median(float(before.elapsed_time(after)) for before, after in pairwise(marks))
