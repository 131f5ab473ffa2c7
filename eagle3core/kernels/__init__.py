"""Op cards: each file of the rooms below holds one op of the engine, its equation and its plain torch definition.

`<op>_reference` runs on any device and in any dtype; it is the definition every faster version is compared with. A file
with GPU kernels also has a `CARD` (see `card.Card`); `registry()` lists them. Importing this package, or a card, needs
neither CUDA nor Numba. At the door: what a card is, and how kernels are compiled, launched, tuned and proven.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from eagle3core.kernels.card import (
    ARCHES,
    SHARED_BYTES_SM,
    Call,
    Card,
    Case,
    Cost,
    Launch,
    Tensors,
    Variant,
    case_id,
    parameters,
    poison,
)
from eagle3core.kernels.compile import compile_variant, tool

# What the lab may use: names of the card, the registry, and whole files at the door by their names.
__all__ = [
    "ARCHES",
    "SHARED_BYTES_SM",
    "Call",
    "Card",
    "Case",
    "Cost",
    "Launch",
    "Tensors",
    "Variant",
    "case_id",
    "compile_variant",
    "cubins",
    "emulator",
    "launch",
    "parameters",
    "poison",
    "proof",
    "registry",
    "tool",
    "tuned",
]

_DECLARES_A_CARD = re.compile(r"^CARD\b", re.MULTILINE)


def registry() -> dict[str, Card]:
    """Every op card of the package by name, in alphabetical order."""
    root = Path(__file__).parent
    cards = {}
    for path in sorted(root.glob("*/*.py")):
        if _DECLARES_A_CARD.search(path.read_text(encoding="utf-8")):
            card = importlib.import_module(f"{__name__}.{path.parent.name}.{path.stem}").CARD
            cards[card.name] = card
    return dict(sorted(cards.items()))
