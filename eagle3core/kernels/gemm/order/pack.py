"""x in the order in which `gemm_group` fetches it: a small launch before the GEMM.

[block of x rows][stream over K][stage][unit][product][8 rows][k half of a product][row of 8][16 bytes]: a stage of a
block is one contiguous piece, in the order the tensor cores read. All streams take as many stages as the longest.
Zeros stand for rows past the last, k past the last, and the units of a stage that belong to another stream: after those
of its own, or before them where a stage would read W past the end and starts earlier.

Source: derived here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3core.kernels.card import Launch, Variant, overlaps, parameters
from eagle3core.kernels.gemm.order.place import HALF_BYTES, make_place
from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS, UNIT

_WARPS = 8
_PARAMETERS = parameters("x:in packed:out rows:i32 k:i32 x_tiles:i32 units:i32")


class OrderedRows(NamedTuple):
    """Where a kernel that makes x may put it in this order, which saves the launch that packs it.

    Attributes:
        words: room for x in the workspace of the GEMM that reads it. x_tiles: of that GEMM's blocks.
    """

    words: Tensor
    x_tiles: int


def is_whole(k: int, units: int) -> bool:
    """Whether streams are whole stages: then unit u of a block of rows lies at place u, whatever reads it."""
    return k % (STREAMS * UNIT * units) == 0


def make_store_ordered(isa: Any) -> Any:
    """`store_ordered(words, x_tiles, k, row, column, low, high)`: four elements of a row where `pack_rows` puts them.

    `column` is the first one's, a multiple of 4; `low` and `high` are two elements each. Only where `is_whole`.
    """
    place = make_place(isa)

    def store_ordered(words: Any, x_tiles: Any, k: Any, row: Any, column: Any, low: Any, high: Any) -> None:
        at = words + place(x_tiles, k, row, column)
        isa.store_u32(at, low)
        isa.store_u32(at + HALF_BYTES, high)

    return isa.inlined(store_ordered)


def packed_words(rows: int, k: int, x_tiles: int, units: int) -> int:
    """Words of 4 bytes that packed x takes."""
    return -(-rows // (8 * x_tiles)) * x_tiles * STREAMS * _stream_units(k, units) * (FRAGMENT // 4)


def _stream_units(k: int, units: int) -> int:
    """Units that each stream takes: the longest one's, up to whole stages."""
    longest = -(-k // (UNIT * STREAMS))
    return -(-longest // units) * units


def make_pack_rows(isa: Any, *, overlap: bool) -> Any:
    """The kernel; grid (units of a row of packed x by `_WARPS`, groups of 8 rows). A warp packs 8 rows by 32 k."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64

    def pack_rows(x: Any, packed: Any, rows: Any, k: Any, x_tiles: Any, units: Any) -> None:
        # The GEMM's blocks may start now: they fetch W, which needs no x.
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & 31)
        place, group = i32(cuda.blockIdx.x * _WARPS + (tid >> 5)), i32(cuda.blockIdx.y)
        n_units = i32((k + (UNIT - 1)) >> 5)
        stream_units = i32((((n_units + (STREAMS - 1)) >> 2) + units - 1) & (0 - units))
        # At most three rounds instead of a division.
        stream, within = i32(0), place
        while within >= stream_units:
            stream, within = i32(stream + 1), i32(within - stream_units)
        if stream < STREAMS:
            stop = i32(((stream + 1) * n_units) >> 2)
            unit = i32(((stream * n_units) >> 2) + (within & (0 - units)))
            # Where a stage would read W past the end, it starts earlier; its first units then belong to the stage
            # before and are zeros here (`unit <= own`).
            own = i32(min(unit, n_units - units) + (within & (units - 1)))
            row, element = i32(group * 8 + (lane >> 2)), i32(own * UNIT + (lane & 3) * 8)
            v0, v1, v2, v3 = i32(0), i32(0), i32(0), i32(0)
            if unit <= own and own < stop and row < rows and element < k:
                v = isa.load_u32x4(x + (i64(row) * k + element) * 2)
                v0, v1, v2, v3 = v[0], v[1], v[2], v[3]
            block = i32(group // x_tiles)
            tile = i32(group - block * x_tiles)
            unit_at = i64(i32(block * (STREAMS * stream_units) + place)) * (x_tiles * FRAGMENT)
            at = packed + unit_at + (tile * 256 + lane * 4)
            # Of 8 k a lane holds, the first product takes four, the second four: two k of each go to a k half, 128
            # bytes apart.
            second = at + x_tiles * 256
            isa.store_u32(at, v0)
            isa.store_u32(at + 128, v1)
            isa.store_u32(second, v2)
            isa.store_u32(second + 128, v3)

    return pack_rows


def pack_variant(arch: str) -> Variant:
    """The one compiled form."""
    return Variant(
        name="gemm_pack_rows", make=make_pack_rows, constants={"overlap": overlaps(arch)}, parameters=_PARAMETERS,
        threads=32 * _WARPS, blocks_per_sm=8, max_registers=32, dependent=overlaps(arch),
    )  # fmt: skip


def pack_rows(arch: str, x: Tensor, packed: Tensor, x_tiles: int, units: int) -> Launch:
    """Packs `x: [M, k]` of 2-byte elements for blocks of 8 `x_tiles` rows and stages of `units` units."""
    rows, k = x.shape
    grid = -(-STREAMS * _stream_units(k, units) // _WARPS), -(-rows // (8 * x_tiles)) * x_tiles
    return pack_variant(arch).launch(grid, x=x, packed=packed, rows=rows, k=k, x_tiles=x_tiles, units=units)


def pack_rows_reference(x: Tensor, x_tiles: int, units: int) -> Tensor:
    """What `pack_rows` writes, `[blocks, STREAMS, units of a stream, 2, x_tiles, 2, 8, 8]`."""
    (rows, k), n_units, width = x.shape, -(-x.shape[1] // UNIT), _stream_units(x.shape[1], units)
    blocks = -(-rows // (8 * x_tiles))
    padded = torch.zeros(blocks * 8 * x_tiles, n_units, UNIT, dtype=x.dtype, device=x.device)
    padded[:rows].view(rows, -1)[:, :k] = x
    packed = torch.zeros(blocks * 8 * x_tiles, STREAMS, width, UNIT, dtype=x.dtype, device=x.device)
    for s in range(STREAMS):
        begin, end = s * n_units // STREAMS, (s + 1) * n_units // STREAMS
        for unit in range(begin, end, units):
            start = min(unit, n_units - units)
            for own in range(unit, min(unit + units, end)):
                packed[:, s, unit - begin + own - start] = padded[:, own]
    # Of 8 consecutive k of a lane, the first four belong to the first product, two to each of its halves.
    pieces = packed.view(blocks, x_tiles, 8, STREAMS, width, 4, 2, 2, 2)  # block, tile, row, s, unit, t, i, h, e
    return pieces.permute(0, 3, 4, 6, 1, 7, 2, 5, 8).reshape(blocks, STREAMS, width, 2, x_tiles, 2, 8, 8)
