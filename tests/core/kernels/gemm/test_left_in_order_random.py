"""Rows left in order: maps of random shapes, kernels and formats of W, and planted bugs."""

from random import Random

import pytest
from planted_sources import rebuilt
from rings import seeds, slow_from
from test_left_in_order import wrong

from eagle3core.kernels.card import Case
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm import finish, launcher, sums
from eagle3core.kernels.gemm.order import place
from eagle3core.kernels.gemm.ring import kernel
from eagle3core.kernels.gemm.tiling import Tiling


def drawn(draw: Random) -> tuple[Case, Tiling, int]:
    """A map that leaves its rows, the tiling of its kernel, and tiles of x of the next map's blocks."""
    fp8, name = draw.choice([False, True, "blocks"]), draw.choice(["ring", "bulk", "group", "tile"])
    if name == "tile" and fp8 == "blocks":
        name = "group"  # there is no such kernel
    if name == "group":
        split = draw.choice([1, 4])
        shares = {"split": split, "together": split > 1 and draw.random() < 0.5}
        tiling = Tiling("group", draw.randint(1, 4), 4 * draw.randint(1, 2), draw.choice([1, 2]), 3, **shares)
    elif name == "tile":
        tiling = Tiling("tile", draw.choice([1, 2]), 4, 1, draw.randint(2, 4), 1, 4)
    else:
        tiling = Tiling(name, draw.choice([1, 2]), draw.choice([1, 2, 4]), 1, draw.randint(2, 5))
    case: Case = {
        "kind": draw.choice(["residual", "swiglu"]), "m": draw.randint(1, 8 * tiling.x_tiles + 5),
        "n": 128 * draw.randint(1, 2), "dtype": draw.choice(["bf16", "f16"]), "packed": True,
        "k": 512 if fp8 == "blocks" and name != "ring" else 32 * draw.randint(4, 12), "bias": draw.random() < 0.5,
    }  # fmt: skip
    case |= {"fp8": fp8} if fp8 else {}
    case |= {"norm": True} if case["kind"] == "swiglu" else {"residual": draw.random() < 0.5}
    return case, tiling, draw.randint(1, 4)


@pytest.mark.emulated
@pytest.mark.parametrize("seed", seeds(6, 8, 216))
def test_any_map_leaves_its_rows_where_packing_them_puts_them(seed: int) -> None:
    case, tiling, x_tiles = drawn(Random(seed))
    assert wrong(case, tiling, x_tiles, seed) == {}, (case, tiling, x_tiles)


PLANTED = {
    # name: (factory's module, factory, pattern, replacement)
    "scales are written where rows are left": (
        kernel, "make_gemm_ring", r"third, ordered,\n                \)", "third, scales,\n                )",
    ),
    "an odd half lies beside the even one": (place, "make_store_pair", r"half \* HALF_BYTES", "half * 4"),
    "the next map's blocks are higher by a tile": (
        place, "make_store_pair", r"place\(x_tiles, k, row, column\) \+", "place(x_tiles + 1, k, row, column) +",
    ),
    "an odd lane's columns are those of its even one": (
        finish, "make_finish", r"i32\(column \+ 7\)", "i32(column - 1)",
    ),
    "the odd lane of two stores their word": (
        finish, "make_finish", r"row < rows and pair & 1 == 0", "row < rows and pair & 1",
    ),
    "rows past the last are left too": (
        finish, "make_finish", r"row < rows and pair & 1 == 0", "row < 64 and pair & 1 == 0",
    ),
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("bug", slow_from(3, PLANTED))
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Tiling("ring", 2, 2, 1, 2)
    cases: list[Case] = [
        {"kind": kind, "m": 11, "n": 128, "k": 128, "dtype": "bf16", "packed": True, "fp8": True}
        for kind in ("residual", "swiglu")
    ]
    assert [wrong(case, ring, 2) for case in cases] == [{}, {}]
    module, factory, pattern, replacement = PLANTED[bug]
    rebuilt(module, pattern, replacement, monkeypatch, factory, (finish, kernel, sums, launcher))
    monkeypatch.setitem(launcher._KERNELS, "ring", kernel.make_gemm_ring)
    try:
        found = [wrong(case, ring, 2) for case in cases]
    except EmulationError:
        return
    assert any(found), bug
