"""The order in which the kernels read W: packed once, when a model is loaded. Source: derived here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.kernels.card import E4M3
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.operands import halves_first, lanes_first
from eagle3core.kernels.gemm.products import UNIT


def pack_weight(w: Tensor, epilogue: Epilogue) -> Tensor:
    """W `[n_w, k]` in the order a block reads it: tiles of 16 rows, each a run of 1 KB pieces of 32 k in lane order.

    A piece is [lower or upper of the pairs][8 rows][32 k]. K is padded with zeros to a multiple of 32. Done once, at
    load; saves a block 16 distant rows to walk (3% of a decode step on an H200). Of e4m3 a piece has 512 bytes (`fp8`).
    """
    if w.dtype == E4M3:
        return lanes_first(pack_weight(w.view(torch.uint8), epilogue)).view(E4M3)
    n_w, k = w.shape
    padded = F.pad(w, (0, -k % UNIT))
    units = padded.shape[1] // UNIT
    if epilogue.kind == "swiglu":
        pieces = padded.view(2, n_w // 16, 8, units, UNIT).permute(1, 3, 0, 2, 4)
    elif epilogue.kind == "qkv":
        d = epilogue.head_dim
        pieces = padded.view(n_w // d, 2, d // 16, 8, units, UNIT).permute(0, 2, 4, 1, 3, 5)
    else:
        pieces = padded.view(n_w // 16, 2, 8, units, UNIT).permute(0, 3, 1, 2, 4)
    return pieces.reshape(n_w, units * UNIT).contiguous()


def unpack_weight(w: Tensor, epilogue: Epilogue, k: int) -> Tensor:
    """The inverse of `pack_weight`: W `[n_w, k]`."""
    if w.dtype == E4M3:
        return unpack_weight(halves_first(w.view(torch.uint8)), epilogue, k).view(E4M3)
    n_w, units = w.shape[0], w.shape[1] // UNIT
    if epilogue.kind == "swiglu":
        rows = w.view(n_w // 16, units, 2, 8, UNIT).permute(2, 0, 3, 1, 4)
    elif epilogue.kind == "qkv":
        d = epilogue.head_dim
        rows = w.view(n_w // d, d // 16, units, 2, 8, UNIT).permute(0, 3, 1, 4, 2, 5)
    else:
        rows = w.view(n_w // 16, units, 2, 8, UNIT).permute(0, 2, 3, 1, 4)
    return rows.reshape(n_w, units * UNIT)[:, :k]


def pack_scales(scales: Tensor, epilogue: Epilogue) -> Tensor:
    """Scales `[n_w / 8, blocks]` of 8 rows of W by 128 k each, as kernels read them: `[tiles, blocks, 2]`.

    The two are those of a tile's lower and upper eight rows, so that a lane loads both of its own at once.
    """
    groups = _groups_of_tiles(8 * len(scales), epilogue).to(scales.device)
    return scales[groups].permute(0, 2, 1).contiguous()


def unpack_scales(packed: Tensor, epilogue: Epilogue) -> Tensor:
    """The inverse of `pack_scales`."""
    groups = _groups_of_tiles(16 * len(packed), epilogue).to(packed.device)
    scales = packed.new_empty(2 * len(packed), packed.shape[1])
    scales[groups] = packed.permute(0, 2, 1)
    return scales


def _groups_of_tiles(n_w: int, epilogue: Epilogue) -> Tensor:
    """Which eight rows of W are the lower and the upper ones of each tile, `[tiles, 2]`."""
    rows = torch.arange(n_w)[:, None].expand(n_w, UNIT)
    return pack_weight(rows, epilogue).view(-1, 2, 8 * UNIT)[..., 0] // 8
