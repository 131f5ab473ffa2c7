"""What runs under a sanitizer: every case of one card, each setting launched once, and its numbers.

`python3 -m lab.probes.sanitizer.run --card gemm --tool memcheck --result FILE` needs a GPU and compiles nothing
if the cubins were built. Inputs and truth are made on the CPU, so that the tool sees few kernels but ours.

Source: derived here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from eagle3core.kernels import Card, Case, Launch, Variant, case_id, cubins, launch, proof, registry
from lab.options.kernels import SanitizedCardOptions
from lab.options.reader import run_program
from lab.probes.sanitizer.form import in_form, is_in_form
from lab.probes.sanitizer.plants import PLANTS, WRITTEN

CPU = torch.device("cpu")


@dataclass
class Watched:
    """One card, run.

    Attributes:
        cases: cases run; each under every setting.
        launches: kernels launched.
        in_form: those of them in the form that racecheck can follow, where it is another than the engine's.
        faults: numbers off by more than the 2x rule, broken invariants, and bits that change with a setting, in words.
        seconds: of the launches with their checks, the start of the process left out.
    """

    card: str
    cases: int = 0
    launches: int = 0
    in_form: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def known() -> dict[str, Card]:
    """The registry's cards and the planted bugs, by name."""
    plants = [card for pairs in PLANTS.values() for pair in pairs for card in pair]
    return registry() | {card.name: card for card in [*plants, *WRITTEN]}


def seen_by(tool: str, card: Card) -> Card:
    """`card` as `tool` gets it."""
    return in_form(card) if tool == "racecheck" and card.name not in {one.name for one in WRITTEN} else card


def cases_of(card: Card) -> tuple[Case, ...]:
    """The cases of the GPU tests."""
    return (*card.cases, *card.slow_cases)


def watched(card: Card, arch: str, device: torch.device, execute: proof.Executor) -> Watched:
    """Every case and setting of `card`, launched once on `device` over poisoned outputs, and checked on the CPU."""
    found, begun = Watched(card.name), time.monotonic()
    for seed, case in enumerate(cases_of(card)):
        inputs = card.example(case, proof.generator(seed, CPU), CPU)
        there = {name: tensor.to(device) for name, tensor in inputs.items()}
        first: dict[str, torch.Tensor] = {}
        for setting in card.settings:
            outputs = card.outputs(case, there)
            launches = list(card.launches(arch, case, there, outputs, **setting))
            execute(launches)
            found.launches += len(launches)
            found.in_form += sum(is_in_form(item.variant) for item in launches)
            here = {name: tensor.to(CPU) for name, tensor in outputs.items()}
            words = _faults(card, case, inputs, here) if not first else _changed(first, here)
            found.faults += [f"{case_id(case)} {dict(setting)}: {word}" for word in words]
            first = first or here
        found.cases += 1
    found.seconds = time.monotonic() - begun
    return found


def _faults(card: Card, case: Case, inputs: Any, outputs: Any) -> list[str]:
    deviations = [d for d in proof.deviations(card, case, inputs, outputs) if not d.passes]
    numbers = [f"{d.output}: error {d.error:.3g}, allowed {d.allowed:.3g}" for d in deviations]
    return [*numbers, *card.invariants(case, inputs, outputs)]


def _changed(first: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor]) -> list[str]:
    counted = {name: proof.differing(tensor, again[name]) for name, tensor in first.items()}
    return [f"{name}: {n} elements change with the setting" for name, n in counted.items() if n]


def variants(cards: Sequence[Card], arch: str) -> list[Variant]:
    """Every kernel that `watched` launches for `cards` on `arch`, found without a GPU."""
    launched = (item.variant for card in cards for item in _planned(card, arch))
    return list({cubins.digest(variant, arch): variant for variant in launched}.values())


def _planned(card: Card, arch: str) -> Iterator[Launch]:
    for seed, case in enumerate(cases_of(card)):
        inputs = card.example(case, proof.generator(seed, CPU), CPU)
        for setting in card.settings:
            yield from card.launches(arch, case, inputs, card.outputs(case, inputs), **setting)


def main(options: SanitizedCardOptions) -> int:
    """Run one card on the GPU and write what was seen, as one JSON object; returns 0."""

    def execute(launches: Sequence[Launch]) -> None:
        launch.execute(launches)
        torch.cuda.synchronize()

    torch.set_num_threads(1)
    found = watched(seen_by(options.tool, known()[options.card]), launch.device_arch(), torch.device("cuda"), execute)
    options.result.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_program(SanitizedCardOptions, main)
