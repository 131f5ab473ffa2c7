"""The emulator with instructions replaced: bugs planted in what a kernel runs on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from eagle3core.kernels.emulator import instructions as emulator


def faulty(**replaced: Any) -> SimpleNamespace:
    """The emulator's instruction set with some names replaced."""
    return SimpleNamespace(**{n: v for n, v in vars(emulator).items() if n[0] != "_"} | replaced)
