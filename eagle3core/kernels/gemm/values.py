"""What the epilogues compute of a pair of sums, by whichever lane holds it: the formulas, and in what order they round.

Kernels finish in two arrangements: an item a lane (`finish`), or as the tensor cores left the sums (`fragments`). The
eight pairs of a tile and row lie in lanes that are `apart`, twice and four times as far from each other: 1 or 4.

Every product that is added to something is written as `fused` or `product`: no compiler chooses where to round.

Source: derived here; RoPE: Su et al., arXiv 2104.09864; SwiGLU: Shazeer, arXiv 2002.05202.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.isa.powers import LOG2_E, make_offset


def make_scaled(isa: Any, epilogue: Epilogue) -> Any:
    """Inlined `scaled(v, scale, bias)`: a sum times its row's 1 / rms, plus the bias of its row of W, if there are."""
    scale_, bias_ = epilogue.quads > 0, epilogue.has_bias

    def scaled(v: Any, scale: Any, bias: Any) -> Any:
        if scale_:
            v = isa.product(v, scale)
        if bias_:
            v = v + bias
        return v

    return isa.inlined(scaled)


def make_gated(isa: Any) -> Any:
    """Inlined `gated(v0, v1)`: v0 / (1 + e^-v0) v1. The one addition has no product that a compiler could merge."""
    one, minus_log2_e = np.float32(1), np.float32(-1.4426950408889634)

    def gated(v0: Any, v1: Any) -> Any:
        return v0 * isa.reciprocal(one + isa.exp2(v0 * minus_log2_e)) * v1

    return isa.inlined(gated)


def make_squares(isa: Any, apart: int) -> Any:
    """Inlined `squares(h0, h1)`: the sum of squares of a tile's 16 columns of a row; the same in all eight lanes.

    A pair, then lanes 1, 2 and 4 times `apart`. A butterfly adds the same two numbers in both lanes, so all eight hold
    one sum; `scale` adds such sums up.
    """

    def squares(h0: Any, h1: Any) -> Any:
        total = isa.fused(h0, h0, isa.product(h1, h1))
        total = total + isa.shuffle_xor_f32(total, apart)
        total = total + isa.shuffle_xor_f32(total, 2 * apart)
        return total + isa.shuffle_xor_f32(total, 4 * apart)

    return isa.inlined(squares)


def make_rotated(isa: Any) -> Any:
    """Inlined `rotated(v0, v1, cos, sin)`: v0 cos - v1 sin and v1 cos + v0 sin.

    One product rounded, the other not, in every kernel alike.
    """

    def rotated(v0: Any, v1: Any, cos: Any, sin: Any) -> Any:
        return (
            isa.fused(v0, cos, -isa.product(v1, sin)),
            isa.fused(v1, cos, isa.product(v0, sin)),
        )

    return isa.inlined(rotated)


def make_best(isa: Any, epilogue: Epilogue, apart: int) -> Any:
    """Inlined `best_of(logit0, logit1, column)`: of a tile's 16 logits of a row as stored, the same in all eight lanes.

    `column` is that of the lane's first logit; the other is 8 further. Returns the best, its column (the lowest of
    equal ones, as argmax would choose), and with `has_powers` their sum of powers.
    """
    i32, zero, infinity, log2_e = isa.i32, np.float32(0), np.float32(np.inf), np.float32(LOG2_E)
    powers_, offset = epilogue.has_powers, make_offset(isa)

    def best_of(logit0: Any, logit1: Any, column: Any) -> Any:
        best, other = logit0, logit1
        # No comparison finds a NaN: it counts as infinite, which the second pass refuses.
        if best != best:
            best = infinity
        if other != other:
            other = infinity
        if other > best:
            best, column = other, i32(column + 8)
        for step in range(3):
            other = isa.shuffle_xor_f32(best, apart << step)
            other_column = isa.shuffle_xor_i32(column, apart << step)
            if other > best or (other == best and other_column < column):
                best, column = other, i32(other_column)
        total = zero
        if powers_:
            # In one order: this pair, then a butterfly over the 8 lanes.
            r = offset(best)
            total = isa.exp2(isa.fused(logit0, log2_e, -r)) + isa.exp2(isa.fused(logit1, log2_e, -r))
            for step in range(3):
                total = total + isa.shuffle_xor_f32(total, apart << step)
        return best, column, total

    return isa.inlined(best_of)


def make_cache_line(isa: Any, epilogue: Epilogue) -> Any:
    """Inlined `cache_line(slot, head, kv_heads)`: the line of D values in [block, key head, token of the block, D]."""
    i64, shift, mask = isa.i64, epilogue.block.bit_length() - 1, epilogue.block - 1

    def cache_line(slot: Any, head: Any, kv_heads: Any) -> Any:
        return ((i64(slot >> shift) * kv_heads + head) << shift) + (slot & mask)

    return isa.inlined(cache_line)
