"""W and x into a warp's ring, 16 bytes a lane: a lane copies what itself multiplies, so nobody waits for another.

Source: derived here; asynchronous copies from the PTX ISA.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.gemm.products import FRAGMENT, UNIT


def make_lane_copies(
    isa: Any, *, x_tiles: int, w_tiles: int, units: int, packed: bool, ragged: bool, fp8: bool, x_offset: int,
    sharers: int,
) -> tuple[int, Any, Any, Any]:  # fmt: skip
    """Pieces of x that a lane copies for a stage, and inlined `piece_tile(j, part)`, the tile of x that its j-th is of,
    `copy_w(target, sources, partner, offset, unit, n_units, t)` and `copy_x(target, source, ..., part)`.

    `target` is the lane's shared address in a stage, where W of its first unit, `unit` of `n_units`, goes and, from
    `x_offset` bytes on, x; `t` the lane's place in a row. `sources` are the addresses of its first 16 bytes of each
    tile of W, `offset` bytes before the stage's, `partner` the bytes from a row to the one that it is paired with;
    `source` that of x, `tile_bytes` from a tile of x to the next, `sizes` 16 a piece, or 0 for a row past the last.
    Of `sharers` warps, each with `w_tiles` tiles of W, the one of this `part` copies every so many-th piece of x.
    """
    i32 = isa.i32
    tile_bytes_w = FRAGMENT if fp8 else 2 * FRAGMENT  # of a unit, packed
    unit_bytes = tile_bytes_w if packed else 2 * UNIT  # from one unit of W to the next

    def copy_w(target: Any, sources: Any, partner: Any, offset: Any, unit: Any, n_units: Any, t: Any) -> None:
        for r in range(w_tiles):
            for u in range(units):
                at, source = i32(target + (r * units + u) * tile_bytes_w), sources[r] + offset + u * unit_bytes
                # K ends in the middle of the last unit: lanes 2 and 3 of a row hold what lies past it, and copy zeros.
                # Packed W has its zeros in memory.
                if ragged and not packed:
                    size = i32(16)
                    if unit + u == n_units - 1 and t >= 2:
                        size = i32(0)
                    isa.copy16_fill(at, source, size)
                    isa.copy16_fill(i32(at + FRAGMENT), source + partner, size)
                else:
                    isa.copy16(at, source)
                    if not fp8:  # of which a lane's 16 bytes are both rows'
                        isa.copy16(i32(at + FRAGMENT), source + partner)

    n_pieces, unit_shift = -(-x_tiles * units // sharers), units.bit_length() - 1

    def piece_tile(j: int, part: Any) -> Any:
        return j >> unit_shift if sharers == 1 else i32(i32(part + j * sharers) >> unit_shift)

    def copy_x(
        target: Any, source: Any, tile_bytes: Any, sizes: Any, unit: Any, n_units: Any, t: Any, part: Any
    ) -> None:
        for j in range(n_pieces):
            place = part + j * sharers if sharers > 1 else j
            m, u, size = place >> unit_shift, place & (units - 1), sizes[j]
            if ragged and unit + u == n_units - 1 and t >= 2:
                size = i32(0)
            if place < x_tiles * units:
                at = i32(target + x_offset + place * FRAGMENT)
                isa.copy16_cached_fill(at, source + m * tile_bytes + u * (2 * UNIT), size)

    return n_pieces, isa.inlined(piece_tile), isa.inlined(copy_w), isa.inlined(copy_x)
