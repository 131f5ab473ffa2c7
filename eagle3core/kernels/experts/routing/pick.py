"""A warp chooses the experts of a row: the largest logits, of equal ones the lower expert, and their shares.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.isa.powers import LOG2_E
from eagle3core.kernels.isa.reductions import make_warp_sum

_LEAST = -(1 << 31)  # below the key of every number
_NOBODY = 1 << 20  # above every expert


def words_of(experts: int) -> int:
    """Words that have a bit for every expert; and experts that a lane looks after: 32 from one to the next."""
    return -(-experts // 32)


def make_pick(isa: Any, *, experts: int, n_chosen: int) -> Any:
    """Inlined `pick(values, logits, row, lane)`: (a bit for each of the lane's own experts, the largest logit, mine).

    `values: [words_of(experts)]` f32 are the lane's logits then. `mine` is, in lane i, the row's i-th choice.
    """
    i32, i64, cuda = isa.i32, isa.i64, isa.cuda
    zero, infinity, n_words = np.float32(0), np.float32(np.inf), words_of(experts)

    def turned(bits: Any) -> Any:
        """From a number's bits a key that is ordered as numbers are, and back."""
        return i32(bits ^ (i32(bits >> 31) & 0x7FFFFFFF))

    turned = isa.inlined(turned)

    def pick(values: Any, logits: Any, row: Any, lane: Any) -> Any:
        keys = cuda.local.array(n_words, i32)
        for j in range(n_words):
            values[j] = -infinity
            if j * 32 + lane < experts:
                v = isa.load_f32(logits + (i64(row) * experts + j * 32 + lane) * 4)
                # A NaN is chosen last, so that rows of nothing else have experts too.
                if v == v:
                    values[j] = v
        for j in range(n_words):
            keys[j] = turned(isa.bits_of_f32(values[j] + zero))  # of both zeros alike
        taken, top, mine, i = i32(0), i32(0), i32(0), i32(0)
        rounds = isa.shuffle_i32(i32(n_chosen), 0)  # a number that no compiler knows: one piece of code for all rounds
        while i < rounds:
            best = keys[0]
            for j in range(1, n_words):
                best = max(best, keys[j])
            most, own = isa.warp_max_i32(best), i32(_NOBODY)
            for j in range(n_words - 1, -1, -1):
                # Experts that are not there have the highest numbers, so of equal ones they come last.
                if keys[j] == most:
                    own = i32(j * 32 + lane)
            index = isa.warp_min_i32(own)
            if i == 0:
                top = most
            if i == lane:
                mine = index
            for j in range(n_words):
                if index == j * 32 + lane:
                    keys[j] = i32(_LEAST)
            i = i32(i + 1)
        for j in range(n_words):
            if keys[j] == _LEAST:
                taken = i32(taken | (1 << j))
        return taken, isa.f32_of_bits(turned(top)), mine

    return isa.inlined(pick)


def make_leave(isa: Any, *, experts: int, n_chosen: int, is_normalised: bool) -> Any:
    """Inlined `leave(values, taken, top, chosen, shares, row, lane)`: what `pick` has picked, and the shares."""
    i32, i64, log2_e, zero = isa.i32, isa.i64, np.float32(LOG2_E), np.float32(0)
    n_words, warp_sum = words_of(experts), make_warp_sum(isa)

    def leave(values: Any, taken: Any, top: Any, chosen: Any, shares: Any, row: Any, lane: Any) -> None:
        own, before = zero, i32(0)
        for j in range(n_words):
            values[j] = isa.exp2(isa.product(values[j] - top, log2_e))
            if not is_normalised or (taken >> j) & 1 != 0:
                own = own + values[j]
        inverse = isa.reciprocal(warp_sum(own))
        for j in range(n_words):
            word = isa.ballot((taken >> j) & 1)
            if (taken >> j) & 1 != 0:
                place = i64(row) * n_chosen + before + isa.popcount(i32(word & ((1 << lane) - 1)))
                isa.store_u32(chosen + place * 4, i32(j * 32 + lane))
                isa.store_f32(shares + place * 4, values[j] * inverse)
            before = i32(before + isa.popcount(word))

    return isa.inlined(leave)
