"""What bytes allow, drawn: the most speed-up over the acceptance length, a line a routing, with what gates ask for."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib import pyplot as plt

from lab.figures import DASHES, FAINT, SERIES, Drawing, look_of
from lab.night.experiment import Experiment
from lab.probes.gates.feasible import BOUNDS, GATE, Possible, Steps

SPEEDUPS = ("speedup", "speedup_at_dial")


def bounds(steps: Sequence[Steps], gates: Sequence[Possible]) -> Drawing:
    """A panel a point; a mark at each speed-up that is asked for, crossed where no routing drawn allows it."""
    panels: dict[str, list[Steps]] = {}
    for one in steps:
        panels.setdefault(f"{one.point} spec-{one.k}", []).append(one)
    figure, sides = plt.subplots(1, len(panels), figsize=(7.2, 3.8), sharey=True, squeeze=False)
    for axes, (name, own) in zip(sides[0], panels.items(), strict=True):
        for i, one in enumerate(own):
            lines = [one.speedup(length) for length in one.lengths]
            axes.plot(
                one.lengths, lines, label=one.how or "bytes alone", color=SERIES[i % len(SERIES)][0], marker="",
                linestyle=DASHES[i % len(DASHES)],
            )  # fmt: skip
        for (length, least), is_allowed in asked_for([gate for gate in gates if gate.steps in own]).items():
            look = look_of("ours" if is_allowed else "bad")
            axes.plot([length], [least], color=look["color"], marker=look["marker"], linestyle="none", markersize=9)
            axes.annotate(f"{least:g}x asked for", (length, least), xytext=(0, 8), textcoords="offset points",
                          fontsize=8.5, ha="center")  # fmt: skip
        axes.axhline(1.0, color=FAINT, linestyle=":")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("tokens a step")
        axes.margins(y=0.12)
    sides[0][0].set_ylabel("most times plain decoding")
    handles, labels = sides[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8.5, loc="outside lower center", ncols=2)
    words = f"{steps[0].geometry.name} on {steps[0].rate}. {verdict(gates)}"
    return Drawing(figure, bounds_table(steps), f"Lines of the most speed-up over tokens a step. {words}", words)


def asked_for(gates: Sequence[Possible]) -> dict[tuple[float, float], bool]:
    """Speed-ups asked for, by (acceptance length, least), and whether any routing allows them."""
    found: dict[tuple[float, float], bool] = {}
    for one in gates:
        if one.gate.value in SPEEDUPS and one.gate.at_least is not None:
            place = (one.steps.length, one.gate.at_least)
            found[place] = found.get(place, False) or one.word == "allowed"
    return found


def verdict(gates: Sequence[Possible]) -> str:
    """A sentence: which gates the hardware cannot hold."""
    beyond = beyond_all(gates)
    judged = {gate.name for gate in gates if gate.word != "not of bytes"}
    if not judged:
        return "No gate is a matter of bytes."
    if not beyond:
        return f"Bytes allow all {len(judged)} gates that they decide on."
    nearest = [min((gate for gate in gates if gate.name == name), key=_step_bytes) for name in beyond]
    told = "; ".join(f"{gate.name} ({', '.join(filter(None, (gate.steps.how, gate.detail)))})" for gate in nearest)
    return f"The hardware does not allow {len(beyond)} of {len(judged)} gates that bytes decide on: {told}."


def _step_bytes(gate: Possible) -> int:
    return gate.steps.at(gate.steps.length).step_bytes


def beyond_all(gates: Sequence[Possible]) -> list[str]:
    """Names of gates that no routing allows."""
    words: dict[str, set[str]] = {}
    for gate in gates:
        words.setdefault(gate.name, set()).add(gate.word)
    return [name for name, own in words.items() if own == {"beyond"}]


def bounds_table(steps: Sequence[Steps]) -> pd.DataFrame:
    """One row a point, routing and acceptance length."""
    return pd.DataFrame([
        {
            "point": str(one.point), "k": one.k, "routing": one.how, "tokens_a_step": length,
            "step_over_base": one.at(length).step_over_base, "most_speedup": one.speedup(length),
            "plain_tokens_per_s": one.tokens_per_s,
        }
        for one in steps for length in one.lengths
    ])  # fmt: skip


def write_feasible(exp: Experiment, steps: Sequence[Steps], gates: Sequence[Possible]) -> None:
    """A row a point and routing, and one a gate and routing."""
    for one in steps:
        exp.write(BOUNDS, one.point.name(one.k), one.values(), **one.parameters)
    for gate in gates:
        exp.write(GATE, gate.name, gate.values(), **gate.steps.parameters)
