"""Which bound binds: why a number of a gate is what it is, from what its row knows of floors, steps and stages.

A step takes its floor (the bytes it cannot avoid, at the read ceiling) and time above it. The larger part binds a step;
of a speed-up it is what bytes ask for beyond a plain step, or what the step takes beyond that; and where not even
bytes alone would reach the threshold, the acceptance length binds.
"""

from __future__ import annotations

import math

import torch

from eagle3core.geometry import DraftGeometry, TargetGeometry
from eagle3core.speculative import CacheDtype, WeightFormat
from lab.options.values import read_cut_name
from lab.pairs.planted import GEOMETRIES, PlantedGeometry, find_geometry
from lab.probes.bench.floors import Floor, Routing, step_floor
from lab.probes.bench.invariants import INVARIANTS
from lab.probes.bench.scenario import DTYPES, PEERS
from lab.probes.gates.config import Gate
from lab.rows.store import Row
from lab.rows.values import number_of

OVER, SPEEDUP_OVER = "over_", "speedup_over_"
HALF = 0.5  # of a step's time: whether most of it is its floor
_MOST_PLACE = 1e9  # of a context, a batch, a number of tokens: far beyond any that is run
BETWEEN = "between spans"  # of the staged pass: waits that a whole step does not have
_COUNTED = {
    "n_wrong_requests": "correctness: greedy tokens are the planted ones, in the last round",
    "n_divergent": "correctness: a draft changes no token of the baseline's, in the last round",
}


def binding(gate: Gate, row: Row, plain: Row | None) -> str:
    """One sentence that begins with the bound; says what the row lacks where it does not tell.

    `plain` is the row of plain decoding in the same run, if there is one.
    """
    name = gate.value
    try:
        if name.startswith("speedup") or name == "step_over_base":
            return _of_speed(gate, row, plain)
        if name in ("share_of_floor", "decode_tokens_per_s"):
            return _of_step(row)
        if name.startswith(OVER):
            return _of_peer(name.removeprefix(OVER), row)
        if name == "acceptance_length":
            return _of_acceptance(row)
    except _Lacking as lacking:
        return f"not known: the row has no {lacking} above 0"
    if name == "n_steps":
        return "length: steps with every slot in use, in each round"
    if name.startswith("invariants."):
        return f"invariant: {INVARIANTS.get(name.removeprefix('invariants.'), name)}"
    return _COUNTED.get(name, f"not known: {name} has no bound of its own")


class _Lacking(Exception):
    """A value that a sentence needs and the row has not."""


def _need(row: Row, name: str) -> float:
    """A value that others are divided by, or compared with as a share of it."""
    value = row.number(name)
    if value is None or not 0 < value < math.inf:
        raise _Lacking(name)
    return value


def _of_speed(gate: Gate, row: Row, plain: Row | None) -> str:
    ratio, bound = _need(row, "step_over_base"), _need(row, "step_over_base_bound")
    told = f"step/base {ratio:.3f} against {bound:.3f} possible"
    if gate.value.startswith("speedup"):
        length, most = _length(gate.value, row), _most_speedup(gate.value, row)
        told += f", at most {most:.2f}x at {length:.2f} tokens a step"
        if gate.at_least is not None and most < gate.at_least:
            return f"acceptance: {told}"
    if _need(row, "share_of_floor") < HALF:  # what bytes ask for says nothing of such a step
        return f"time above the floor: {told}; the step {_above(row)}"
    which = "bytes" if bound - 1 >= ratio - bound else "time above the bytes"
    return f"{which}: {told}; {_beyond(row, plain)}"


def _length(name: str, row: Row) -> float:
    """Tokens a step that a speed-up is at: the planted ones, or those measured."""
    if name == "speedup_at_dial":
        return _need(row, name) * _need(row, "step_over_base")
    return _need(row, "acceptance_length")


def _most_speedup(name: str, row: Row) -> float:
    """The speed-up of a step at its floor: over our own plain step at its floor, or over the peer as it is."""
    if name.startswith(SPEEDUP_OVER):
        return _need(row, name) / _need(row, "share_of_floor")
    return _length(name, row) / _need(row, "step_over_base_bound")


def _beyond(row: Row, plain: Row | None) -> str:
    """In which stage a step has most time above its bytes that a plain step has not."""
    own, base = stage_excess_us(row), {} if plain is None else stage_excess_us(plain)
    if not own or not base:
        return f"the step {_above(row)}"
    more = {stage: excess - base.get(stage, (0.0, 0.0))[0] for stage, (excess, _) in own.items()}
    worst = max(more, key=lambda stage: more[stage])
    return f"most beyond the bytes in {worst} ({more[worst]:.0f} us more than a plain step has there, run alone)"


def _of_step(row: Row) -> str:
    which = "bytes" if _need(row, "share_of_floor") >= HALF else "time above the floor"
    return f"{which}: {_above(row)}"


def _of_peer(peer: str, row: Row) -> str:
    floor = _need(row, "floor_ms")
    theirs = _need(row, "step_ms_median") / _need(row, f"{OVER}{peer}")
    which = "bytes" if _need(row, "share_of_floor") >= HALF else "time above the floor"
    return (
        f"{which}: {floor / theirs:.3f} were possible, as {peer} takes {theirs:.3f} ms or {theirs / floor:.2f} of our "
        f"floor; ours {_above(row)}"
    )


def _of_acceptance(row: Row) -> str:
    length, planned = _need(row, "acceptance_length"), row.number("planned_acceptance_length")
    if planned is None:
        return f"the draft: {length:.3f} tokens a step"
    kept = "the engine kept it" if abs(length - planned) < 1e-9 else "the engine LOST it"
    return f"the plan: {planned:.4f} tokens a step were planned, and {kept}"


def _above(row: Row) -> str:
    """How far a step stands above its floor, and in which stage most."""
    share = _need(row, "share_of_floor")
    told = f"stands {1 / share - 1:.1%} above its floor" if share >= HALF else f"takes {1 / share:.1f} times its floor"
    stages = stage_excess_us(row)
    if not stages:
        return told
    worst = max(stages, key=lambda stage: stages[stage][0])
    excess, floor = stages[worst]
    return f"{told}, most in {worst} ({excess:.0f} us above {floor:.0f} of bytes, run alone)"


def stage_excess_us(row: Row) -> dict[str, tuple[float, float]]:
    """Microseconds above its own floor, and that floor, of every stage that was timed alone; empty if not known."""
    floor, ceiling = floor_of(row), row.number("ceiling_gb_per_s")
    if floor is None or ceiling is None or not ceiling > 0:
        return {}
    stages = {}
    for name, value in row.values.items():
        block, _, stage = name.partition(".")
        took = number_of(value)
        if block == "stage_ms" and stage != BETWEEN and took is not None:
            least = floor.stage_us(stage, ceiling)
            stages[stage] = (1e3 * took - least, least)
    return stages


def floor_of(row: Row) -> Floor | None:
    """The floor of a row's step, if its geometry is a known one and it says where it stands."""
    at, geometry = row.parameters, _geometry(str(row.parameters.get("geometry")))
    wanted = [number_of(at.get(name)) for name in ("spec_k", "batch", "context", "tokens")]
    known = [value for value in wanted if value is not None and 0 <= value < _MOST_PLACE]
    repeated, share = (number_of(at.get(name)) or 0.0 for name in ("repeated_experts", "share"))
    if geometry is None or len(known) < len(wanted) or at.get("dtype") not in DTYPES:
        return None
    k, batch, context, tokens = known
    shapes: tuple[TargetGeometry, DraftGeometry] = geometry.target, geometry.draft
    itemsize: int = getattr(torch, str(at["dtype"])).itemsize
    draft_weights, target_weights = (_format_of(at.get(name)) for name in ("draft_weights", "target_weights"))
    cached = context + tokens / 2
    read = row.number("experts_read")
    routing = Routing(repeated * share, {} if read is None else {int(k) + 1: read})
    of_target, of_draft = (_cache(at.get(name)) for name in ("cache_dtype", "draft_cache_dtype"))
    return step_floor(
        *shapes, k=int(k), batch=int(batch), cached=cached, itemsize=itemsize, draft_weights=draft_weights,
        target_weights=target_weights, cache_dtype=of_target, draft_cache_dtype=of_draft, routing=routing,
    )  # fmt: skip


def _format_of(said: object) -> WeightFormat:
    """A format of maps as a row's parameter names it; where it names none, as stored."""
    return "fp8" if said == "fp8" else "as_stored"


def _cache(said: object) -> CacheDtype:
    """The same of a cache."""
    return "fp8" if said == "fp8" else "as_computed"


def _geometry(name: str) -> PlantedGeometry | None:
    """The geometry of that name, cut or whole; None of an unknown one."""
    return find_geometry(name) if read_cut_name(name)[0] in GEOMETRIES else None


def peer_of(name: str) -> str | None:
    """The peer that a value is measured against; None for values against nobody."""
    for prefix in (SPEEDUP_OVER, OVER):
        if name.startswith(prefix) and name.removeprefix(prefix) in PEERS:
            return name.removeprefix(prefix)
    return None
