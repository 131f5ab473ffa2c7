"""Where the streams of a tile leave their sums, and who adds them up: a block's shared memory.

Source: derived here; fragment layouts from the PTX ISA.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.experts.maps.form import STREAMS


def make_sums(isa: Any, *, x_tiles: int, w_tiles: int) -> tuple[Any, Any]:
    """Inlined `leave_sums(accumulators, buffer, warp, g, t)` and `sum_of(buffer, item)`: (v0, v1) of a pair of a row.

    They lie as [stream][tile][x row][16 rows of W], the lower rows of pairs first; stream s is warp s.
    """
    i32, block_sums = isa.i32, 128 * x_tiles * w_tiles

    def leave_sums(accumulators: Any, buffer: Any, warp: Any, g: Any, t: Any) -> None:
        for r in range(w_tiles):
            for m in range(x_tiles):
                q = (r * x_tiles + m) * 4
                at = i32(buffer + (warp * block_sums + r * (128 * x_tiles) + (m * 8 + t * 2) * 16 + g) * 4)
                isa.shared_store_f32(at, accumulators[q])
                isa.shared_store_f32(i32(at + 64), accumulators[q + 1])
                isa.shared_store_f32(i32(at + 32), accumulators[q + 2])
                isa.shared_store_f32(i32(at + 96), accumulators[q + 3])

    def sum_of(buffer: Any, item: Any) -> Any:
        at = i32(buffer + ((item >> 3) * 16 + (item & 7)) * 4)
        v0, v1 = isa.shared_load_f32(at), isa.shared_load_f32(i32(at + 32))
        for s in range(1, STREAMS):
            v0 = v0 + isa.shared_load_f32(i32(at + s * (block_sums * 4)))
            v1 = v1 + isa.shared_load_f32(i32(at + s * (block_sums * 4) + 32))
        return v0, v1

    return isa.inlined(leave_sums), isa.inlined(sum_of)
