"""The cards of the registry for people: what each computes, what fixes its bits, and how far its rings have come."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3core.kernels import ARCHES, Card, registry
from lab.errors import ExperimentError
from lab.probes.kernels.peers import peers_of
from lab.probes.kernels.roofline import Check, peer_ratio, shape_text
from lab.probes.kernels.rows import Bench
from lab.probes.kernels.thresholds import judge

NO_ROWS = "no benchmark rows (reports/reference/<gpu>/kernels.jsonl)"


def listing(bench: Bench | None) -> str:
    """Every card with its parameters, variants and rings; `bench` holds what was measured on a GPU, if anything."""
    cards = registry()
    source = f"rows: {bench.line()}" if bench else f"rows: missing: {NO_ROWS}"
    blocks = [card_text(card, bench) for card in cards.values()]
    names = textwrap.fill(", ".join(cards), 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n\n".join([f"{len(cards)} op cards; {source}\n{names}", *blocks])


def named(ops: Sequence[str]) -> list[Card]:
    """The cards of these names, in the registry's order; all of them for none.

    Raises:
        ExperimentError: a name that no card has.
    """
    known = registry()
    for op in ops:
        if op not in known:
            raise ExperimentError(f"no op card {op!r}", ", ".join(known), "correct the name")
    return [card for name, card in known.items() if not ops or name in ops]


def card_text(card: Card, bench: Bench | None) -> str:
    """One card in a few lines."""
    lines = [f"{card.name}: {card.equation}"]
    for label, text in (
        ("source", card.source),
        ("order", _pairs(card.order) or "nothing is summed in an order that could vary"),
        ("neutral", _pairs(card.neutral) or "none"),
        ("variants", _variants(card)),
        ("emulated", emulated_state(card)),
        ("compiled", compiled_state(card)),
        ("gpu", gpu_state(card, bench)),
    ):
        lines.append(f"  {label:9}{text}")
    return "\n".join(lines)


def emulated_state(card: Card) -> str:
    """The tests that the emulated ring derives from the card; running them is what proves it."""
    if not card.cases:
        return "missing: no case"
    rows = "bits of a row alone compared" if card.alone else "no rows to compare alone"
    return f"tests exist: {len(card.cases)} cases, {len(card.slow_cases)} slow, {len(card.settings)} settings; {rows}"


def compiled_state(card: Card) -> str:
    """The tests that the compiled ring derives from the card."""
    fast = sum(len(card.variants(arch)) for arch in ARCHES)
    slow = sum(len(card.slow_variants(arch)) for arch in ARCHES)
    return f"tests exist: {fast} machine codes, {slow} slow" if fast else "missing: no variant"


def gpu_state(card: Card, bench: Bench | None) -> str:
    """What was proven and measured on a GPU, or why nothing can be said."""
    if bench is None:
        return f"missing: {NO_ROWS}"
    proof, cells = bench.proof(card.name), bench.of(card.name)
    if proof is None:
        proven = "missing: no proof row"
    else:
        proven = f"proven on {proof.n_cases} cases" if proof.passed else f"FAILED: {proof.reason}"
    if not cells:
        return f"{proven}; missing: no timed shape of {len(card.shapes)}"
    shares = [cell.share for cell in cells]
    timed = {shape_text(cell.shape) for cell in cells}
    measured = sum(shape_text(shape) in timed for shape in card.shapes)
    text = f"{proven}; {min(shares):.0%} to {max(shares):.0%} of the floor, {measured} of {len(card.shapes)} shapes"
    if peers_of(card.name):
        lost = sum(peer_ratio(cell) is None for cell in cells)
        text += f", incomplete: {lost} without all libraries" if lost else ", all beside libraries"
    return text


def checks(bench: Bench | None) -> list[Check]:
    """The thresholds on the measured rows; without rows every one of them is missing."""
    others: dict[str, Sequence[Mapping[str, Any]]] = {
        name: card.shapes for name, card in registry().items() if name not in ("gemm", "attention")
    }
    if bench is None:
        return judge([], [], others, None)
    return judge(bench.cells, bench.proofs, others, bench.held_to_gb_per_s)


def unjudged(judged: Sequence[Check], bench: Bench | None, *, measured: bool) -> str:
    """What keeps a run of stored rows from passing although nothing failed, and what to do; empty where all is judged.

    Args:
        judged: of `checks`. measured: the rows were made by this run, so that each that lacks has a reason of its own.
    """
    musts = [check for check in judged if check.is_must]
    n_open = sum(check.holds is None for check in musts)
    if not n_open or measured:
        return ""
    source = f"{bench.name} holds no measurement of what they judge" if bench else f"missing: {NO_ROWS}"
    failed = sum(check.holds is False for check in musts)
    return (
        f"{n_open} of {len(musts)} gates cannot be judged, and {failed or 'none'} failed: {source}. That is no fault "
        "of this machine, and no pass either: measure=True on a GPU judges them, gates=False only shows what is stored"
    )


def _variants(card: Card) -> str:
    counts = [f"{arch} {len(card.variants(arch))} + {len(card.slow_variants(arch))} slow" for arch in ARCHES]
    return "; ".join(counts)


def _pairs(given: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} = {value}" for name, value in given.items())
