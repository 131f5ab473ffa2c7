"""Op cards: each file holds one op of the engine, its equation and its plain torch definition.

`<op>_reference` runs on any device and in any dtype; it is the definition every faster version is compared with. A file
with GPU kernels also has a `CARD` (see `card.Card`); `registry()` lists them. Importing this package, or a card, needs
neither CUDA nor Numba.
"""

from __future__ import annotations

import importlib
import pkgutil

from eagle3core.kernels.card import Card

# First words of the files that hold no op: the machinery, and `ptx`, whose import needs Numba's CUDA compiler.
_NOT_OPS = frozenset({"bench", "card", "compile", "emulator", "launch", "machine", "proof", "ptx", "sanitize"})


def registry() -> dict[str, Card]:
    """Every op card of the package by name, in alphabetical order."""
    cards = {}
    for found in pkgutil.iter_modules(__path__):
        if found.name.partition("_")[0] not in _NOT_OPS:
            card = getattr(importlib.import_module(f"{__name__}.{found.name}"), "CARD", None)
            if isinstance(card, Card):
                cards[card.name] = card
    return cards
