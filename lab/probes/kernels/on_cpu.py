"""What a machine with no GPU can find out about a card: its error on the CPU twin, its machine code by architecture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels import Card, Variant, case_id
from lab.probes.kernels.occupancy import Occupancy, occupancy


@dataclass(frozen=True)
class EmulatedError:
    """One case of a card, run lane by lane: the output that comes closest to what the 2x rule allows.

    Attributes:
        error, allowed: largest absolute error of that output, and the bound; both 0 where the output must be equal.
        faults: what broke, in words; empty when the case holds.
    """

    op: str
    case: str
    output: str
    error: float
    allowed: float
    faults: tuple[str, ...]


@dataclass(frozen=True)
class CompiledVariant:
    """One variant compiled for one architecture, or the reason why not.

    Attributes:
        registers: of a thread. spill_bytes: of stores and loads together.
        faults: promises of the card that the machine code breaks.
        missing: why there is no machine code; empty when there is.
    """

    op: str
    variant: str
    arch: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    threads: int = 0
    occupancy: Occupancy | None = None
    faults: tuple[str, ...] = ()
    missing: str = ""


def emulated_error(card: Card, case: Mapping[str, Any], seed: int = 1) -> EmulatedError:
    """The error of one of the card's tiny cases on the CPU twin, with fresh inputs from `seed`."""
    from eagle3core.kernels import emulator, proof

    cpu = torch.device("cpu")
    inputs = card.example(case, proof.generator(seed, cpu), cpu)
    try:
        outputs = proof.run(card, "sm_90a", case, inputs, emulator.execute)
    except emulator.EmulationError as error:
        return EmulatedError(card.name, case_id(case), "none", float("nan"), 0.0, (str(error),))
    found = proof.deviations(card, case, inputs, outputs)
    worst = max(found, key=lambda d: d.error / d.allowed if d.allowed else d.error)
    faults = [f"{d.output}: error {d.error:.3g}, allowed {d.allowed:.3g}" for d in found if not d.passes]
    faults += card.invariants(case, inputs, outputs)
    return EmulatedError(card.name, case_id(case), worst.output, worst.error, worst.allowed, tuple(faults))


def compiled(
    cards: Sequence[Card], arches: Sequence[str], limit_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[CompiledVariant]:
    """Every variant of the fast ring for every architecture; after `limit_s` seconds the rest is missing.

    Cards take turns, a variant each, so that a card with slow ones does not use up everyone's time.
    """
    start, gone = clock(), ""
    for card, by_arch in _in_turns(cards, arches):
        for arch, variant in by_arch.items():
            if not gone and clock() - start > limit_s:
                gone = f"the time limit of {limit_s:g} s was over"
            made = (
                CompiledVariant(card.name, variant.name, arch, missing=gone) if gone else _compile(card, variant, arch)
            )
            yield made


def _in_turns(cards: Sequence[Card], arches: Sequence[str]) -> Iterator[tuple[Card, dict[str, Variant]]]:
    """Variants by place in the card's list, so that one pass of the front end serves all architectures."""
    lists = {card.name: {arch: list(card.variants(arch)) for arch in arches} for card in cards}
    longest = max((len(variants) for by_arch in lists.values() for variants in by_arch.values()), default=0)
    for place in range(longest):
        for card in cards:
            found = {arch: found[place] for arch, found in lists[card.name].items() if place < len(found)}
            if found:
                yield card, found


def _compile(card: Card, variant: Variant, arch: str) -> CompiledVariant:
    from eagle3core.kernels import compile_variant

    try:
        code = compile_variant(variant, arch, disassemble=True)
    except BackendUnavailable as error:
        return CompiledVariant(card.name, variant.name, arch, missing=error.what)
    shared = variant.shared_bytes + code.static_shared_bytes
    return CompiledVariant(
        card.name, variant.name, arch, code.registers, code.spill_bytes, shared, variant.threads,
        occupancy(arch, registers=code.registers, threads=variant.threads, shared_bytes=shared),
        tuple(code.faults(variant)),
    )  # fmt: skip
