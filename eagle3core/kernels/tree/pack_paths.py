"""Accepted paths side by side: offsets[b] = sum of counts before b, and the first counts[b] entries of each row there.

Later work over accepted nodes (taps, draft entries) then has one dense row list. Entries past the total are -1.
Source: docs/requirements.md R-48, R-55.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.card import Card, Case, Cost, Launch, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.reductions import make_block_sum_i32

THREADS = 64


def pack_paths_reference(counts: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """`offsets: [B + 1]` and `packed: [B * P]` from `counts: [B]` in 0..P and `path: [B, P]`."""
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(counts.dtype)
    kept = path[torch.arange(path.shape[1], device=path.device) < counts[:, None]]
    return offsets, torch.nn.functional.pad(kept, (0, path.numel() - len(kept)), value=-1)


def make_pack_paths(isa: Any, *, overlap: bool) -> Any:
    """A block a sequence; each adds up the counts for itself, so that no block waits for another."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    warps = THREADS // 32
    block_sum = make_block_sum_i32(isa, warps)

    def kernel(counts: Any, path: Any, offsets: Any, packed: Any, batch: Any, width: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        row = i32(cuda.blockIdx.x)
        first = isa.shared_address(cuda.shared.array(warps, i32))
        second = isa.shared_address(cuda.shared.array(warps, i32))
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        before, total, other = i32(0), i32(0), tid
        # Every block adds up all counts for itself: they are few, and no block waits for another.
        while other < batch:
            n = isa.load_u32(counts + i64(other) * 4)
            total = i32(total + n)
            if other < row:
                before = i32(before + n)
            other = i32(other + THREADS)
        before, total = block_sum(before, first, tid), block_sum(total, second, tid)
        own = isa.load_u32(counts + i64(row) * 4)
        p = tid
        while p < width:
            if p < own:
                isa.store_u32(packed + i64(before + p) * 4, isa.load_u32(path + (i64(row) * width + p) * 4))
            # The entries past the last are cleared by the block in whose row they stand.
            if row * width + p >= total:
                isa.store_u32(packed + (i64(row) * width + p) * 4, -1)
            p = i32(p + THREADS)
        if tid == 0:
            isa.store_u32(offsets + i64(row) * 4, before)
            if row == batch - 1:
                isa.store_u32(offsets + i64(batch) * 4, total)

    return kernel


def pack_paths_variant(arch: str) -> Variant:
    """The one kernel."""
    return Variant(
        name="pack_paths",
        make=make_pack_paths,
        constants={"overlap": overlaps(arch)},
        parameters=parameters("counts:in path:in offsets:out packed:out batch:i32 width:i32"),
        threads=THREADS,
        max_registers=48,
        instructions={"SHFL": 10},
        dependent=overlaps(arch),
    )


def pack_paths(arch: str, counts: Tensor, path: Tensor, offsets: Tensor, packed: Tensor) -> list[Launch]:
    """`offsets: [B + 1]` and `packed: [B * P]` from `counts: [B]` in 0..P and `path: [B, P]`; int32."""
    batch, width = path.shape
    tensors: dict[str, Any] = {"counts": counts, "path": path, "offsets": offsets, "packed": packed}
    return [pack_paths_variant(arch).launch((batch,), **tensors, batch=batch, width=width)]


def pack_paths_cost(batch: int, width: int) -> Cost:
    """Counts and paths in, offsets and packed entries out; an addition a sequence."""
    return Cost(batch * 4 + batch * width * 8 + (batch + 1) * 4, batch)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    batch, width = case["batch"], case["width"]

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device, dtype=torch.int32)

    return {"counts": integers(width + 1, batch), "path": integers(60, batch, width)}


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    sizes, device = {"offsets": case["batch"] + 1, "packed": case["batch"] * case["width"]}, inputs["path"].device
    return {name: poison(size, dtype=torch.int32, device=device) for name, size in sizes.items()}


CARD = Card(
    name="pack_paths",
    equation="offsets = cumsum of counts; packed[offsets[b] + p] = path[b, p] for p < counts[b]",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: dict(zip(("offsets", "packed"), pack_paths_reference(**inputs), strict=True)),
    launches=lambda arch, case, inputs, outputs: pack_paths(arch, **inputs, **outputs),
    cost=lambda case: pack_paths_cost(case["batch"], case["width"]),
    variants=lambda arch: [pack_paths_variant(arch)],
    cases=({"batch": 5, "width": 4}, {"batch": 1, "width": 1}),
    slow_cases=({"batch": 70, "width": 3}, {"batch": 3, "width": 67}),
    shapes=tuple({"batch": b, "width": w} for b in (1, 4, 64) for w in (4, 9)),
    hand_counts=(({"batch": 3, "width": 2}, Cost(12 + 48 + 16, 3)),),
)
