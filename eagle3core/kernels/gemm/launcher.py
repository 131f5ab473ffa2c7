"""Linear maps of a decode step: y = epilogue(x W^T) for any number of rows, with bits that do not depend on it.

W is read once and x is small, so up to a few dozen rows the time is that of the weight's bytes. The kernels share one
order of summation (see `gemm_ring`): `gemm_ring` for up to 16 rows, above `gemm_group` where the hardware has its
instructions, else `gemm_tile`. A call becomes one launch, or two where `pack` rearranges x for `gemm_group`.

Source: docs/requirements.md R-104, R-105; designs derived here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import (
    DTYPES,
    E4M3,
    PLAIN_TORCH,
    SHARED_BYTES_SM,
    Case,
    Cost,
    Launch,
    Variant,
    overlaps,
)
from eagle3core.kernels.gemm.candidates import check_tiling
from eagle3core.kernels.gemm.epilogue import Epilogue, gemm_parameters
from eagle3core.kernels.gemm.fp8.blocks import blocks_of
from eagle3core.kernels.gemm.fp8.tiling import Fp8Tiling, as_fp8, choose_fp8_tiling
from eagle3core.kernels.gemm.group import group_totals_in_shared, make_gemm_group
from eagle3core.kernels.gemm.held import launched_registers, make_gemm_held
from eagle3core.kernels.gemm.order.pack import OrderedRows, pack_rows
from eagle3core.kernels.gemm.products import UNIT
from eagle3core.kernels.gemm.reference import EPS, n_columns, n_weight_rows
from eagle3core.kernels.gemm.ring.kernel import make_gemm_ring
from eagle3core.kernels.gemm.ring.stay import make_gemm_stay
from eagle3core.kernels.gemm.scratch import check_apart, check_scratch, scratch_words
from eagle3core.kernels.gemm.tile import make_gemm_tile, totals_in_shared
from eagle3core.kernels.gemm.tiling import Tiling, choose_tiling

_KERNELS: dict[str, Callable[..., Any]] = {
    "ring": make_gemm_ring, "bulk": make_gemm_ring, "tile": make_gemm_tile, "group": make_gemm_group
}  # fmt: skip


def gemm_variant(arch: str, dtype: str, epilogue: Epilogue, tiling: Tiling, packed: bool, ragged: bool) -> Variant:
    """The compiled form of one GEMM configuration; `bulk` and `group` take packed weights."""
    constants: dict[str, Any] = {
        "dtype": dtype, "epilogue": epilogue, "x_tiles": tiling.x_tiles, "w_tiles": tiling.w_tiles,
        "units": tiling.units, "stages": tiling.stages, "packed": packed, "ragged": ragged, "overlap": overlaps(arch),
    }  # fmt: skip
    products = 2 * tiling.x_tiles * tiling.w_tiles * tiling.units  # of a stage
    registers, most, expected = 128, 128, {"HMMA": products, "LDGSTS": 3}
    fp8 = isinstance(tiling, Fp8Tiling)
    blocks = isinstance(tiling, Fp8Tiling) and tiling.blocks
    constants |= {"fp8": True} if fp8 else {}
    constants |= {"blocks": True} if blocks else {}
    if tiling.kernel in ("ring", "bulk"):
        constants["bulk"] = tiling.kernel == "bulk"
        constants |= {"sharers": tiling.warps_w} if tiling.warps_w > 1 else {}
        # For more than 16 rows, and for sums of blocks of 16, the rings leave room for one block or two.
        most = 168 if tiling.x_tiles > 2 or (blocks and tiling.x_tiles > 1) else 128
        expected["HMMA"] = products // tiling.warps_w
        registers = registers if tiling.warps_w == 1 else 64
    constants |= {"paced": tiling.paced} if tiling.paced else {}
    if tiling.stays:
        for name in ("packed", "ragged", "bulk"):
            del constants[name]
    if tiling.kernel == "bulk":
        expected = {"HMMA": products, "UBLKCP": 1}
        # What four blocks leave a thread, and three.
        most = 128 if tiling.x_tiles == 1 and tiling.w_tiles < 3 else 168
    if tiling.kernel == "tile":
        warps = tiling.warps_x * tiling.warps_w
        constants |= {"warps_x": tiling.warps_x, "warps_w": tiling.warps_w, "split": tiling.split}
        expected["HMMA"] = products // warps
        sums = 4 * tiling.x_tiles * tiling.w_tiles // warps  # a thread's; twice where it also holds totals
        totals = tiling.split == 1 and not totals_in_shared(tiling.x_tiles, tiling.w_tiles, warps, tiling.split)
        registers, most = sums * (2 if totals else 1) + 72, 255
    if tiling.held:
        del constants["packed"], constants["ragged"]
        constants |= {"cluster": tiling.cluster} if tiling.cluster > 1 else {}
        # One block a processor, however small its ring: with two, a block has fewer than its warps ask for.
        registers = most = launched_registers(tiling.w_tiles)
        expected = {"HGMMA": 2 * tiling.units, "UBLKCP": 1, "USETMAXREG": 2}
    elif tiling.kernel == "group":
        del constants["packed"], constants["ragged"]
        constants |= {"split": tiling.split, "together": tiling.together}
        in_shared = group_totals_in_shared(tiling.x_tiles, tiling.w_tiles, tiling.split, blocks)
        constants |= {"cluster": tiling.cluster} if tiling.cluster > 1 else {}
        twice = blocks or (tiling.split == 1 and not in_shared)  # sums of streams, or of blocks and of their stream
        registers = 4 * tiling.x_tiles * (2 if twice else 1) + 8 * tiling.units + 36
        most, expected = 255, {"HGMMA": 2 * tiling.units, "UBLKCP": 1}
    resident = min(4, SHARED_BYTES_SM[arch] // (tiling.shared_bytes + 1024), 65536 // (tiling.threads * registers))
    layout = ("packed" if packed else "rows") + ("_ragged" if "ragged" in constants and ragged else "")
    return Variant(
        name=f"gemm_{dtype}_{epilogue.name}_{tiling.name}_{layout}",
        make=make_gemm_held if tiling.held else make_gemm_stay if tiling.stays else _KERNELS[tiling.kernel],
        constants=constants,
        parameters=gemm_parameters(),
        threads=tiling.threads,
        shared_bytes=tiling.shared_bytes,
        blocks_per_sm=max(1, resident),
        max_registers=most,
        instructions=expected,
        dependent=overlaps(arch),
        rounds_itself=True,
        cluster=(tiling.cluster, 1, 1) if tiling.held else (1, tiling.cluster, 1),
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
    eps: float = EPS,
    ordered: OrderedRows | None = None,
    leave: OrderedRows | None = None,
    operands: Mapping[str, Tensor],
) -> list[Launch]:
    """One linear map as one launch or two.

    Args:
        x: `[M, k]`. y: `[M, n]`. w: `[weight_rows, k]`, or packed by `pack_weight`; e4m3 only packed, with
            `scales` f32 among the operands, `[weight_rows]` or of blocks by `pack_scales`.
        scratch: of `workspace`; without it K is never split between blocks, and x not packed for warpgroups.
        ordered: of `ordered_input`, where the kernel before has written x beside `x`; None: x is packed here if needed.
        leave: of `ordered_input` for the next map: what it reads of this one's outputs is written there as well.
        operands: sums, bias, gain, residual, positions, slots, table, second, third as `gemm_parameters` describes;
            factors: `[2]` f32 for a cache in e4m3.

    Raises:
        KernelLimit: a dtype other than bf16 and fp16, k or the rows of W no multiple of 16, or misaligned operands.
    """
    _check(x, w, y, k, weight_rows)
    rows, n_tiles, dtype, fp8 = x.shape[0], weight_rows // 16, DTYPES[x.dtype], w.dtype == E4M3
    if leave is not None:
        epilogue = replace(epilogue, ordered_tiles=leave.x_tiles)
    if epilogue.kind == "qkv" and "factors" in operands:
        epilogue = replace(epilogue, e4m3_cache=True)
    epilogue.check()
    if fp8:
        blocks = _has_block_scales(operands.get("scales"), packed, weight_rows, k)
        tiling = as_fp8(tiling, blocks) if tiling else choose_fp8_tiling(arch, rows, n_tiles, k, dtype, blocks)
    tiling = tiling or choose_tiling(arch, rows, n_tiles, k, packed and scratch is not None, dtype)
    if tiling.split > 1 and scratch is None:
        tiling = replace(tiling, split=1, together=False)
    check_tiling(tiling, arch, n_tiles, k, packed)
    blocks_x, blocks_w = -(-rows // (8 * tiling.x_tiles)), -(-n_tiles // tiling.w_tiles)
    tiling = replace(tiling, cluster=gcd(tiling.cluster, blocks_x))
    if tiling.together and blocks_x * blocks_w * tiling.split > _multiprocessors(x.device):
        tiling = replace(tiling, together=False)  # some might wait for a block that has no place
    launches = []
    if scratch is not None:
        taken, x_words = scratch_words(tiling, rows, n_tiles, k)
        check_scratch(scratch, taken + x_words, blocks_x * blocks_w, tiling)
        own = scratch[0][: taken + (x_words if ordered is None else 0)]
        check_apart(leave, own, *([] if ordered is None else [ordered.words]))
        if tiling.kernel == "group":
            x_packed = scratch[0][taken : taken + x_words]
            if ordered is None:
                launches.append(pack_rows(arch, x, x_packed, tiling.x_tiles, tiling.units))
            x = x_packed if ordered is None else ordered.words
    elif tiling.kernel == "group":
        raise KernelLimit(f"{tiling} without scratch", "room for x in its order", "pass what `workspace` gives")
    variant = gemm_variant(arch, dtype, epilogue, tiling, packed, k % UNIT != 0)
    n_blocks = blocks_x * blocks_w
    grid = (
        (min(n_blocks, tiling.resident or n_blocks), 1, 1)
        if tiling.held
        else {
            "ring": (blocks_w, blocks_x, 1),
            "bulk": (min(blocks_w, tiling.resident or blocks_w), blocks_x, 1),
            "tile": (blocks_x, blocks_w, tiling.split),
            "group": (tiling.split, blocks_x, blocks_w),
        }[tiling.kernel]
    )
    if epilogue.e4m3_cache:
        operands = {**operands, "gain": operands["factors"]}
    names = ("sums", "bias", "gain", "residual", "positions", "slots", "table", "second", "third")
    launches.append(variant.launch(
        grid,
        x=x, w=w, y=y, **{name: operands.get(name) for name in names},
        workspace=scratch[0] if scratch else None, counters=scratch[1] if scratch else None,
        ordered=None if leave is None else leave.words, scales=operands["scales"] if fp8 else None,
        rows=rows, n=y.shape[-1] if epilogue.kind != "qkv" else q_heads * epilogue.head_dim, k=k, tiles=n_tiles,
        q_heads=q_heads, kv_heads=kv_heads, inv_width=1.0 / k, eps=eps,
    ))  # fmt: skip
    return launches


def _check(x: Tensor, w: Tensor, y: Tensor, k: int, weight_rows: int) -> None:
    if x.dtype not in DTYPES or w.dtype not in (x.dtype, E4M3):
        raise KernelLimit(
            f"x is {x.dtype}, W is {w.dtype}", "both bf16 or both fp16, or W e4m3", f"convert, or {PLAIN_TORCH}"
        )
    if k % 16 or weight_rows % 16:
        raise KernelLimit(
            f"W is [{weight_rows}, {k}]", "multiples of 16", f"pad the weight with zeros, or {PLAIN_TORCH}"
        )
    for name, tensor in (("x", x), ("w", w), ("y", y)):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise KernelLimit(
                f"{name} is not contiguous and aligned to 16 bytes", "contiguous tensors", "copy it first"
            )


def _has_block_scales(scales: Tensor | None, packed: bool, weight_rows: int, k: int) -> bool:
    """Whether scales are those of blocks, of W in e4m3 that has its scales."""
    found = "no scales" if scales is None else f"scales {list(scales.shape)} {scales.dtype}"
    of_blocks = (weight_rows // 16, blocks_of(k), 2)
    is_known = scales is not None and tuple(scales.shape) in ((weight_rows,), of_blocks)
    if scales is None or scales.dtype != torch.float32 or not is_known or not packed:
        raise KernelLimit(
            f"W in e4m3 {'packed' if packed else 'by rows'} with {found}",
            f"packed W, and {weight_rows} scales in fp32, or {list(of_blocks)} of blocks",
            f"pack it with its scales, or {PLAIN_TORCH}",
        )  # fmt: skip
    return scales.ndim > 1


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1 << 20


def gemm_cost(case: Case) -> Cost:
    """Weights, x, y once; and what the epilogue reads and writes beside y."""
    m, k, n, n_w = case["m"], case["k"], n_columns(case), n_weight_rows(case)
    n_scales = n_w // 8 * blocks_of(k) if case.get("fp8") == "blocks" else n_w
    w_bytes = n_w * k + 4 * n_scales if case.get("fp8") else 2 * n_w * k
    moved = w_bytes + 2 * (m * k + m * n)
    if case.get("bias"):
        moved += 2 * n_w
    if case.get("norm"):
        moved += 4 * m * (k // 16)
    if case["kind"] == "residual":
        moved += 2 * m * n + 2 * n + 4 * m * (n // 16) + (2 * m * n if case.get("residual", True) else 0)
    if case["kind"] == "head":
        moved += 8 * m * (n // 16)
    if case["kind"] == "qkv":
        itemsize = 1 if case.get("e4m3_cache") else 2
        moved += 2 * m * itemsize * case["kv_heads"] * case["head_dim"] + m * (4 * case["head_dim"] + 8)
    return Cost(bytes=moved, flops=2 * m * n_w * k)
