"""A card's settings timed against each other on a GPU: `bench --settings`, each held to the default's bits first.

All of a shape's run in turns over the same operands, more than the L2 cache holds; what gives other bits than the
default is told and never timed. Nothing is chosen here: rows say what a table of the kernels may then take over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from eagle3core.kernels import Card, Case, Tensors, case_id, launch, proof
from lab.probes.kernels.rows import SETTING, plain_shape
from lab.rows.graph_clock import time_graphs
from lab.rows.store import block

Setting = Mapping[str, Any]
Execute = Callable[[Any], None]


class Run(Protocol):
    """What is asked of a benchmark run, `bench.Run`: its device's name and rate, shapes, operands and rows."""

    arch: str
    gb_per_s: float

    def shapes(self, card: Card) -> Iterable[Case]:
        """Those that were asked for, until the time is over."""

    def rotated(self, card: Card, case: Case) -> list[Tensors]:
        """Inputs of as many copies of a case as no cache holds together."""

    def write(self, kind: str, name: str, values: dict[str, Any], parameters: dict[str, Any], **how: Any) -> None:
        """One more row, with the clocks of this moment."""


def compared(card: Card, arch: str, cases: Iterable[Case]) -> list[tuple[Case, Setting]]:
    """Every (case, setting) that these shapes are timed with, the default of each first."""
    return [(case, setting) for case in cases for setting in ({}, *card.sweep(arch, case))]


def unequal(
    card: Card, arch: str, case: Case, inputs: Tensors, execute: Execute, settings: Iterable[Setting]
) -> list[str]:  # fmt: skip
    """Of each setting the first output with other bits than the default's, in words; "" where all are equal."""
    default = proof.run(card, arch, case, inputs, execute)
    found = []
    for setting in settings:
        ours = proof.run(card, arch, case, inputs, execute, setting)
        changed = ((name, proof.differing(ours[name], default[name])) for name in default)
        found.append(next((f"{name}: {n} elements" for name, n in changed if n), ""))
    return found


def time_settings(run: Run, card: Card) -> bool:
    """Times the settings of every shape that was asked for; whether all gave the default's bits."""
    is_equal = True
    for case in run.shapes(card):
        settings = [setting for _, setting in compared(card, run.arch, [case])]
        rotation = run.rotated(card, case)
        changed = unequal(card, run.arch, case, rotation[0], _executed, settings)
        kept = [setting for setting, fault in zip(settings, changed, strict=True) if not fault]
        timings = time_graphs([[_bound(run, card, case, inputs, setting) for inputs in rotation] for setting in kept])
        floor = card.cost(case).floor_us(run.gb_per_s)
        print(f"{card.name} {case_id(case)}: floor {floor:.2f} us", flush=True)
        for setting, timing in sorted(zip(kept, timings, strict=True), key=lambda one: one[1].median_us):
            over = timing.median_us / timings[0].median_us
            values = {**timing.values(), "floor_us": floor, "over_default": over, "is_default": not setting}
            how = {"timer": timing.timer, "warmup": timing.warmup, "repeats": timing.repeats}
            run.write(SETTING, card.name, values, _place(case, setting), **how)
            share = 100 * floor / timing.median_us
            print(f"  {timing.median_us:8.2f} us, {share:5.1f}% of floor, {over:.3f}: {_text(setting)}", flush=True)
        for setting, fault in zip(settings, changed, strict=True):
            if fault:
                run.write(SETTING, card.name, {"fault": fault}, _place(case, setting))
                print(f"  OTHER BITS, not timed, {fault}: {_text(setting)}", flush=True)
                is_equal = False
    return is_equal


def _place(case: Case, setting: Setting) -> dict[str, Any]:
    return {**block("shape", plain_shape(case)), **block("setting", dict(setting))}


def _text(setting: Setting) -> str:
    return case_id(setting) if setting else "default"


def _bound(run: Run, card: Card, case: Case, inputs: Tensors, setting: Setting) -> Callable[[], None]:
    return launch.bind(card.launches(run.arch, case, inputs, card.outputs(case, inputs), **setting))


def _executed(launches: Any) -> None:
    launch.execute(launches)
    torch.cuda.synchronize()
