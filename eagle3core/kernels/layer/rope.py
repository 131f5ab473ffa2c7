"""Rotary position embedding on q and k, half-split layout: (x1, x2) -> (x1 c - x2 s, x2 c + x1 s), and the cache write.

The kernel reads q, k and v of a row side by side, as one merged projection leaves them, and cos and sin from a table,
so every kind of scaling is a matter of the table. Where a GEMM precedes, its epilogue does this work (`gemm.epilogue`);
this card serves where none does, with the same table and the same slots.
Source: Su et al., arXiv 2104.09864; paging after Kwon et al., arXiv 2309.06180.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import (
    DTYPES,
    PLAIN_TORCH,
    Card,
    Case,
    Cost,
    Launch,
    Tensors,
    Variant,
    overlaps,
    parameters,
    poison,
)
from eagle3core.kernels.isa.by_row import alone, count, make_store, make_unpack
from eagle3core.kernels.layer.rms_norm import accumulation_dtype

THREADS = 128


def rope_tables(frequencies: Tensor, scale: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[B, T, head_dim / 2]` in `dtype` for `positions: [B, T]` int64.

    Angles are formed in fp32 from fp32 frequencies (fp64 for an fp64 model, from the same fp32 frequencies), as every
    code base that trains these checkpoints does.
    """
    wide = accumulation_dtype(dtype)
    angles = positions[..., None].to(wide) * frequencies.to(wide)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated heads of `x: [B, T, heads, D]` by `cos, sin: [B, T, D / 2]`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope_pairs(frequencies: Tensor, scale: float, n_positions: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[n_positions, D / 2, 2]` cos and sin, the table that programs read; kernels read fp32."""
    if frequencies.is_meta:  # only its size is asked for; arithmetic on the meta device imports torch's compiler first
        return frequencies.new_empty(n_positions, len(frequencies), 2, dtype=dtype)
    positions = torch.arange(n_positions, device=frequencies.device)[None]
    return torch.stack(rope_tables(frequencies, scale, positions, dtype), dim=-1)[0]


def make_rope(isa: Any, *, dtype: str, head_dim: int, block: int, overlap: bool) -> Any:
    """Grid (pieces, rows); a thread rotates 8 elements of each half of a head, or copies them for v."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    unpack, store = make_unpack(isa, dtype), make_store(isa, dtype)
    half = head_dim // 2
    per_head_shift = (half // 8).bit_length() - 1
    per_head_mask, block_shift, block_mask = half // 8 - 1, block.bit_length() - 1, block - 1

    def kernel(
        qkv: Any, positions: Any, slots: Any, table: Any, q: Any, k_blocks: Any, v_blocks: Any, q_heads: Any,
        kv_heads: Any,
    ) -> None:  # fmt: skip
        row = i64(cuda.blockIdx.y)
        item = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        first, second, out = cuda.local.array(8, f32), cuda.local.array(8, f32), cuda.local.array(16, f32)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        head, piece = i32(item >> per_head_shift), i32((item & per_head_mask) * 8)
        heads = i32(q_heads + 2 * kv_heads)
        # Loaded whether the row has a slot or not, so that only the angles wait for another load.
        position, slot = isa.load_u32(positions + row * 4), isa.load_u32(slots + row * 4)
        lower, upper = (i32(0), i32(0), i32(0), i32(0)), (i32(0), i32(0), i32(0), i32(0))
        if head < heads:
            source = qkv + ((row * heads + head) * head_dim + piece) * 2
            lower, upper = isa.load_u32x4(source), isa.load_u32x4(source + half * 2)
        is_query = head < q_heads
        if head < heads and (is_query or slot >= 0):
            angle = table + (i64(position) * half + piece) * 8
            unpack(lower, first, 0)
            unpack(upper, second, 0)
            if head < q_heads + kv_heads:
                for i in range(4):
                    # [position][pair][cos, sin]: two pairs a load.
                    c0, s0, c1, s1 = isa.load_f32x4(angle + i * 16)
                    out[2 * i] = first[2 * i] * c0 - second[2 * i] * s0
                    out[2 * i + 1] = first[2 * i + 1] * c1 - second[2 * i + 1] * s1
                    out[8 + 2 * i] = second[2 * i] * c0 + first[2 * i] * s0
                    out[8 + 2 * i + 1] = second[2 * i + 1] * c1 + first[2 * i + 1] * s1
            else:
                for i in range(8):
                    out[i] = first[i]
                    out[8 + i] = second[i]
            target = q + ((row * q_heads + head) * head_dim + piece) * 2
            if not is_query:
                own, pages = i32(head - q_heads), k_blocks
                if own >= kv_heads:
                    own, pages = i32(own - kv_heads), v_blocks
                # [block, key head, token of the block, D]
                line = ((i64(slot >> block_shift) * kv_heads + own) << block_shift) + (slot & block_mask)
                target = pages + (line * head_dim + piece) * 2
            store(target, out, 0)
            store(target + half * 2, out, 8)

    return kernel


def rope_variant(arch: str, dtype: str, head_dim: int, block: int) -> Variant:
    """The rotation for one head size and cache block.

    Raises:
        KernelLimit: either is not a power of two of at least 16.
    """
    for name, size in (("head size", head_dim), ("block", block)):
        if size < 16 or size & (size - 1):
            raise KernelLimit(f"{name} is {size}", "a power of two, 16 or more", PLAIN_TORCH)
    return Variant(
        name=f"rope_{dtype}_{head_dim}_{block}",
        make=make_rope,
        constants={"dtype": dtype, "head_dim": head_dim, "block": block, "overlap": overlaps(arch)},
        parameters=parameters(
            "qkv:in positions:in slots:in table:const q:out k_blocks:inout v_blocks:inout q_heads:i32 kv_heads:i32"
        ),
        threads=THREADS,
        max_registers=72,
        dependent=overlaps(arch),
    )


def rope(
    arch: str,
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
) -> list[Launch]:
    """Rotated `q: [rows, H, D]`, and k and v written into one layer's cache.

    Args:
        qkv: `[rows, (H + 2 K) * D]` bf16 or fp16, heads of q, then of k, then of v.
        positions, slots: `[rows]` int32; a slot is block * block size + offset, negative to write no k and v.
        table: `[positions, D / 2, 2]` fp32 cos and sin.
        k_blocks, v_blocks: `[n_blocks, K, block, D]`.

    Raises:
        KernelLimit: the head size or the block is not a power of two of at least 16.
    """
    rows, q_heads, head_dim = q.shape
    kv_heads, block = k_blocks.shape[1:3]
    items = (q_heads + 2 * kv_heads) * (head_dim // 16)
    return [
        rope_variant(arch, DTYPES[q.dtype], head_dim, block).launch(
            (-(-items // THREADS), rows), qkv=qkv, positions=positions, slots=slots, table=table, q=q,
            k_blocks=k_blocks, v_blocks=v_blocks, q_heads=q_heads, kv_heads=kv_heads,
        )
    ]  # fmt: skip


def rope_cost(rows: int, q_heads: int, kv_heads: int, head_dim: int) -> Cost:
    """Every head in and out; the row's angles, position and slot; 6 operations a rotated pair."""
    heads = q_heads + 2 * kv_heads
    return Cost(
        rows * (heads * head_dim * 4 + head_dim * 4 + 8), rows * (q_heads + kv_heads) * head_dim // 2 * 6
    )  # fmt: skip


def _slot(case: Case, row: int) -> int:
    """Where row `row` of the examples goes: distinct, scattered; every fourth row is not written."""
    return -1 if row % 4 == 3 else (row * 11 + 5) % (case["blocks"] * case["block"])


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case["dtype"])

    rows, head_dim, kv_heads = case["rows"], case["head_dim"], case["kv_heads"]
    pages = (case["blocks"], kv_heads, case["block"], head_dim)
    frequencies = 500000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    rows_at = range(case.get("first", 0), case.get("first", 0) + rows)
    return {
        "qkv": normal(rows, (case["q_heads"] + 2 * kv_heads) * head_dim),
        "positions": torch.randint(97, (rows,), generator=generator, device=device, dtype=torch.int32),
        "slots": torch.tensor([_slot(case, row) for row in rows_at], dtype=torch.int32, device=device),
        "table": rope_pairs(frequencies, 1.2, 97),
        "k_blocks": normal(*pages),
        "v_blocks": normal(*pages),
    }


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    qkv = inputs["qkv"]
    q = poison(case["rows"], case["q_heads"], case["head_dim"], dtype=qkv.dtype, device=qkv.device)
    return {"q": q, "k_blocks": inputs["k_blocks"].clone(), "v_blocks": inputs["v_blocks"].clone()}


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    read = {name: inputs[name] for name in ("qkv", "positions", "slots", "table")}
    return rope(arch, **read, **outputs)


def _reference(case: Case, inputs: Tensors) -> Tensors:
    qkv = inputs["qkv"]
    heads = qkv.view(1, len(qkv), -1, case["head_dim"])
    angles = inputs["table"][inputs["positions"].long()][None].to(qkv.dtype)
    q_heads, kv_heads = case["q_heads"], case["kv_heads"]
    rotated = rope_reference(heads[:, :, : q_heads + kv_heads], angles[..., 0], angles[..., 1])[0]
    made = {"q": rotated[:, :q_heads]}
    kept = inputs["slots"] >= 0
    block, offset = inputs["slots"][kept].long() // case["block"], inputs["slots"][kept].long() % case["block"]
    for name, new in (("k_blocks", rotated[:, q_heads:]), ("v_blocks", heads[0, :, q_heads + kv_heads :])):
        made[name] = inputs[name].clone()
        made[name][block, :, offset] = new[kept]
    return made


def _row_of(case: Case, inputs: Tensors, outputs: Tensors, row: int) -> Tensors:
    slot = int(inputs["slots"][row])
    if slot < 0:
        return {"q": outputs["q"][row]}
    block, offset = divmod(slot, case["block"])
    pages = {name: outputs[name][block, :, offset] for name in ("k_blocks", "v_blocks")}
    return {"q": outputs["q"][row], **pages}


_BF16 = torch.bfloat16

CARD = Card(
    name="rope",
    equation="(x1, x2) -> (x1 c - x2 s, x2 c + x1 s) on q and k; k and v to their cache slots",
    source="arXiv 2104.09864",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: rope_cost(case["rows"], case["q_heads"], case["kv_heads"], case["head_dim"]),
    variants=lambda arch: [rope_variant(arch, "bf16", 128, 64)],
    slow_variants=lambda arch: [
        rope_variant(arch, dtype, head_dim, block)
        for dtype, head_dim, block in (("bf16", 64, 64), ("bf16", 128, 16), ("f16", 128, 64))
    ],
    cases=(
        {"rows": 5, "q_heads": 6, "kv_heads": 2, "head_dim": 32, "block": 16, "blocks": 3, "dtype": _BF16},
    ),
    slow_cases=(
        {"rows": 4, "q_heads": 3, "kv_heads": 1, "head_dim": 128, "block": 32, "blocks": 2, "dtype": torch.float16},
        {"rows": 3, "q_heads": 16, "kv_heads": 1, "head_dim": 64, "block": 16, "blocks": 4, "dtype": _BF16},
    ),
    shapes=tuple(
        {"rows": rows, "q_heads": q, "kv_heads": 8, "head_dim": d, "block": 64, "blocks": 64, "dtype": _BF16}
        for q, d in ((32, 128), (64, 64)) for rows in (1, 4, 64)
    ),
    hand_counts=(
        ({"rows": 3, "q_heads": 2, "kv_heads": 1, "head_dim": 16}, Cost(3 * (4 * 64 + 64 + 8), 3 * 3 * 8 * 6)),
    ),
    exact=frozenset({"v_blocks"}),
    alone=alone("rows", "qkv", "positions", "slots"),
    row_of=_row_of,
    n_rows=count("rows"),
)  # fmt: skip
