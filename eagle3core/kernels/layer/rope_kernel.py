"""The kernel of `rope`: one thread turns 8 pairs of a head, or copies as many of v.

Where heads are normed first, the lanes that share a head lie side by side in one warp and add its squares in one order:
a lane's values upwards, then a butterfly. No choice depends on the rows of the launch, so a row's bits do not either.
Source: derived here; equations in `rope`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import PLAIN_TORCH, Variant, overlaps, parameters
from eagle3core.kernels.isa.by_row import make_store, make_unpack
from eagle3core.kernels.layer.cache_write import make_to_e4m3

THREADS = 128
MOST_NORMED = 512  # values of a head: 16 a lane of one warp


def make_rope(
    isa: Any, *, dtype: str, head_dim: int, block: int, normed: bool, overlap: bool, e4m3_cache: bool = False
) -> Any:
    """Grid (pieces, rows); a thread rotates 8 elements of each half of a head, or copies them for v.

    `normed`: heads of q and k first, over lanes that lie side by side. `e4m3_cache`: the cache is of bytes; the kernel
    has a parameter more, `[2]` f32 of what k and v are multiplied by.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    unpack, store = make_unpack(isa, dtype), make_store(isa, dtype)
    half, to_e4m3 = head_dim // 2, make_to_e4m3(isa)
    per_head_shift = (half // 8).bit_length() - 1
    per_head_mask, block_shift, block_mask = half // 8 - 1, block.bit_length() - 1, block - 1
    inverse_width, zero, stored_bytes = np.float32(1 / head_dim), np.float32(0), 1 if e4m3_cache else 2

    def store_bytes(target: Any, values: Any, at: Any, factor: Any) -> None:
        words = cuda.local.array(2, i32)
        for w in range(2):
            words[w] = i32(0)
            for i in range(4):
                words[w] = i32(words[w] | (to_e4m3(values[at + w * 4 + i], factor) << (8 * i)))
        isa.store_u32x2(target, words[0], words[1])

    store_bytes = isa.inlined(store_bytes)

    def rope(
        qkv: Any, positions: Any, slots: Any, table: Any, q_gain: Any, k_gain: Any, q: Any, k_blocks: Any,
        v_blocks: Any, q_heads: Any, kv_heads: Any, eps: Any, factors: Any,
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
        if normed:
            # Every lane takes part, those past the last head with zeros: a shuffle asks for the whole warp. A lane's
            # values upwards, then a butterfly over the head's lanes, after which all hold the same sum.
            unpack(lower, first, 0)
            unpack(upper, second, 0)
            squares = zero
            for i in range(8):
                squares = isa.fused(first[i], first[i], squares)
            for i in range(8):
                squares = isa.fused(second[i], second[i], squares)
            for step in range(per_head_shift):
                squares = squares + isa.shuffle_xor_f32(squares, 1 << step)
            if head < q_heads + kv_heads:
                gain = q_gain
                if not is_query:
                    gain = k_gain
                scale = isa.rsqrt(isa.fused(squares, inverse_width, eps))
                low_gains, high_gains = cuda.local.array(8, f32), cuda.local.array(8, f32)
                unpack(isa.load_u32x4_const(gain + piece * 2), low_gains, 0)
                unpack(isa.load_u32x4_const(gain + (piece + half) * 2), high_gains, 0)
                for i in range(8):
                    first[i] = first[i] * scale * low_gains[i]
                    second[i] = second[i] * scale * high_gains[i]
        if head < heads and (is_query or slot >= 0):
            angle = table + (i64(position) * half + piece) * 8
            if not normed:
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
                target = pages + (line * head_dim + piece) * stored_bytes
            if e4m3_cache and not is_query:
                factor = isa.load_f32(factors + i64(head >= q_heads + kv_heads) * 4)
                store_bytes(target, out, 0, factor)
                store_bytes(target + half, out, 8, factor)
            else:
                store(target, out, 0)
                store(target + half * 2, out, 8)

    rope = isa.inlined(rope, early=True)

    def kernel(
        qkv: Any, positions: Any, slots: Any, table: Any, q_gain: Any, k_gain: Any, q: Any, k_blocks: Any,
        v_blocks: Any, q_heads: Any, kv_heads: Any, eps: Any,
    ) -> None:  # fmt: skip
        rope(qkv, positions, slots, table, q_gain, k_gain, q, k_blocks, v_blocks, q_heads, kv_heads, eps, q)

    def kernel_of_e4m3(
        qkv: Any, positions: Any, slots: Any, table: Any, q_gain: Any, k_gain: Any, q: Any, k_blocks: Any,
        v_blocks: Any, q_heads: Any, kv_heads: Any, eps: Any, factors: Any,
    ) -> None:  # fmt: skip
        rope(qkv, positions, slots, table, q_gain, k_gain, q, k_blocks, v_blocks, q_heads, kv_heads, eps, factors)

    return kernel_of_e4m3 if e4m3_cache else kernel


def rope_variant(
    arch: str, dtype: str, head_dim: int, block: int, normed: bool = False, *, e4m3_cache: bool = False
) -> Variant:
    """The rotation for one head size and cache block, after a norm of each head of q and k or without.

    Raises:
        KernelLimit: either is not a power of two of at least 16, or a normed head has more values than a warp holds.
    """
    for name, size in (("head size", head_dim), ("block", block)):
        if size < 16 or size & (size - 1):
            raise KernelLimit(f"{name} is {size}", "a power of two, 16 or more", PLAIN_TORCH)
    if normed and head_dim > MOST_NORMED:
        raise KernelLimit(f"a normed head of {head_dim} values", f"at most {MOST_NORMED}", PLAIN_TORCH)
    further = {"e4m3_cache": True} if e4m3_cache else {}
    return Variant(
        name=f"rope_{dtype}_{head_dim}_{block}{'_norm' if normed else ''}{'_e4m3' if e4m3_cache else ''}",
        make=make_rope,
        constants={"dtype": dtype, "head_dim": head_dim, "block": block, "normed": normed, "overlap": overlaps(arch)}
        | further,
        parameters=parameters(
            "qkv:in positions:in slots:in table:const q_gain:const k_gain:const q:out k_blocks:inout v_blocks:inout "
            f"q_heads:i32 kv_heads:i32 eps:f32{' factors:const' if e4m3_cache else ''}"
        ),
        threads=THREADS,
        max_registers=96 if normed else 72,
        dependent=overlaps(arch),
    )
