"""Rows of the bench, and the nested record that docs/requirements.md R-125 and R-126 describe, a view of a row.

A row is flat; a name with a dot, such as `latency_ms_per_token.mean`, is a value of a block of the record.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3core.metrics import EagleMetricsSummary, SpeculativeDecodingStats
from eagle3core.performance import PERF_MODE_VARIABLE
from eagle3core.request import Response
from lab.probes.bench.memory import device_bytes
from lab.probes.bench.scenario import Point, Scenario
from lab.rows.environment import Environment
from lab.rows.maker import RowMaker
from lab.rows.store import Row, Value, block, nested, utc_now
from lab.rows.throttle import held_back

NAME = "bench"
GB = 1e9


@dataclass
class Rows:
    """Makes rows of one run.

    Attributes:
        run: name of the run.
        environment: the machine.
        rows: made so far.
        job: the command that makes them.
        shared: parameters of every row.
    """

    run: str
    environment: Environment
    rows: list[Row]
    job: str = NAME
    shared: dict[str, Any] = field(default_factory=dict)

    def measured(
        self,
        name: str,
        values: dict[str, Any],
        parameters: dict[str, Any],
        scenario: Scenario,
        *,
        kind: str = NAME,
        timer: str = "perf_counter",
    ) -> Row:
        """A measured row."""
        row = self.maker.measured(
            kind, name, values, parameters, timer=timer, warmup=scenario.warmup, repeats=scenario.rounds
        )
        self.rows.append(row)
        return row

    def missing(self, name: str, reason: str, parameters: dict[str, Any], *, kind: str = NAME) -> Row:
        """A row that says why there is no measurement."""
        row = self.maker.missing(kind, name, reason, parameters)
        self.rows.append(row)
        return row

    @property
    def maker(self) -> RowMaker:
        """What makes a row without keeping it."""
        return RowMaker(self.run, self.job, self.environment.fingerprint, shared=self.shared)


def record_of(row: Row) -> dict[str, Any]:
    """The row with its blocks nested; a missing one has its reason and no numbers."""
    record: dict[str, Any] = {"name": row.name, "status": row.status, "parameters": dict(row.parameters)}
    if row.reason:
        record["reason"] = row.reason
    return {**record, **nested(row.values)}


def scenario_block(scenario: Scenario, point: Point, k: int) -> dict[str, Value]:
    """What was asked for. `micro_run`: a fixed number of tokens past end tokens, so modes do the same work."""
    return block(
        "scenario",
        {
            "name": scenario.name(point, k),
            "batch_size": point.batch,
            "context_length": point.context,
            "max_new_tokens": scenario.tokens,
            "use_speculation": k > 0,
            "num_spec_tokens": k,
            "perf_mode": is_perf_mode(),
            "micro_run": True,
        },
    )


def is_perf_mode() -> bool:
    """Whether a broken invariant ends the run."""
    return bool(os.environ.get(PERF_MODE_VARIABLE))


def system_block(environment: Environment, device: torch.device) -> dict[str, Value]:
    """What it ran on."""
    gpu = environment.gpus[0].name if environment.gpus and device.type == "cuda" else None
    return block(
        "system",
        {
            "gpu_name": gpu,
            "gpu_memory_total_gb": device_bytes(device) / GB if gpu else None,
            "throttled": held_back() if gpu else None,
            "cpu": environment.cpu,
            "timestamp": utc_now(),
            "build_id": f"{environment.commit or 'unknown'}{'-dirty' if environment.dirty else ''}",
            "source": environment.source,
        },
    )


def spread_block(name: str, samples: Sequence[float]) -> dict[str, Value]:
    """Mean, least, largest and every value of a run's rounds."""
    values = list(samples)
    return block(
        name, {"mean": sum(values) / len(values), "min": min(values), "max": max(values), "values": list(values)}
    )


def memory_block(used: Sequence[int], device: torch.device) -> dict[str, Value]:
    """Memory in use after each round."""
    mean, most = sum(used) / len(used), max(used)
    return block(
        "memory_gb",
        {"mean": mean / GB, "max": most / GB, "utilization_pct": 100 * most / device_bytes(device)},
    )


def speculation_block(responses: Sequence[Response], k: int) -> dict[str, Value]:
    """Counters of speculation over `responses`; nothing for the baseline."""
    if k == 0:
        return {}
    stats = SpeculativeDecodingStats(k)
    for response in responses:
        stats.update_from_output(response)
    summary = EagleMetricsSummary.from_stats(stats)
    return {} if summary is None else block("eagle_speculation", summary.to_dict())


def speculation_totals(n_drafts: int, n_drafted: int, n_accepted: int) -> dict[str, Value]:
    """The block's counters from totals, of a system that keeps no record of single steps."""
    return block(
        "eagle_speculation",
        {
            "enabled": True,
            "num_drafts": n_drafts,
            "total_draft_tokens": n_drafted,
            "total_accepted_tokens": n_accepted,
            "mean_acceptance_rate": n_accepted / n_drafted if n_drafted else None,
            "mean_acceptance_length": 1 + n_accepted / n_drafts if n_drafts else None,
        },
    )
