"""Root-mean-square normalisation: y = w * cast(x / sqrt(mean(x^2) + eps)), also of x + residual.

The engine's GEMMs apply their norm themselves (`gemm.epilogue`); this card serves where no GEMM follows, or where the
sum itself is wanted. One block owns a row, so a row's bits cannot depend on other rows.
Source: Zhang and Sennrich, arXiv 1910.07467; the Llama order of operations (cast before the gain).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, make_store, make_unpack, row_of, row_threads
from eagle3core.kernels.isa.reductions import make_block_sum

EPS = 1e-5  # of the examples below; models bring their own


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over a row are made: fp64 stays fp64, everything else uses fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised rows of `x: [..., E]` times `weight: [E]`, in the dtype of `x`."""
    wide = x.to(accumulation_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def make_rms_norm(isa: Any, *, dtype: str, width: int, threads: int, pieces: int, adds: bool, overlap: bool) -> Any:
    """A block a row; each thread keeps its `pieces` of 8 elements in registers between the sum and the scaling."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    unpack, store, low, high, pack = (
        make_unpack(isa, dtype), make_store(isa, dtype), isa.LOW[dtype], isa.HIGH[dtype], isa.PACK[dtype],
    )  # fmt: skip
    warps, kept, words = threads // 32, pieces * 8, pieces * 4
    vectors = width // 8
    block_sum, inverse_width, zero = make_block_sum(isa, warps), np.float32(1 / width), np.float32(0)

    def kernel(x: Any, residual: Any, gain: Any, h: Any, y: Any, eps: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        start = i64(cuda.blockIdx.x) * (width * 2)
        scratch = isa.shared_address(cuda.shared.array(warps, f32))
        values = cuda.local.array(kept, f32)
        gains = cuda.local.array(words, i32)
        if overlap:
            isa.let_next_start()
        # The gain is constant: it is read while the kernel before still runs.
        for p in range(pieces):
            if tid + p * threads < vectors:
                loaded = isa.load_u32x4_const(gain + (tid + p * threads) * 16)
                for i in range(4):
                    gains[p * 4 + i] = loaded[i]
            else:
                for i in range(4):
                    gains[p * 4 + i] = i32(0)
        if overlap:
            isa.wait_previous()
        squares = zero
        for p in range(pieces):
            if tid + p * threads < vectors:
                at = start + (tid + p * threads) * 16
                unpack(isa.load_u32x4(x + at), values, p * 8)
                if adds:
                    other = isa.load_u32x4(residual + at)
                    for i in range(4):
                        first = values[p * 8 + 2 * i] + low(other[i])
                        # The norm is of h as stored, rounded to sixteen bits.
                        bits = pack(values[p * 8 + 2 * i + 1] + high(other[i]), first)
                        values[p * 8 + 2 * i] = low(bits)
                        values[p * 8 + 2 * i + 1] = high(bits)
                    store(h + at, values, p * 8)
            else:
                for i in range(8):
                    values[p * 8 + i] = zero
            for i in range(8):
                squares = squares + values[p * 8 + i] * values[p * 8 + i]
        # A thread's elements upwards, a butterfly, warps in order; the row stays in registers meanwhile.
        scale = isa.rsqrt(block_sum(squares, scratch, tid) * inverse_width + eps)
        for p in range(pieces):
            if tid + p * threads < vectors:
                for i in range(4):
                    values[p * 8 + 2 * i] = values[p * 8 + 2 * i] * scale * low(gains[p * 4 + i])
                    values[p * 8 + 2 * i + 1] = values[p * 8 + 2 * i + 1] * scale * high(gains[p * 4 + i])
                store(y + start + (tid + p * threads) * 16, values, p * 8)

    return kernel


def rms_norm_variant(arch: str, dtype: str, width: int, adds: bool) -> Variant:
    """The norm of rows of `width`, after adding a residual or not."""
    threads, pieces = row_threads(width)
    return Variant(
        name=f"rms_norm_{dtype}_{width}{'_add' if adds else ''}",
        make=make_rms_norm,
        constants={
            "dtype": dtype, "width": width, "threads": threads, "pieces": pieces, "adds": adds,
            "overlap": overlaps(arch),
        },
        parameters=parameters("x:in residual:in gain:const h:out y:out eps:f32"),
        threads=threads,
        max_registers=64 if pieces <= 2 else 112,  # a piece in flight is 8 values and 4 words of gains
        instructions={"SHFL": 5, "MUFU": 1, "BAR": 1},
        dependent=overlaps(arch),
    )  # fmt: skip


def rms_norm(
    arch: str,
    x: Tensor,
    gain: Tensor,
    y: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    h: Tensor | None = None,
) -> list[Launch]:
    """y = norm(x) * gain over `x, y: [rows, E]` bf16 or fp16; with `residual`, h = x + residual and y = norm(h) * gain.

    Raises:
        KernelLimit: E is not a multiple of 8 up to 16384.
    """
    variant = rms_norm_variant(arch, DTYPES[x.dtype], x.shape[1], residual is not None)
    return [variant.launch((len(x),), x=x, residual=residual, gain=gain, h=h, y=y, eps=eps)]


def rms_norm_meaning(
    x: Tensor,
    gain: Tensor,
    y: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    h: Tensor | None = None,
) -> None:
    """What `rms_norm` computes, in plain torch, for any width and dtype; y may be x itself."""
    if residual is not None:
        x = x + residual
    if h is not None:
        h.copy_(x)
    y.copy_(rms_norm_reference(x, gain, eps))


RMS_NORM = Op("rms_norm", rms_norm, rms_norm_meaning)


def rms_norm_cost(rows: int, width: int, adds: bool) -> Cost:
    """Rows in and out once, the gain once; 4 operations an element, 5 with the addition."""
    return Cost(rows * width * 2 * (4 if adds else 2) + width * 2, rows * width * (5 if adds else 4))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case["dtype"])

    made = {"x": 3 * normal(case["rows"], case["width"]), "gain": 1 + normal(case["width"]) / 8}
    return {**made, "residual": normal(case["rows"], case["width"])} if case["adds"] else made


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    x = inputs["x"]
    names = ("h", "y") if case["adds"] else ("y",)
    return {name: poison(*x.shape, dtype=x.dtype, device=x.device) for name in names}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    if not case["adds"]:
        return {"y": rms_norm_reference(inputs["x"], inputs["gain"], EPS)}
    h = inputs["x"] + inputs["residual"]
    return {"h": h, "y": rms_norm_reference(h, inputs["gain"], EPS)}


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    return rms_norm(
        arch, inputs["x"], inputs["gain"], outputs["y"], EPS, residual=inputs.get("residual"), h=outputs.get("h")
    )


def _variants(arch: str) -> Sequence[Variant]:
    return [rms_norm_variant(arch, "bf16", 4096, True)]


def _slow_variants(arch: str) -> Sequence[Variant]:
    return [
        rms_norm_variant(arch, "f16", 4096, True),
        *(rms_norm_variant(arch, "bf16", width, False) for width in (2880, 4096, 8192, 16384)),
    ]


_BF16, _F16 = torch.bfloat16, torch.float16

CARD = Card(
    name="rms_norm",
    equation="h = x + residual; y = gain * h / sqrt(mean(h^2) + eps)",
    source="arXiv 1910.07467",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: rms_norm_cost(case["rows"], case["width"], case["adds"]),
    variants=_variants,
    slow_variants=_slow_variants,
    cases=(
        {"rows": 3, "width": 328, "dtype": _BF16, "adds": True},
        {"rows": 2, "width": 40, "dtype": _F16, "adds": False},
    ),
    slow_cases=(
        {"rows": 2, "width": 4104, "dtype": _BF16, "adds": True},
        {"rows": 5, "width": 2880, "dtype": _F16, "adds": True},
    ),
    shapes=tuple(
        {"rows": rows, "width": width, "dtype": _BF16, "adds": adds}
        for width in (4096, 2880) for rows in (1, 4, 64) for adds in (False, True)
    ),
    hand_counts=(
        ({"rows": 3, "width": 16, "dtype": _BF16, "adds": False}, Cost(96 + 96 + 32, 192)),
        ({"rows": 3, "width": 16, "dtype": _BF16, "adds": True}, Cost(4 * 96 + 32, 240)),
    ),
    order={"threads": "at most 512, 16-byte pieces dealt round them", "sum": "butterfly, then warps in order"},
    alone=alone("rows", "x", "residual"),
    row_of=row_of,
    n_rows=count("rows"),
)  # fmt: skip
