"""Rotary position embedding on q and k, half-split layout: (x1, x2) -> (x1 c - x2 s, x2 c + x1 s), and the cache write.

The kernel reads q, k and v of a row side by side, as one merged projection leaves them, and cos and sin from a table,
so every kind of scaling is a matter of the table. Where a GEMM precedes, its epilogue does this work (`gemm.epilogue`);
this card serves where it cannot, with the same table and the same slots: where every head of q and k is normed before
it is turned (`rope_kernel`).
Source: Su et al., arXiv 2104.09864; norms of heads: Dehghani et al., arXiv 2302.05442; paging after Kwon et al.,
arXiv 2309.06180.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.kernels.card import DTYPES, E4M3, Card, Case, Cost, Launch, Op, Tensors, poison
from eagle3core.kernels.isa.by_row import alone, count
from eagle3core.kernels.layer.cache_write import write_cache_rows
from eagle3core.kernels.layer.rms_norm import EPS, accumulation_dtype, rms_norm_reference
from eagle3core.kernels.layer.rope_kernel import THREADS, rope_variant


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


def rope(
    arch: str,
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    *,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    factors: Tensor | None = None,
    eps: float = EPS,
) -> list[Launch]:
    """Rotated `q: [rows, H, D]`, and k and v written into one layer's cache.

    Args:
        qkv: `[rows, (H + 2 K) * D]` bf16 or fp16, heads of q, then of k, then of v.
        positions, slots: `[rows]` int32; a slot is block * block size + offset, negative to write no k and v.
        table: `[positions, D / 2, 2]` fp32 cos and sin.
        k_blocks, v_blocks: `[n_blocks, K, block, D]`.
        q_gain, k_gain: `[D]` of the norms of every head of q and of k, both or neither. eps: of those norms.
        factors: of a cache in e4m3, `[2]` fp32: 1 / scale of its keys and of its values.

    Raises:
        KernelLimit: the head size or the block is not a power of two of at least 16.
    """
    assert (q_gain is None) == (k_gain is None), "q and k are normed together"
    rows, q_heads, head_dim = q.shape
    kv_heads, block = k_blocks.shape[1:3]
    items, e4m3_cache = (q_heads + 2 * kv_heads) * (head_dim // 16), k_blocks.dtype == E4M3
    of_bytes = {"factors": factors} if e4m3_cache else {}
    return [
        rope_variant(arch, DTYPES[q.dtype], head_dim, block, q_gain is not None, e4m3_cache=e4m3_cache).launch(
            (-(-items // THREADS), rows), qkv=qkv, positions=positions, slots=slots, table=table, q_gain=q_gain,
            k_gain=k_gain, q=q, k_blocks=k_blocks, v_blocks=v_blocks, q_heads=q_heads, kv_heads=kv_heads, eps=eps,
            **of_bytes,
        )
    ]  # fmt: skip


def rope_meaning(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    *,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    factors: Tensor | None = None,
    eps: float = EPS,
) -> None:
    """What `rope` computes, for any head size and dtype: norms and rotation in fp64 (fp32 for fp32), rounded once."""
    rows, q_heads, head_dim = q.shape
    kv_heads = k_blocks.shape[1]
    wide = torch.float64 if qkv.dtype in DTYPES else accumulation_dtype(qkv.dtype)
    heads = qkv.view(rows, -1, head_dim)
    turned = list(heads[:, : q_heads + kv_heads].to(wide).tensor_split([q_heads], dim=1))
    for i, gain in enumerate((q_gain, k_gain)):
        if gain is not None:
            turned[i] = rms_norm_reference(turned[i], gain.to(wide), eps)
    cos, sin = table[positions.long()].to(wide).unbind(-1)
    rotated = rope_reference(torch.cat(turned, dim=1)[None], cos[None], sin[None])[0]
    q.copy_(rotated[:, :q_heads])
    k_factor, v_factor = (None, None) if factors is None else factors
    write_cache_rows(k_blocks, slots, rotated[:, q_heads:], k_factor)
    write_cache_rows(v_blocks, slots, heads[:, q_heads + kv_heads :], v_factor)


ROPE = Op("rope", rope, rope_meaning)


def rope_cost(rows: int, q_heads: int, kv_heads: int, head_dim: int, normed: bool = False) -> Cost:
    """Every head in and out; the row's angles, position and slot; 6 operations a rotated pair.

    A norm reads its gain once, and adds 4 operations a value of q and k.
    """
    heads, turned = q_heads + 2 * kv_heads, rows * (q_heads + kv_heads) * head_dim
    return Cost(
        rows * (heads * head_dim * 4 + head_dim * 4 + 8) + (4 * head_dim if normed else 0),
        turned // 2 * 6 + (4 * turned if normed else 0),
    )


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
    gains = {name: 1 + normal(head_dim) / 8 for name in ("q_gain", "k_gain")} if case.get("normed") else {}
    return {
        **gains,
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
    read = (inputs[name] for name in ("qkv", "positions", "slots", "table"))
    written = (outputs[name] for name in ("q", "k_blocks", "v_blocks"))
    return rope(arch, *read, *written, q_gain=inputs.get("q_gain"), k_gain=inputs.get("k_gain"))


def _reference(case: Case, inputs: Tensors) -> Tensors:
    qkv = inputs["qkv"]
    heads = qkv.view(1, len(qkv), -1, case["head_dim"])
    angles = inputs["table"][inputs["positions"].long()][None].to(qkv.dtype)
    q_heads, kv_heads = case["q_heads"], case["kv_heads"]
    turned = heads[:, :, : q_heads + kv_heads]
    if case.get("normed"):
        turned = torch.cat(
            [
                rms_norm_reference(part, inputs[gain], EPS)
                for part, gain in zip(turned.tensor_split([q_heads], dim=2), ("q_gain", "k_gain"), strict=True)
            ],
            dim=2,
        )
    rotated = rope_reference(turned, angles[..., 0], angles[..., 1])[0]
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
    equation="(x1, x2) -> (x1 c - x2 s, x2 c + x1 s) on q and k, normed by head or not; k and v to their cache slots",
    source="arXiv 2104.09864",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: rope_cost(
        case["rows"], case["q_heads"], case["kv_heads"], case["head_dim"], bool(case.get("normed"))
    ),
    variants=lambda arch: [rope_variant(arch, "bf16", 128, 64, normed=True)],
    slow_variants=lambda arch: [
        rope_variant(arch, dtype, head_dim, block, normed)
        for dtype, head_dim, block, normed in (
            ("bf16", 128, 64, False), ("bf16", 64, 64, False), ("bf16", 128, 16, False), ("f16", 128, 64, False),
            ("bf16", 64, 64, True), ("f16", 128, 64, True),
        )
    ] + [rope_variant(arch, "bf16", 128, 64, True, e4m3_cache=True)],
    cases=(
        {"rows": 5, "q_heads": 6, "kv_heads": 2, "head_dim": 32, "block": 16, "blocks": 3, "dtype": _BF16},
        {"rows": 5, "q_heads": 3, "kv_heads": 2, "head_dim": 128, "block": 16, "blocks": 3, "dtype": _BF16,
         "normed": True},
    ),
    slow_cases=(
        {"rows": 3, "q_heads": 5, "kv_heads": 1, "head_dim": 64, "block": 32, "blocks": 2, "dtype": torch.float16,
         "normed": True},
        {"rows": 2, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "block": 16, "blocks": 2, "dtype": _BF16,
         "normed": True},
        {"rows": 2, "q_heads": 2, "kv_heads": 1, "head_dim": 512, "block": 16, "blocks": 2, "dtype": _BF16,
         "normed": True},
        {"rows": 4, "q_heads": 3, "kv_heads": 1, "head_dim": 128, "block": 32, "blocks": 2, "dtype": torch.float16},
        {"rows": 3, "q_heads": 16, "kv_heads": 1, "head_dim": 64, "block": 16, "blocks": 4, "dtype": _BF16},
    ),
    shapes=tuple(
        {"rows": rows, "q_heads": q, "kv_heads": 8, "head_dim": d, "block": 64, "blocks": 64, "dtype": _BF16,
         "normed": normed}
        for q, d, normed in ((32, 128, False), (64, 64, False), (32, 128, True)) for rows in (1, 4, 64)
    ),
    hand_counts=(
        ({"rows": 3, "q_heads": 2, "kv_heads": 1, "head_dim": 16}, Cost(3 * (4 * 64 + 64 + 8), 3 * 3 * 8 * 6)),
        (
            {"rows": 3, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "normed": True},
            Cost(3 * (4 * 64 + 64 + 8) + 64, 3 * 3 * 8 * 6 + 3 * 3 * 16 * 4),
        ),
    ),
    exact=frozenset({"v_blocks"}),
    order={"sum": "16 values of a lane upwards, then a butterfly over the head's lanes"},
    alone=alone("rows", "qkv", "positions", "slots"),
    row_of=_row_of,
    n_rows=count("rows"),
)  # fmt: skip
