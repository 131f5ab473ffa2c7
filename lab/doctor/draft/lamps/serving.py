"""Whether speculation with this head pays where it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3core import Engine
from lab.doctor.draft.case import Case
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.lamps.runs import runs
from lab.probes.speed.recommend import Acceptance, Choice, break_even_batch
from lab.probes.speed.rows import read_speed

FAR_BATCH = 2  # times as many requests as those examined, or as few: there a step's cost says nothing of theirs
LEAST_GAIN = 0.03  # below plain decoding by less than this is within the rounds' spread

# Step over plain step, by batch and depth.
Costs = Mapping[int, Mapping[int, float]]


@runs("slower")
def look_at_speed(case: Case) -> Finding:
    """Tokens of a step over what it costs, at the case's batch and depth."""
    lamp = "slower"
    costs, source = measured_costs(case)
    if not costs:
        return Finding(lamp, "unknown", source)
    found = {batch: _choice(case, batch, by_depth) for batch, by_depth in sorted(costs.items())}
    batch = min(found, key=lambda each: (abs(each - case.batch), each))
    best, own = found[batch], _speedup(case, costs[batch], case.k)
    if own is None:
        return Finding(lamp, "unknown", f"{source} has no step of {case.k} drafts at batch {batch}")
    border = break_even_batch(list(found.values()))
    where = f"no depth pays from batch {border} on" if border else f"some depth pays up to batch {max(found)}"
    said = (
        f"at batch {batch} a step of {case.k} drafts is {own:.2f} times as fast as plain decoding; {where} ({source})"
    )
    values = (("batch", batch), ("speedup", own), ("best_k", best.k), ("break_even_batch", border))
    if own >= 1 - LEAST_GAIN:
        if not 1 / FAR_BATCH <= batch / case.batch <= FAR_BATCH:
            said += f"; of batch {case.batch}, which this head is examined for, that says nothing"
            return Finding(lamp, "unknown", said, values=values)
        return Finding(lamp, "green", said, values=values)
    change = f"num_speculative_tokens={best.k}" if best.k else "decode without drafts"
    change += f" from batch {batch} on, or adaptive=True" if best.k == 0 else f" at batch {batch}"
    return Finding(lamp, "red", said, Repair(change, own, best.speedup), 0.7, values)


def _lengths(case: Case) -> Acceptance:
    """Acceptance by position, as the head in plain torch has it."""
    reached, shares = 1.0, list[float]()
    for share in case.base.self_fed:
        reached *= share if share == share else 0.0  # NaN where no step came so far
        shares.append(reached)
    return Acceptance("as measured", tuple(shares))


def _speedup(case: Case, over: Mapping[int, float], k: int) -> float | None:
    length = case.base.length if k == case.k else _lengths(case).length(k)
    return None if k not in over or length is None else length / over[k]


def _choice(case: Case, batch: int, over: Mapping[int, float]) -> Choice:
    """The best depth at a batch, plain decoding among them."""
    gains = {k: gain for k in {0, *over} if (gain := _speedup(case, {0: 1.0, **over}, k)) is not None}
    k = max(gains, key=lambda each: (gains[each], -each))
    others = sorted((gain for each, gain in gains.items() if each != k), reverse=True)
    ahead = gains[k] / others[0] - 1 if others else 0.0
    return Choice(0, batch, k, gains[k], None, ahead, ahead > LEAST_GAIN, {}, {})


def measured_costs(case: Case) -> tuple[Costs, str]:
    """Step over plain step by batch and depth, and where they come from; nothing and the reason without any."""
    if case.speed_rows is not None:
        return _stored_costs(case.speed_rows)
    if not case.has_gpu:
        reason = "steps on a CPU say nothing of serving; give rows of eagle3lab speed, or run on a GPU"
        return {}, reason
    return _timed_costs(case)


def _stored_costs(path: Path) -> tuple[Costs, str]:
    """Of every batch the shortest context that has it: a file need not hold every batch at one context."""
    speed = read_speed(path)
    points = [point for point in speed.points if 0 in point.depths and len(point.depths) > 1]
    costs = {point.batch: point.over_base for point in sorted(points, key=lambda each: -each.context)}
    return costs, speed.line() if costs else f"{path.name} has no point with a plain step"


def _timed_costs(case: Case) -> tuple[Costs, str]:
    """Steps of every depth over empty slots, by the device's clock, each over the plain step of the same rows."""
    engine = adaptive_engine(case)
    times, costs = engine.runner.time_steps(), dict[int, dict[int, float]]()
    for (k, batch), took_us in times.items():
        if (0, batch) in times:
            costs.setdefault(batch, {})[k] = took_us / times[0, batch]
    dtype = engine.config.dtype
    return costs, f"steps in {dtype} over empty slots, timed here" if costs else "no step could be timed here"


def adaptive_engine(case: Case) -> Engine:
    """An engine that has a program for every depth; such a one keeps no ranks. A GPU serves in bf16, by kernels."""
    spec = case.conditions.engine([[0, 0]]).config.speculative_config
    assert spec is not None, "a case has drafts"
    served: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"} if case.has_gpu else {}
    return case.engine(
        max_batch_size=case.batch, speculative_config=replace(spec, adaptive=True), collect_draft_ranks=False, **served
    )


SERVING: tuple[Lamp, ...] = (
    Lamp("slower", "Is speculation faster than plain decoding at this batch?", look_at_speed, is_timed=True),
)
