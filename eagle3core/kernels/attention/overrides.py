"""Settings of the attention kernel by hand: environment variables that replace parts of the chosen plan.

For trials and for finding faults; sweeps and the tuned file are how settings become defaults. All of them are
order-neutral. Source: docs/requirements.md R-107; docs/measuring.md says what became of its other names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from eagle3core.errors import ConfigError
from eagle3core.kernels.attention.layout import UNIT, Shape

KV_TILE = "EAGLE3_FMHA_KV_TILE"  # keys scored at once: a unit, or several
MAX_TILES = "EAGLE3_FMHA_MAX_TILES"  # such tiles under way at once: the ring's depth
SPLITS_PER_CTA = "EAGLE3_FMHA_SPLITS_PER_CTA"  # splits of the keys that a block handles, one after the other
WARPGROUPS = "EAGLE3_FMHA_WARPGROUPS"  # 0: warpgroups multiply nowhere; 1, or unset: wherever they can


def warpgroups_wanted() -> bool:
    """Whether the environment leaves `attention_group` its place.

    Raises:
        ConfigError: neither 0 nor 1.
    """
    text = os.environ.get(WARPGROUPS, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{WARPGROUPS} is {text!r}", "0 or 1", "correct it, or unset it, which means 1")
    return text != "0"


def overrides(shape: Shape, row_warps: int, *, grouped: bool = False, by_split: bool = False) -> dict[str, Any]:
    """Fields of a plan that the environment sets, for a kernel of `row_warps`; `grouped`, `by_split` as in `Plan`.

    Raises:
        ConfigError: a value that the kernel is not made for.
    """
    fewest, most = (max(1, row_warps // 4), 256 // shape.dim) if row_warps else (shape.least_units, 2)
    if grouped:
        fewest = most = row_warps // 2  # 64 keys of all rings
    runs = list(range(1, shape.splits + 1))
    if by_split:
        fewest = most = 1
        runs = [shape.bundle]
    tiles = [UNIT * units for units in (1, 2, 4) if fewest <= units <= most]
    depths = list(range(3 if row_warps and not grouped else 2, 17))
    given: Mapping[str, tuple[str, list[int], Callable[[int], int]]] = {
        KV_TILE: ("units", tiles, lambda value: value // UNIT),
        MAX_TILES: ("stages", depths, int),
        SPLITS_PER_CTA: ("run", runs, int),
    }
    made = {}
    for variable, (name, allowed, convert) in given.items():
        text = os.environ.get(variable, "")
        if not text:
            continue
        if not text.isdigit() or int(text) not in allowed:
            raise ConfigError(
                f"{variable} is {text!r}", f"one of {allowed} for this kernel", f"correct it, or unset {variable}"
            )
        made[name] = convert(int(text))
    return made
