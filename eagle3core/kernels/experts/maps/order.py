"""The order in which kernels read the experts' matrices: tiles of 16 rows, units of 32 k, made once at load.

A tile is 8 pairs of rows: neighbours by 8, or a gate with its up, so that one lane has both. A unit of a tile is one
run of bytes in lane order: of 16-bit values and of e4m3 as the GEMM has them; of MXFP4 256 bytes of values, 8 of each
lane (its row of the pairs' lower half, then of the upper; bits as `isa.four_bits` says), then a byte a row of its scale
as bf16's exponent of 2^126 times it, those of a pair side by side. Scales of blocks of e4m3 (8 rows by 128 k) lie
beside the matrices: the lower and the upper eight rows of a tile, block after block.

Source: derived here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import E4M3, PLAIN_TORCH
from eagle3core.kernels.experts.mxfp4 import BIAS
from eagle3core.kernels.gemm.fp8.operands import halves_first, lanes_first
from eagle3core.kernels.isa.four_bits import PLACES
from eagle3core.kernels.isa.four_bits import POWER_BIAS as POWER_BIAS

Pairs = Literal["columns", "halves", "alternate"]
COLUMNS: Pairs = "columns"  # a row with the one 8 on
HALVES: Pairs = "halves"  # gate and up: the first half of the rows and the second
ALTERNATE: Pairs = "alternate"  # gate and up in turn

TILE, UNIT = 16, 32
VALUE_BYTES = TILE * UNIT // 2  # of a unit in 4 bits
FP8, FP8_BLOCKS = "fp8", "fp8_blocks"  # e4m3 with a scale a row, or one for 8 rows by 128 k
UNIT_BYTES = {"mxfp4": VALUE_BYTES + TILE, "plain": 2 * TILE * UNIT, FP8: TILE * UNIT, FP8_BLOCKS: TILE * UNIT}
MOST_SCALE = BIAS + 1  # 2^126 times a larger scale is no bf16


def rows_in_order(n_rows: int, pairs: Pairs) -> Tensor:
    """`[tiles, 2, 8]` rows of a matrix as tiles hold them, the lower ones of pairs first.

    Raises:
        KernelLimit: rows that do not fill tiles.
    """
    if n_rows % TILE:
        raise KernelLimit(f"an expert's map has {n_rows} rows", f"multiples of {TILE}", PLAIN_TORCH)
    rows = torch.arange(n_rows)
    if pairs == HALVES:
        return rows.view(2, -1, 8).transpose(0, 1)
    if pairs == ALTERNATE:
        return rows.view(-1, 8, 2).transpose(1, 2)
    return rows.view(-1, 2, 8)


def ordered_plain(w: Tensor, pairs: Pairs) -> Tensor:
    """`[tiles, units, 512]` of a matrix `[rows, k]` of 16-bit values.

    Raises:
        KernelLimit: k is no whole number of units.
    """
    return _by_units(w, pairs, UNIT).permute(0, 3, 1, 2, 4).flatten(2).contiguous()


def plain_of(ordered: Tensor, pairs: Pairs) -> Tensor:
    """The inverse of `ordered_plain`: `[rows, k]`."""
    tiles, units, _ = ordered.shape
    return _in_rows(ordered.view(tiles, units, 2, 8, UNIT).permute(0, 2, 3, 1, 4), pairs)


def ordered_fp8(w: Tensor, pairs: Pairs) -> Tensor:
    """`[tiles, units, 512]` of a matrix `[rows, k]` in e4m3.

    Raises:
        KernelLimit: as of `ordered_plain`.
    """
    ordered = ordered_plain(w.view(torch.uint8), pairs)
    return lanes_first(ordered.view(len(ordered) * TILE, -1)).view(ordered.shape).view(E4M3)


def fp8_of(ordered: Tensor, pairs: Pairs) -> Tensor:
    """The inverse of `ordered_fp8`."""
    values = halves_first(ordered.view(torch.uint8).reshape(len(ordered) * TILE, -1))
    return plain_of(values.view(ordered.shape), pairs).view(E4M3)


def ordered_block_scales(scales: Tensor, pairs: Pairs) -> Tensor:
    """`[tiles, blocks, 2]` of scales `[rows / 8, blocks]`.

    Raises:
        KernelLimit: pairs that are neighbours, which share a block with more than the rows of one half.
    """
    if pairs == ALTERNATE:
        raise KernelLimit("gates and ups in turn, in FP8 by block", "gates before ups", PLAIN_TORCH)
    halves = scales.view(2, -1, scales.shape[1]) if pairs == HALVES else scales.view(-1, 2, scales.shape[1])
    return (halves.permute(1, 2, 0) if pairs == HALVES else halves.transpose(1, 2)).contiguous()


def block_scales_of(ordered: Tensor, pairs: Pairs) -> Tensor:
    """The inverse of `ordered_block_scales`."""
    halves = ordered.permute(2, 0, 1) if pairs == HALVES else ordered.transpose(1, 2)
    return halves.reshape(-1, ordered.shape[1])


def ordered_mxfp4(blocks: Tensor, scales: Tensor, pairs: Pairs) -> Tensor:
    """`[tiles, units, 272]` bytes of a matrix of `blocks: [rows, k / 32, 16]` and `scales: [rows, k / 32]`.

    Raises:
        KernelLimit: a scale above 2.
    """
    if not scales.is_meta and int(scales.max()) > MOST_SCALE:
        raise KernelLimit(
            f"a group's scale is 2^{int(scales.max()) - BIAS}", f"at most 2^{MOST_SCALE - BIAS}", PLAIN_TORCH
        )
    n_units = blocks.shape[1]
    codes = torch.stack([blocks & 15, blocks >> 4], -1).view(len(blocks), n_units, 4, 4, 2).int()  # t, pair, which
    words = codes.new_zeros(codes.shape[:-2])
    for i, places in enumerate(torch.tensor(PLACES, device=blocks.device, dtype=torch.int32).unbind(-1)):
        words += ((codes >> i & 1) << places).sum((-2, -1), dtype=torch.int32)
    pieces = _by_units(words.flatten(1), pairs, 4).permute(0, 3, 2, 4, 1)  # [tiles, units, row, t, half]
    values = pieces.contiguous().view(torch.uint8).reshape(-1, n_units, VALUE_BYTES)
    powers = _by_units(scales + POWER_BIAS, pairs, 1)[..., 0].permute(0, 3, 2, 1).flatten(2)
    return torch.cat([values, powers], -1)


def mxfp4_of(ordered: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The inverse of `ordered_mxfp4`: blocks and scales."""
    tiles, units, _ = ordered.shape
    words = ordered[..., :VALUE_BYTES].contiguous().view(torch.int32).view(tiles, units, 8, 4, 2)
    words = _in_rows(words.permute(0, 4, 2, 1, 3), pairs).view(tiles * TILE, units, 4)[..., None, None]
    codes = torch.zeros(*words.shape[:-2], 4, 2, dtype=torch.uint8, device=words.device)
    for i, places in enumerate(torch.tensor(PLACES, device=words.device).unbind(-1)):
        codes |= ((words >> places & 1) << i).to(torch.uint8)
    codes = codes.flatten(-3)  # [rows, units, 32]
    powers = ordered[..., VALUE_BYTES:].view(tiles, units, 8, 2).permute(0, 3, 2, 1)
    return codes[..., ::2] | codes[..., 1::2] << 4, _in_rows(powers[..., None], pairs) - POWER_BIAS


def _by_units(values: Tensor, pairs: Pairs, width: int) -> Tensor:
    """`[tiles, 2, 8, units, width]` of `[rows, units * width]`."""
    rows, k = values.shape
    if k % width:
        raise KernelLimit(f"an expert's map reads {k} values", f"multiples of {width}", PLAIN_TORCH)
    ordered = values[rows_in_order(rows, pairs).to(values.device)]
    return ordered.view(*ordered.shape[:3], -1, width)


def _in_rows(pieces: Tensor, pairs: Pairs) -> Tensor:
    """The inverse of `_by_units`: `[rows, units * width]` of `[tiles, 2, 8, units, width]`."""
    n_rows = len(pieces) * TILE
    flat = pieces.reshape(n_rows, -1)
    made = torch.empty_like(flat)
    made[rows_in_order(n_rows, pairs).flatten().to(flat.device)] = flat
    return made
