"""Linear maps of a decode step: y = epilogue(x W^T) for any number of rows, with bits that do not depend on it.

W is read once and x is small, so up to a few dozen rows the time is that of the weight's bytes. Two kernels share one
order of summation (see `gemm_ring`): `gemm_ring` for up to 16 rows, `gemm_tile` above. A call becomes one launch.

Source: docs/requirements.md R-104, R-105; designs derived here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import (
    DTYPES,
    SHARED_BYTES,
    SHARED_BYTES_SM,
    Case,
    Cost,
    Launch,
    Variant,
    overlaps,
)
from eagle3core.kernels.gemm_epilogue import Epilogue, gemm_parameters
from eagle3core.kernels.gemm_reference import EPS, n_columns, n_weight_rows
from eagle3core.kernels.gemm_ring import STREAMS, UNIT, make_gemm_ring, ring_shared_bytes
from eagle3core.kernels.gemm_tile import make_gemm_tile, tile_shared_bytes, totals_in_shared

WORKSPACE_BYTES = 64 << 20  # enough for every tiling below; see `workspace`
COUNTERS = 4096
_MULTIPROCESSORS = 132  # of the GPU the tilings were chosen on


@dataclass(frozen=True)
class Tiling:
    """Order-neutral parameters of one GEMM launch; every value gives the same bits.

    Attributes:
        kernel: `ring` (warps divide K) or `tile` (warps divide the block).
        x_tiles, w_tiles: rows of a block: 8 x_tiles of x, 16 w_tiles of W.
        units, stages: units of 32 k of a stage, and stages of the ring.
        warps_x, warps_w, split: of `tile`; see `make_gemm_tile`.
    """

    kernel: Literal["ring", "tile"]
    x_tiles: int
    w_tiles: int
    units: int
    stages: int
    warps_x: int = 1
    warps_w: int = 1
    split: int = 1

    @property
    def threads(self) -> int:
        return 32 * (STREAMS if self.kernel == "ring" else self.warps_x * self.warps_w)

    @property
    def shared_bytes(self) -> int:
        sizes = self.x_tiles, self.w_tiles, self.units, self.stages
        if self.kernel == "ring":
            return ring_shared_bytes(*sizes)
        return tile_shared_bytes(*sizes, self.warps_x * self.warps_w, self.split)

    @property
    def name(self) -> str:
        more = f"_{self.warps_x}x{self.warps_w}_s{self.split}" if self.kernel == "tile" else ""
        return f"{self.kernel}_{self.x_tiles}x{self.w_tiles}_u{self.units}_p{self.stages}{more}"


def choose_tiling(arch: str, rows: int, n_tiles: int, k: int) -> Tiling:
    """The tiling for `rows` rows of x and `n_tiles` tiles of 16 weight rows; a pure function of its arguments.

    Ring depths aim at 64 KB and more of weights under way in every multiprocessor of sm_90; where shared memory is
    smaller they shrink. Source: docs/log.md.
    """
    units = 2 if -(-k // UNIT) % (2 * STREAMS) == 0 else 1
    few = n_tiles <= 2 * _MULTIPROCESSORS
    if rows <= 8:
        stages = (6 if few else 4) * (3 - units)
        return fitted(arch, Tiling("ring", 1, 1, units, stages))
    if rows <= 16:
        wide = 1 if few else 2
        return fitted(arch, Tiling("ring", 2, wide, units, (5 if wide == 1 else 4) * (3 - units)))
    if rows <= 64:
        x_tiles, w_tiles, stages = 4 if rows <= 32 else 8, 8, 8
        warps_x, warps_w = (1, 4) if rows <= 32 else (2, 2)
    elif SHARED_BYTES[arch] >= 227 * 1024:
        x_tiles, w_tiles, stages, warps_x, warps_w = 16, 16, 4, 2, 4
    else:
        x_tiles, w_tiles, stages, warps_x, warps_w = 16, 8, 8, 4, 2
    blocks = -(-n_tiles // w_tiles) * -(-rows // (8 * x_tiles))
    split = STREAMS if blocks < 0.75 * _MULTIPROCESSORS and k >= 32 * UNIT * STREAMS else 1
    return fitted(arch, Tiling("tile", x_tiles, w_tiles, 1, stages, warps_x, warps_w, split))


def fitted(arch: str, tiling: Tiling) -> Tiling:
    """`tiling` with as many stages less as shared memory asks for."""
    limit = SHARED_BYTES[arch]
    while tiling.shared_bytes > limit and tiling.stages > 2:
        tiling = replace(tiling, stages=tiling.stages - 1)
    if tiling.shared_bytes > limit:
        raise KernelLimit(f"{tiling} needs {tiling.shared_bytes} bytes", f"{limit} on {arch}", "use smaller blocks")
    return tiling


def gemm_variant(arch: str, dtype: str, epilogue: Epilogue, tiling: Tiling, packed: bool, ragged: bool) -> Variant:
    """The compiled form of one GEMM configuration."""
    constants: dict[str, Any] = {
        "dtype": dtype, "epilogue": epilogue, "x_tiles": tiling.x_tiles, "w_tiles": tiling.w_tiles,
        "units": tiling.units, "stages": tiling.stages, "packed": packed, "ragged": ragged, "overlap": overlaps(arch),
    }  # fmt: skip
    products = 2 * tiling.x_tiles * tiling.w_tiles * tiling.units
    registers, most = 128, 128
    if tiling.kernel == "tile":
        warps = tiling.warps_x * tiling.warps_w
        constants |= {"warps_x": tiling.warps_x, "warps_w": tiling.warps_w, "split": tiling.split}
        products //= warps
        sums = 4 * tiling.x_tiles * tiling.w_tiles // warps  # a thread's; twice where it also holds totals
        totals = tiling.split == 1 and not totals_in_shared(tiling.x_tiles, tiling.w_tiles, warps, tiling.split)
        registers, most = sums * (2 if totals else 1) + 72, 255
    resident = min(4, SHARED_BYTES_SM[arch] // (tiling.shared_bytes + 1024), 65536 // (tiling.threads * registers))
    layout = ("packed" if packed else "rows") + ("_ragged" if ragged else "")
    return Variant(
        name=f"gemm_{dtype}_{epilogue.name}_{tiling.name}_{layout}",
        make=make_gemm_ring if tiling.kernel == "ring" else make_gemm_tile,
        constants=constants,
        parameters=gemm_parameters(),
        threads=tiling.threads,
        shared_bytes=tiling.shared_bytes,
        blocks_per_sm=max(1, resident),
        max_registers=most,
        instructions={"HMMA": products, "LDGSTS": 3},
        dependent=overlaps(arch),
    )


def pack_weight(w: Tensor, epilogue: Epilogue) -> Tensor:
    """W `[n_w, k]` in the order a block reads it: tiles of 16 rows, each a run of 1 KB pieces of 32 k in lane order.

    A piece is [lower or upper of the pairs][8 rows][32 k]. K is padded with zeros to a multiple of 32. Done once, at
    load; saves a block 16 distant rows to walk (3% of a decode step on an H200).
    """
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


def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Scratch of the split GEMM, shared by all launches of a stream: sums (f32) and counters (int32, zero)."""
    return (
        torch.empty(WORKSPACE_BYTES // 4, dtype=torch.float32, device=device),
        torch.zeros(COUNTERS, dtype=torch.int32, device=device),
    )


def gemm(
    arch: str,
    epilogue: Epilogue,
    *,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    k: int,
    packed: bool,
    weight_rows: int,
    scratch: tuple[Tensor, Tensor] | None = None,
    tiling: Tiling | None = None,
    q_heads: int = 0,
    kv_heads: int = 0,
    norm_width: int = 0,
    eps: float = EPS,
    operands: Mapping[str, Tensor],
) -> Launch:
    """One linear map as a launch.

    Args:
        x: `[M, k]`. y: `[M, n]`. w: `[weight_rows, k]`, or packed by `pack_weight`.
        scratch: of `workspace`; without it K is never split between blocks.
        norm_width: columns that the partial sums of squares in `sums` stand for; k by default.
        operands: sums, bias, gain, residual, positions, slots, table, second, third as `gemm_parameters` describes.

    Raises:
        KernelLimit: a dtype other than bf16 and fp16, k or the rows of W no multiple of 16, or misaligned operands.
    """
    _check(x, w, y, k, weight_rows)
    rows, n_tiles = x.shape[0], weight_rows // 16
    tiling = tiling or choose_tiling(arch, rows, n_tiles, k)
    if tiling.split > 1 and scratch is None:
        tiling = replace(tiling, split=1)
    blocks_x, blocks_w = -(-rows // (8 * tiling.x_tiles)), -(-n_tiles // tiling.w_tiles)
    if tiling.split > 1 and scratch is not None:
        _check_scratch(scratch, blocks_x * blocks_w, tiling)
    variant = gemm_variant(arch, DTYPES[x.dtype], epilogue, tiling, packed, k % UNIT != 0)
    grid = (blocks_w, blocks_x, 1) if tiling.kernel == "ring" else (blocks_x, blocks_w, tiling.split)
    names = ("sums", "bias", "gain", "residual", "positions", "slots", "table", "second", "third")
    return variant.launch(
        grid,
        x=x, w=w, y=y, **{name: operands.get(name) for name in names},
        workspace=scratch[0] if scratch else None, counters=scratch[1] if scratch else None,
        rows=rows, n=y.shape[-1] if epilogue.kind != "qkv" else q_heads * epilogue.head_dim, k=k, tiles=n_tiles,
        q_heads=q_heads, kv_heads=kv_heads, inv_width=1.0 / (norm_width or k), eps=eps,
    )  # fmt: skip


def _check(x: Tensor, w: Tensor, y: Tensor, k: int, weight_rows: int) -> None:
    if x.dtype not in DTYPES or w.dtype != x.dtype:
        raise KernelLimit(
            f"x is {x.dtype}, W is {w.dtype}", "both bf16 or both fp16", "convert, or use the reference backend"
        )
    if k % 16 or weight_rows % 16:
        raise KernelLimit(
            f"W is [{weight_rows}, {k}]", "multiples of 16", "pad the weight with zeros, or use the reference backend"
        )
    for name, tensor in (("x", x), ("w", w), ("y", y)):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise KernelLimit(
                f"{name} is not contiguous and aligned to 16 bytes", "contiguous tensors", "copy it first"
            )


def _check_scratch(scratch: tuple[Tensor, Tensor], blocks: int, tiling: Tiling) -> None:
    sums, counters = blocks * STREAMS * 128 * tiling.x_tiles * tiling.w_tiles, blocks
    if scratch[0].numel() < sums or scratch[1].numel() < counters:
        raise KernelLimit(
            f"scratch holds {scratch[0].numel()} sums and {scratch[1].numel()} counters",
            f"{sums} and {counters} for {tiling}",
            "pass what `workspace` gives, or no scratch",
        )


def gemm_cost(case: Case) -> Cost:
    """Weights, x, y once; and what the epilogue reads and writes beside y."""
    m, k, n, n_w = case["m"], case["k"], n_columns(case), n_weight_rows(case)
    moved = 2 * (n_w * k + m * k + m * n)
    if case.get("bias"):
        moved += 2 * n_w
    if case.get("norm"):
        moved += 4 * m * (k // 16)
    if case["kind"] == "residual":
        moved += 2 * m * n + 2 * n + 4 * m * (n // 16) + (2 * m * n if case.get("residual", True) else 0)
    if case["kind"] == "head":
        moved += 8 * m * (n // 16)
    if case["kind"] == "qkv":
        moved += 2 * m * 2 * case["kv_heads"] * case["head_dim"] + m * (4 * case["head_dim"] + 8)
    return Cost(bytes=moved, flops=2 * m * n_w * k)
