"""The host's own time for a step, of the steps in which nothing else slowed the host down.

A shared processor runs the same code two to four times slower for a while. A short loop before and after every step
tells: steps beside a slow loop say more about the neighbours than about the engine, and are set aside. What decides is
the loop alone, so a slow step beside quick loops counts. Source: derived here; measurements in docs/log.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lab.probes.proofs.check import Verdict
from lab.rows.clock import quantile

MOST_HOST_US = 150.0
DISTURBED = 1.15  # of the quickest loop's time
LEAST_SHARE = 0.2  # of the steps asked for, below which nothing is said
_LOOP = 600


@dataclass(frozen=True)
class HostStep:
    """One step's time on the host and that of the slower of the two loops around it, us."""

    us: float
    loop_us: float


def loop_us() -> float:
    """Time of a loop of some 30 us that touches no memory, us."""
    start, total = time.perf_counter_ns(), 0
    for i in range(_LOOP):
        total += i * i
    return (time.perf_counter_ns() - start) / 1e3


def undisturbed(steps: Sequence[HostStep]) -> list[HostStep]:
    """The steps between two loops as quick as the quickest one, nearly."""
    quickest = min((step.loop_us for step in steps), default=0.0)
    return [step for step in steps if step.loop_us <= DISTURBED * quickest]


def judge_host_time(steps: Sequence[HostStep], n_steps: int) -> Verdict:
    """Whether a step takes the host less than `MOST_HOST_US`; None where too few of `n_steps` were undisturbed."""
    kept = undisturbed(steps)
    values: dict[str, Any] = {
        "host_us_samples": [step.us for step in steps], "loop_us_samples": [step.loop_us for step in steps],
        "n_undisturbed": len(kept), "host_us_of_all": median(step.us for step in steps) if steps else None,
        "threshold_us": MOST_HOST_US,
    }  # fmt: skip
    if len(kept) < LEAST_SHARE * n_steps:
        return Verdict(None, f"something else slowed the host in all but {len(kept)} of {len(steps)} steps", values)
    times = [step.us for step in kept]
    values |= {"host_us": median(times), "host_us_p90": quantile(times, 0.9)}
    detail = (
        f"{values['host_us']:.0f} us a step to admit, enqueue, read and retire, waiting left out (p90 "
        f"{values['host_us_p90']:.0f} us); {len(kept)} of {len(steps)} steps undisturbed, all: "
        f"{values['host_us_of_all']:.0f} us"
    )
    return Verdict(values["host_us"] < MOST_HOST_US, detail, values)
