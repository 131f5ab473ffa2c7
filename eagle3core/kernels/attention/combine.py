"""Attention's second kernel: the splits of every row become its output.

out = sum_s exp2((top_s - top) c) o_s / (sum_s exp2((top_s - top) c) l_s + exp(sink - ...)), splits in ascending order:
those of a bundle one after the other, as streams are joined, unless the kernel before did that; then the bundles.
Splits without a visible key (l_s = 0) take no part, and those that a short context leaves without keys are not read.
A learned sink is a logit that takes part in the denominator only.

Source: Flash-Decoding (Dao et al.); sinks after the GPT-OSS model card.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, LOG2_E, UNIT, Shape, make_token_of
from eagle3core.kernels.gemm.order.pack import make_store_ordered

COMBINE_THREADS = 128


def combine_rows(dim: int) -> int:
    """Rows of one block: four elements of a row fall to each thread."""
    return COMBINE_THREADS * 4 // dim


def make_attention_combine(isa: Any, *, shape: Shape, joined: bool, overlap: bool, ordered: bool = False) -> Any:
    """The kernel; grid (blocks of `combine_rows` rows, key heads, sequences).

    Args:
        joined: a bundle's sums lie where its first split's would; the other splits are not read.
        ordered: the output is also written in the order in which the map after it fetches its rows (`gemm.pack`).
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    pack, token_of = isa.PACK[shape.dtype], make_token_of(isa, shape.group)
    dim, group, splits = shape.dim, shape.group, shape.splits
    store_ordered = make_store_ordered(isa)
    zero, one, log2_e, fp8 = np.float32(0), np.float32(1), np.float32(LOG2_E), shape.is_fp8
    row_shift, rows_of_block = (dim // 4).bit_length() - 1, combine_rows(dim)
    bundle = shape.bundle
    held = -(-splits // 16)  # splits whose maximum and sum a lane holds; 16 lanes hold all of a row
    batch = min(splits, 16)
    step = bundle if joined else 1  # to the next split that is read
    split_units = shape.streams * UNIT  # keys of a split's streams, one unit of each
    split_shift = split_units.bit_length() - 1
    n_values = 4 * batch
    passes = splits // batch

    def shuffled(value: Any, source: Any) -> Any:
        return isa.f32_of_bits(isa.shuffle_i32(isa.bits_of_f32(value), source))

    shuffled = isa.inlined(shuffled)

    def bundle_split(top: Any, weight: Any, lane: Any, scale: Any) -> Any:
        """One lane's split joins those before it in its bundle: (its maximum and weight then, keep, take)."""
        place, before = i32(lane & (bundle - 1)), FLOOR
        # A running maximum and sum, split by split as streams are joined; the lanes of a bundle wait for each other's
        # by shuffles.
        for j in range(bundle - 1):
            other = shuffled(top, i32(lane - min(place, j + 1)))
            if place > j:
                before = isa.maximum(before, other)
        high = isa.maximum(before, top)
        keep, take = isa.exp2((before - high) * scale), isa.exp2((top - high) * scale)
        total = weight
        for j in range(bundle - 1):
            others = shuffled(total, i32(lane - min(place, 1)))
            if place == j + 1:
                total = isa.fused(others, keep, isa.product(weight, take))
        if weight == zero:
            take = zero  # what lies there was never written: 0 * NaN would spoil the sum
        return high, total, keep, take

    bundle_split = isa.inlined(bundle_split)

    def combine(
        partial: Any, tops_sums: Any, prefix: Any, sinks: Any, out: Any, words: Any, tokens: Any, newest: Any,
        x_tiles: Any, scale: Any, v_scale: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & 31)
        kv_head, b, n_kv = i32(cuda.blockIdx.y), i32(cuda.blockIdx.z), i32(cuda.gridDim.y)
        rows = i32(tokens * group)
        row, column = i32(cuda.blockIdx.x * rows_of_block + (tid >> row_shift)), i32(tid & (dim // 4 - 1))
        first_row = (i64(b) * n_kv + kv_head) * splits * rows + min(row, rows - 1)
        token = token_of(i32(min(row, rows - 1)))
        head = i32(kv_head * group + (min(row, rows - 1) - token * group))
        # Units of keys go to the streams of the first split, then to those of the second, and so on.
        n_live = i32((i32(isa.load_u32(prefix + b * 4)) + newest + (split_units - 1)) >> split_shift)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        # Four elements of a row from up to 16 splits, 64 registers, all under way before the maxima are known.
        values = cuda.local.array(n_values, f32)
        source = partial + first_row * (4 * dim) + column * 16
        stride = i64(rows) * (4 * dim)
        for i in range(batch // step):  # asked for before anything is known of their weights
            if i * step < n_live:
                x = isa.load_f32x4_l2(source + (i * step) * stride)
                for c in range(4):
                    values[i * step * 4 + c] = x[c]
        tops, weights = cuda.local.array(held, f32), cuda.local.array(held, f32)
        keep, take = cuda.local.array(held, f32), cuda.local.array(held, f32)
        high = FLOOR
        for i in range(held):
            s = i32((lane & 15) + i * 16)
            tops[i], weights[i] = FLOOR, zero
            if s < min(n_live, splits) and (s & (step - 1)) == 0:
                pair = isa.load_f32x2(tops_sums + (first_row + i64(s) * rows) * 8)
                tops[i], weights[i] = pair[0], pair[1]
            keep[i], take[i] = zero, zero
            if not joined:
                tops[i], weights[i], keep[i], take[i] = bundle_split(tops[i], weights[i], lane, scale)
                if (lane & (bundle - 1)) < bundle - 1:
                    weights[i] = zero  # counted in the bundle's
            high = isa.maximum(high, tops[i])
        # Sixteen lanes hold a row's splits: 1, 2, 4 and 8 apart.
        for shift in range(4):
            high = isa.maximum(high, isa.shuffle_xor_f32(high, 1 << shift))
        level = isa.product(high, scale)
        sink = zero
        if sinks != 0:
            sink = isa.product(isa.load_f32(sinks + head * 4), log2_e)
            level = isa.maximum(level, sink)
        total = zero
        for i in range(held):
            factor = isa.exp2(isa.fused(tops[i], scale, -level))
            if weights[i] != zero:  # a NaN counts: a key that is seen and is not a number has to show
                total = isa.fused(weights[i], factor, total)
                weights[i] = factor
        for shift in range(4):
            # The order of the denominator: a lane's splits upwards, then this butterfly.
            total = total + isa.shuffle_xor_f32(total, 1 << shift)
        if sinks != 0:
            total = total + isa.exp2(sink - level)
        o0, o1, o2, o3 = zero, zero, zero, zero
        for p in range(passes):
            if p > 0:
                for i in range(batch // step):
                    x = isa.load_f32x4_l2(source + (p * batch + i * step) * stride)
                    for c in range(4):
                        values[i * step * 4 + c] = x[c]
            # The order of the values: bundles upwards, within them splits upwards.
            for i in range(batch // bundle):
                s = i * bundle
                g0, g1, g2, g3 = values[s * 4], values[s * 4 + 1], values[s * 4 + 2], values[s * 4 + 3]
                last = i32((lane & 16) + s)
                if not joined:
                    g0, g1, g2, g3 = zero, zero, zero, zero
                    for j in range(bundle):
                        last = i32((lane & 16) + s + j)
                        kept, taken, x = shuffled(keep[p], last), shuffled(take[p], last), (s + j) * 4
                        if taken > zero:
                            g0 = isa.fused(g0, kept, isa.product(values[x], taken))
                            g1 = isa.fused(g1, kept, isa.product(values[x + 1], taken))
                            g2 = isa.fused(g2, kept, isa.product(values[x + 2], taken))
                            g3 = isa.fused(g3, kept, isa.product(values[x + 3], taken))
                weight = shuffled(weights[p], last)
                if weight != zero:
                    o0, o1 = isa.fused(g0, weight, o0), isa.fused(g1, weight, o1)
                    o2, o3 = isa.fused(g2, weight, o2), isa.fused(g3, weight, o3)
        inverse = zero
        if total != zero:  # a row that sees no key gives zeros
            inverse = isa.reciprocal(total)
        if fp8:
            inverse = inverse * v_scale
        if row < rows:
            target = out + ((i64(b * tokens + token) * (n_kv * group)) + head) * (2 * dim) + column * 8
            low, high_pair = pack(o1 * inverse, o0 * inverse), pack(o3 * inverse, o2 * inverse)
            isa.store_u32x2(target, low, high_pair)
            if ordered:
                k = i32(n_kv * group * dim)
                store_ordered(words, x_tiles, k, i32(b * tokens + token), i32(head * dim + column * 4), low, high_pair)

    combine = isa.inlined(combine, early=True)

    def attention_combine(
        partial: Any, tops_sums: Any, prefix: Any, sinks: Any, out: Any, words: Any, tokens: Any, newest: Any,
        x_tiles: Any, scale: Any,
    ) -> None:  # fmt: skip
        combine(partial, tops_sums, prefix, sinks, out, words, tokens, newest, x_tiles, scale, one)

    def attention_combine_of_fp8(
        partial: Any, tops_sums: Any, prefix: Any, sinks: Any, out: Any, words: Any, tokens: Any, newest: Any,
        x_tiles: Any, scale: Any, v_scale: Any,
    ) -> None:  # fmt: skip
        combine(partial, tops_sums, prefix, sinks, out, words, tokens, newest, x_tiles, scale, v_scale)

    return attention_combine_of_fp8 if fp8 else attention_combine
