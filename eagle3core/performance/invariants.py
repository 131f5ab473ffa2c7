"""The seven promises of performance mode by name, and the error that a broken one is.

Source: docs/requirements.md R-113.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3core.errors import InvariantViolated


@dataclass(frozen=True)
class Invariant:
    """One promise.

    Attributes:
        number: in docs/requirements.md R-113.
        broken: what is counted, in words; 0 of them are allowed.
        remedy: what to do about one.
    """

    number: int
    broken: str
    remedy: str


INVARIANTS = {
    "gemm_fallbacks": Invariant(
        1, "steps whose matrix products were not the engine's own kernels",
        "use a GPU, bfloat16 or float16, and shapes that the kernels take; the backend says which does not fit",
    ),
    "untuned_products": Invariant(
        2, "matrix products without an entry in the tuned file of their GPU",
        "tune the missing shapes with `eagle3lab sweep gemm`, or set EAGLE3_GEMM_TUNED to another file, or to none",
    ),
    "single_token_steps": Invariant(
        3, "steps that drafted fewer tokens than were asked for",
        "repair the draft, or ask for no speculation",
    ),
    "faults": Invariant(
        4, "faults that the device reported: acceptance outside the tree, a row without a block, no room",
        "report this with the configuration; outside performance mode the slot goes on as plain decoding",
    ),
    "guessed_layouts": Invariant(
        5, "outputs whose axes would have to be guessed from their length",
        "give results with every axis: one row a sequence, its accepted tokens and the bonus",
    ),
    "debug_switches": Invariant(
        6, "switches that make a step log, copy to the host or wait",
        "turn the switch off, or ask for it by a variable EAGLE3_*_DEBUG",
    ),
    "divergent_tokens": Invariant(
        7, "requests whose greedy tokens differ between two runs, or from plain decoding",
        "report this with the prompt; `eagle3lab prove identity` finds the first different bit",
    ),
}  # fmt: skip


def violated(name: str, what: str, allowed: str = "") -> InvariantViolated:
    """The error of a broken invariant, which it names."""
    one = INVARIANTS[name]
    return InvariantViolated(f"{what} (invariant {name})", allowed or f"no {one.broken}", one.remedy)
