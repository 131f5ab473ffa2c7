"""`eagle3lab gates feasible`: bounds and gates for people, as rows, and one JSON line last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.ending import tell_summary
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED, NotComparable
from lab.options.proofs import GatesFeasibleOptions
from lab.pairs.planted import PlantedGeometry, find_geometry
from lab.probes.bench.floors import UNIFORM, Routing
from lab.probes.bench.scenario import Point
from lab.probes.ceilings import read_rate
from lab.probes.gates.config import Gate, GatesConfig, Mode, load_gates, packaged_gates
from lab.probes.gates.feasible import BOUNDS, GATE, Possible, Steps, judged
from lab.probes.gates.feasible_figure import beyond_all
from lab.probes.speed.rows import PointSpeed, read_speed
from lab.rows.environment import collect
from lab.rows.maker import RowMaker
from lab.rows.store import Row, RowWriter

NAME = "gates feasible"
Measured = Mapping[tuple[int, int], PointSpeed]  # by context and batch


def run(options: GatesFeasibleOptions) -> int:
    """Tells and writes; 0, or 1 if a gate is beyond the bytes under every routing asked for."""
    config = load_gates(options.config or packaged_gates(options.geometry), options.geometry)
    steps, gates = found(options, config)
    print(f"{config.geometry} on {read_rate(options.gpu)}")
    for one in steps:
        print("\n".join(one.lines()))
        own = [gate for gate in gates if gate.steps is one]
        told = [gate.line for gate in own if gate.word != "not of bytes"]
        others = [f"{len(own) - len(told)} gates are not a matter of bytes"] if len(told) < len(own) else []
        print("".join(f"  {line}\n" for line in (*told, *others)), end="")
    if options.out is not None:
        with RowWriter(options.out) as writer:
            for row in rows_of(steps, gates, options.out.stem):
                writer.write(row)
    beyond = beyond_all(gates)
    tell_summary({"command": NAME, "geometry": config.geometry, "gpu": options.gpu, "beyond": beyond})
    return EXIT_GATE_FAILED if beyond else EXIT_PASSED


def found(options: GatesFeasibleOptions, config: GatesConfig) -> tuple[list[Steps], list[Possible]]:
    """The least steps of every point and routing, and the gates of the configuration's points against them."""
    geometry = find_geometry(config.geometry)
    rate, measured = read_rate(options.gpu), measured_points(options.measured, geometry)
    steps: list[Steps] = []
    gates: list[Possible] = []
    for point, k, mode in _points(options, config):
        length = mode.acceptance_length if mode is not None else k + 1.0
        known = measured.get((point.context, point.batch))
        for routing in _routings(options.repeated, geometry, known, k):
            one = Steps(geometry, point, k, length, rate, routing, options.formats)
            steps.append(one)
            if mode is not None:
                gates += [judged(mode, gate, one, value_of(gate, mode, known)) for gate in mode.gate]
    return steps, gates


def _routings(shares: tuple[float, ...], geometry: PlantedGeometry, known: PointSpeed | None, k: int) -> list[Routing]:
    """Those asked for, and what stored rows had; without experts there is one."""
    if geometry.target.block.experts is None:
        return [UNIFORM]
    depths = {} if known is None else {depth: known.depths.get(depth) for depth in (0, k)}
    read = {depth + 1: own.experts_read for depth, own in depths.items() if own is not None and own.experts_read}
    return [*map(Routing, shares), *([Routing(measured=read)] if k + 1 in read else [])]


def _points(options: GatesFeasibleOptions, config: GatesConfig) -> Iterator[tuple[Point, int, Mode | None]]:
    if options.at is not None:
        yield from ((point, options.spec, None) for point in options.at)
        return
    yield from ((mode.point, mode.spec, mode) for mode in config.mode)


def measured_points(path: Path | None, geometry: PlantedGeometry) -> Measured:
    """Points of stored rows of this geometry.

    Raises:
        NotComparable: they are of another.
    """
    if path is None:
        return {}
    speed = read_speed(path)
    if speed.geometry != geometry.name:
        raise NotComparable(
            f"{path.name} is of {speed.geometry}, the gates of {geometry.name}", "one geometry",
            "name rows of that geometry, or another --geometry",
        )  # fmt: skip
    return {(point.context, point.batch): point for point in speed.points}


def value_of(gate: Gate, mode: Mode, point: PointSpeed | None) -> float | None:
    """What stored rows have for a gate, a speed-up at the mode's acceptance length; None where they have nothing."""
    depth = point.depths.get(mode.spec if gate.of == "spec" else 0) if point is not None else None
    if depth is None:
        return None
    if gate.value in ("speedup", "speedup_at_dial"):
        return mode.acceptance_length / depth.over_base.median
    known = {
        "step_over_base": depth.over_base.median, "decode_tokens_per_s": depth.tokens_per_s,
        "acceptance_length": depth.length,
    }  # fmt: skip
    return known.get(gate.value)


def rows_of(steps: list[Steps], gates: list[Possible], run: str) -> list[Row]:
    """A row a point and routing, and one a gate."""
    maker = RowMaker(run, NAME, collect().fingerprint)
    rows = [maker.measured(BOUNDS, one.point.name(one.k), one.values(), one.parameters) for one in steps]
    return rows + [maker.measured(GATE, one.name, one.values(), one.steps.parameters) for one in gates]
