"""Room that the GEMM's launches of a stream share, and who may use which part of it.

From the start lie the sums that blocks which share K leave each other, and x where a launch packs it. Behind the most
that sums take, and at the end, are two places where a kernel leaves rows in the order in which the next map's kernel
fetches them (`order`): it reads its own x at one, so it leaves the next map's at the other.

Source: derived here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels import tuned
from eagle3core.kernels.card import DTYPES
from eagle3core.kernels.gemm.fp8.tiling import fp8_key, tiling_for
from eagle3core.kernels.gemm.order.pack import OrderedRows, is_whole, packed_words
from eagle3core.kernels.gemm.products import STREAMS
from eagle3core.kernels.gemm.tiling import Tiling

WORKSPACE_BYTES = 80 << 20  # the least: enough for every tiling below, with 512 rows of 14336; see `workspace`
_SUMS_BYTES = 56 << 20  # the most that blocks that share K leave each other, under the rule's tilings
_WIDEST, _MOST_UNITS = 256, 8  # rows of a block, and units of a stage, at most
COUNTERS = 4096


def workspace_bytes(rows: int, k: int) -> int:
    """Room for maps of up to `rows` rows of x and `k` columns: sums, and x packed for whole blocks and stages; of whole
    blocks of the widest also the next map's, for which `ordered_input` has a quarter."""
    packed, whole = (4 * packed_words(n, k, _WIDEST // 8, _MOST_UNITS) for n in (rows + _WIDEST, rows))
    return max(WORKSPACE_BYTES, _SUMS_BYTES + max(packed, -(-whole * 4 // 3)))


def workspace(device: torch.device, n_bytes: int = WORKSPACE_BYTES) -> tuple[Tensor, Tensor]:
    """Scratch of the GEMM, shared by all launches of a stream: sums and packed x (f32), and counters (int32, zero)."""
    return (
        torch.empty(n_bytes // 4, dtype=torch.float32, device=device),
        torch.zeros(COUNTERS, dtype=torch.int32, device=device),
    )


def ordered_input(
    arch: str, rows: int, weight_rows: int, k: int, dtype: torch.dtype, scratch: tuple[Tensor, Tensor] | None,
    *, far: bool = False, fp8: bool | str = False,
) -> OrderedRows | None:  # fmt: skip
    """Where the kernel that makes x may write it for that of a map with packed W; None where that one reads rows.

    `dtype` is that of x; `fp8` says whether W is in e4m3, "blocks" with scales of blocks. `far`: the other of two
    places, behind the sums and at the scratch's end. A map that reads its x at one may leave the next map's at the
    other. None also where the two would meet.
    """
    if scratch is None or dtype not in DTYPES:
        return None
    name = fp8_key(DTYPES[dtype], fp8 == "blocks") if fp8 else DTYPES[dtype]
    key = tuned.GemmKey(name, tuned.rows_regime(rows), weight_rows, k, packed=True)
    tiling = tiling_for(arch, rows, key)
    if tiling.kernel != "group" or not is_whole(k, tiling.units):
        return None
    words = packed_words(rows, k, tiling.x_tiles, tiling.units)
    room, begin = scratch[0].numel(), _SUMS_BYTES // 4
    # What is far has the width of a residual stream, a quarter of others; both begin at 16 bytes, as bulk copies do.
    border = (room - (room - begin) // 4) // 4 * 4
    at, end = (border, room) if far else (begin, border)
    return OrderedRows(scratch[0][at : at + words], tiling.x_tiles) if at + words <= end else None


def scratch_words(tiling: Tiling, rows: int, n_tiles: int, k: int) -> tuple[int, int]:
    """What a launch takes of the workspace, words of 4 bytes: sums, then packed x."""
    blocks = -(-rows // (8 * tiling.x_tiles)) * -(-n_tiles // tiling.w_tiles)
    sums = blocks * STREAMS * 128 * tiling.x_tiles * tiling.w_tiles if tiling.split > 1 else 0
    return sums, packed_words(rows, k, tiling.x_tiles, tiling.units) if tiling.kernel == "group" else 0


def check_scratch(scratch: tuple[Tensor, Tensor], words: int, blocks: int, tiling: Tiling) -> None:
    """There is room for what a launch takes.

    Raises:
        KernelLimit: there is not.
    """
    counters = blocks if tiling.split > 1 else 0
    if scratch[0].numel() < words or scratch[1].numel() < counters:
        raise KernelLimit(
            f"scratch holds {scratch[0].numel()} words and {scratch[1].numel()} counters",
            f"{words} and {counters} for {tiling}",
            "pass what `workspace` gives, or no scratch",
        )


def check_apart(leave: OrderedRows | None, *read: Tensor) -> None:
    """Nothing that a launch reads or keeps lies where it leaves the next map's x.

    Raises:
        KernelLimit: something does.
    """
    for other in read if leave is not None else ():
        assert leave is not None
        words, same = leave.words, leave.words.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        first, then = sorted((one.storage_offset(), one.numel()) for one in (words, other))
        if same and first[0] + first[1] > then[0]:
            raise KernelLimit(
                f"the next map's x at word {words.storage_offset()} of the scratch, {other.numel()} words at "
                f"{other.storage_offset()} are in use", "places apart", "leave it at the other place of `ordered_input`"
            )  # fmt: skip
