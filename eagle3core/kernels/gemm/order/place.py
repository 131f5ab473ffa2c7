"""Where an element of x lies in the order in which `gemm_group` fetches x: known to whoever writes x so.

Of [unit of 32 k][product][8 rows][k half of a product][row of 8][16 bytes], for each block of x rows; `pack` says more.
Source: derived here.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.gemm.products import FRAGMENT

HALF_BYTES = 128  # from two elements of x to the next two, which belong to the other k half of a product


def make_parts(isa: Any) -> tuple[Any, Any]:
    """Inlined parts of `place`: `of_group(address, x_tiles, k, group)`, `address` moved to where eight rows of x begin;
    and `within(x_tiles, row, column)`, bytes from there, whatever the eight rows.
    """
    i32, i64 = isa.i32, isa.i64

    def of_group(address: Any, x_tiles: Any, k: Any, group: Any) -> Any:
        block = i32(group // x_tiles)
        tile = i32(group - block * x_tiles)
        return isa.address_after(address, i32((k >> 5) * (x_tiles * FRAGMENT)), block) + tile * 256

    def within(x_tiles: Any, row: Any, column: Any) -> Any:
        product, piece = i32((column >> 2) & 1), i32((column >> 3) & 3)
        unit_at = i64(column >> 5) * (x_tiles * FRAGMENT)
        return unit_at + (product * x_tiles * 256 + (row & 7) * 16 + piece * 4)

    return isa.inlined(of_group), isa.inlined(within)


def make_place(isa: Any) -> Any:
    """Inlined `place(x_tiles, k, row, column)`: bytes to the first half's word of the four elements with `column`.

    Only where streams are whole stages (`pack.is_whole`): then unit u of a block of rows lies at place u.
    """
    i32, i64 = isa.i32, isa.i64
    of_group, within = make_parts(isa)

    def place(x_tiles: Any, k: Any, row: Any, column: Any) -> Any:
        return of_group(i64(0), x_tiles, k, i32(row >> 3)) + within(x_tiles, row, column)

    return isa.inlined(place)


def make_store_pair(isa: Any, x_tiles: int) -> Any:
    """Inlined `store_pair(ordered, k, row, column, word)`: two elements of a row, the first in an even column."""
    i32, place = isa.i32, make_place(isa)

    def store_pair(ordered: Any, k: Any, row: Any, column: Any, word: Any) -> None:
        half = i32((column >> 1) & 1)
        isa.store_u32(ordered + place(x_tiles, k, row, column) + half * HALF_BYTES, word)

    return isa.inlined(store_pair)
