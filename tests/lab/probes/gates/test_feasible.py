"""What bytes allow: floors of targets with experts, speed-ups that cannot be, and gates judged without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from places import ROOT

from lab.cli import run
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError, NotComparable
from lab.options.proofs import GatesFeasibleOptions
from lab.pairs.planted import find_geometry
from lab.probes.bench.floors import Routing, step_floor
from lab.probes.bench.scenario import Point
from lab.probes.ceilings import ReadRate, read_rate
from lab.probes.gates.config import Gate, Mode, load_gates, packaged_gates
from lab.probes.gates.feasible import Steps, judged
from lab.probes.gates.feasible_command import found
from lab.probes.gates.feasible_figure import bounds, bounds_table, verdict
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference

LARGE = "gpt-oss-120b"


def steps(repeated: float = 0.0, *, context: int = 2, length: float = 3.0, name: str = LARGE) -> Steps:
    return Steps(find_geometry(name), Point(context, 1), 3, length, read_rate("H200"), Routing(repeated))


@pytest.mark.parametrize(
    ("name", "distinct", "plain_ms", "spec_ms", "over_base"),
    [
        # By hand from an expert's 13.2 MB, attention's 53 MB a layer, and the head's 1158 MB.
        (LARGE, (4.0, 15.3, 51.0), (1.09, 2.26), (2.65, 6.36), (2.42, 2.81)),
        ("gpt-oss-20b", (4.0, 13.2, 28.2), (0.81, 1.45), (1.83, 2.87), (2.26, 1.98)),
    ],
)
def test_floors_of_uniform_routing_are_those_counted_by_hand(
    name: str, distinct: tuple[float, ...], plain_ms: tuple[float, ...], spec_ms: tuple[float, ...],
    over_base: tuple[float, ...],
) -> None:  # fmt: skip
    made = find_geometry(name)
    experts = made.target.block.experts
    assert experts is not None
    assert [round(experts.n_read(rows), 1) for rows in (1, 4, 16)] == list(distinct)
    for batch, plain, spec, over in zip((1, 4), plain_ms, spec_ms, over_base, strict=True):
        at: dict[str, Any] = {"batch": batch, "cached": 0, "itemsize": 2}
        assert step_floor(made.target, made.draft, k=0, **at).ms(4578.0) == pytest.approx(plain, abs=0.01)
        floor = step_floor(made.target, made.draft, k=3, **at)
        assert floor.ms(4578.0) == pytest.approx(spec, abs=0.01)
        assert floor.step_over_base == pytest.approx(over, abs=0.005)


def test_uniform_routing_bounds_three_tokens_a_step_at_one_and_a_quarter() -> None:
    assert steps().speedup(3.0) == pytest.approx(1.24, abs=0.005)
    assert steps().speedup(4.0) == pytest.approx(1.65, abs=0.005)
    assert steps(context=32768).speedup(3.0) == pytest.approx(1.38, abs=0.005), "the cache is read by both steps"


def test_what_repeats_is_read_once_and_what_a_run_had_takes_the_formulas_place() -> None:
    made = find_geometry(LARGE)
    experts = made.target.block.experts
    assert experts is not None
    assert experts.n_read(4, repeated=1.0) == pytest.approx(4.0)
    assert experts.n_read(4, batch=2) == pytest.approx(experts.n_read(8))
    # Two rows: the second brings new ones in half the cases, of its four on average 3.875.
    assert experts.n_read(2, repeated=0.5) == pytest.approx(4 + 0.5 * 4 * (1 - 4 / 128))
    assert steps(0.5).speedup(3.0) > steps().speedup(3.0)
    assert steps(0.5).speedup(1.0) == pytest.approx(steps().speedup(1.0)), "where all drafts are wrong none repeats"
    measured = Steps(made, Point(2, 1), 3, 3.0, read_rate("H200"), Routing(0.5, {4: 9.0, 1: 4.0}))
    assert measured.experts_read(4) == 9.0
    one = 3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2  # an expert of one layer: bytes of 4 bits, scales, biases
    more = measured.at(3.0).more_experts
    assert more == pytest.approx(5.0 * 36 * one, rel=1e-3)


def test_thin_and_fp8_drafts_raise_the_bound() -> None:
    plain, thin = (steps(name=name).speedup(3.0) for name in (LARGE, f"{LARGE}-thin"))
    rate = read_rate("H200")
    fp8 = Steps(find_geometry(LARGE), Point(2, 1), 3, 3.0, rate, formats={"draft_weights": "fp8"}).speedup(3.0)
    assert plain < fp8 < 1.4
    assert plain < thin < 1.4


def mode(**gate: Any) -> Mode:
    return Mode.model_validate({
        "name": "m", "context": 32768, "batch": 1, "spec": 3, "acceptance_length": 3.0,
        "micro": {"steps": 8, "rounds": 1, "warmup": 0}, "full": {"steps": 8, "rounds": 1, "warmup": 0},
        "gate": [{"name": "g", "of": "spec", **gate}],
    })  # fmt: skip


@pytest.mark.parametrize(
    ("gate", "word", "told"),
    [
        ({"value": "speedup", "at_least": 1.3}, "allowed", "bound 1.38x at 3.0 tokens a step"),
        ({"value": "speedup", "at_least": 1.6}, "beyond", "bound 1.38x at 3.0 tokens a step; 3.5 would do"),
        ({"value": "speedup", "at_least": 2.0}, "beyond", "not even 4 tokens a step would do"),
        ({"value": "step_over_base", "at_most": 2.0}, "beyond", "2.177 times a plain step's bytes"),
        ({"value": "step_over_base", "at_most": 2.2}, "allowed", "2.177"),
        ({"value": "acceptance_length", "at_least": 4.5}, "beyond", "at most 4 tokens a step"),
        ({"value": "decode_tokens_per_s", "of": "baseline", "at_least": 700.0}, "allowed", "6.22 GB a step"),
        ({"value": "decode_tokens_per_s", "of": "baseline", "at_least": 800.0}, "beyond", "bound 736.5 tokens"),
        ({"value": "over_plain-torch", "at_most": 0.75}, "not of bytes", "not a matter of bytes"),
    ],
)
def test_a_gate_is_allowed_or_beyond_the_hardware_with_its_bound(gate: Any, word: str, told: str) -> None:
    own = mode(**gate)
    possible = judged(own, own.gate[0], steps(context=32768))
    assert (possible.word, told in possible.line) == (word, True), possible.line


def test_the_plans_gates_of_the_120b_are_judged_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert run(["gates", "feasible", "--geometry", LARGE, "--repeated", "0,0.5", "--out", str(out)]) == EXIT_GATE_FAILED
    told = capsys.readouterr().out
    speed_up = "single32k spec: speed-up over our baseline, decoding only"
    assert f"{speed_up} (at least 2): the hardware does not allow it: bound 1.38x at 3.0 tokens a step" in told
    assert "batch4_16k baseline: tokens a second (at least 333.3): the hardware allows it" in told
    assert json.loads(told.splitlines()[-1])["beyond"] == [speed_up], "1.0x in a batch is allowed where half repeat"
    rows = read_rows(out)
    assert {row.kind for row in rows} == {"feasible_bounds", "feasible_gate"}
    [worst] = [row for row in rows if row.name == speed_up and row.parameters["routing"] == "any experts alike likely"]
    assert worst.values["allowed"] is False
    assert worst.values["best"] == pytest.approx(1.378, abs=0.001)


def test_a_dense_pairs_gates_are_within_reach_and_other_gpus_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gates", "feasible", "--gpu", "B200"]) == EXIT_PASSED
    assert "B200: 8000 GB/s, as stated" in capsys.readouterr().out
    assert read_rate("H200") == ReadRate("H200", 4578.0, True)
    with pytest.raises(ExperimentError, match="no read rate is known of a GPU 'T4'"):
        run(["gates", "feasible", "--gpu", "T4"])
    with pytest.raises(ExperimentError, match=r"0 to 0\.99"):
        run(["gates", "feasible", "--repeated", "1.0"])


def test_measured_rows_stand_beside_the_bounds_and_bring_their_routing() -> None:
    stored = ROOT / "reports" / "reference" / "h200" / "speed.jsonl"
    config = load_gates(packaged_gates())
    _, gates = found(GatesFeasibleOptions(measured=stored), config)
    sped = [gate for gate in gates if gate.gate.value == "speedup"]
    assert all(gate.measured is not None and 1.0 < gate.measured <= (gate.best or 0.0) for gate in sped)
    with pytest.raises(NotComparable, match="one geometry"):
        found(GatesFeasibleOptions(measured=stored), load_gates(packaged_gates(LARGE)))


def test_the_figure_says_which_gates_cannot_hold() -> None:
    config = load_gates(packaged_gates(LARGE))
    assert config.geometry == LARGE
    least, gates = found(GatesFeasibleOptions(), config)
    figure, table, *_ = bounds(least, gates)
    assert len(figure.axes) == 2
    assert len(table) == len(bounds_table(least)) == 6 * 7
    assert [line.get_marker() for axes in figure.axes for line in axes.lines].count("s") == 1, "one cannot hold"
    assert "does not allow 1 of 6 gates that bytes decide on: single32k spec: speed-up" in verdict(gates)
    assert "80% of tokens repeat their experts, bound 1.85x" in verdict(gates)
    assert verdict([gate for gate in gates if gate.word == "allowed"]).startswith("Bytes allow all")
    plt.close(figure)


def test_a_gate_without_measurement_is_told_as_it_is() -> None:
    gate = Gate(name="g", of="spec", value="speedup", at_least=1.0)
    assert "measured" not in judged(mode(value="speedup", at_least=1.0), gate, steps()).line
    assert judged(mode(value="speedup", at_least=1.0), gate, steps(), 1.1).line.endswith("; measured 1.1")
