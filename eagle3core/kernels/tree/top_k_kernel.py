"""What a block does to find a row's `top_k`: it chooses the best pieces of 16 columns, and the best of what they hold.

A logit has sixteen bits, so its value and its place fit one integer that orders as top-k does: the larger value, then
the lower place. The k best elements of a row lie in its k best pieces, equal pieces being ordered by their columns:
those k have an element each that is ahead of all of any other piece. So only k pieces of logits are read.
Source: see `top_k`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.isa.powers import LOG2_E, LOWEST, PIECE, make_offset
from eagle3core.kernels.isa.reductions import make_add_log, make_warp_sum
from eagle3core.kernels.tree.top_k_keys import WARPS, make_key_value, make_value_key

THREADS = 32 * WARPS
_NOTHING = -(1 << 31)  # below every key
_LAST = 0xFFFF  # the lower half of a key is this less the place


def make_choose_pieces(isa: Any, *, k: int, held: int) -> Any:
    """`choose_pieces(keys, best, other, board, listed, chosen, warp, lane)`: the k best pieces, in order, in `chosen`.

    `keys[p]` of a lane is the key of its p-th piece, `best` the warp's largest, `other` that of warp `lane` mod 16. The
    k-th best of the warps' best is a bar that at least k pieces clear; each warp lists its own that do, the k best if
    there are more, and the listed are ranked. No barrier follows.
    """
    cuda, i32, per_lane = isa.cuda, isa.i32, -(-WARPS * k // 32)

    def choose_pieces(
        keys: Any, best: Any, other: Any, board: Any, listed: Any, chosen: Any, warp: Any, lane: Any
    ) -> None:
        others, below = cuda.local.array(per_lane, i32), i32((1 << lane) - 1)
        if lane < k:
            isa.shared_store_u32(listed + (warp * k + lane) * 4, _NOTHING)
        # The board is read twice over by 32 lanes: the lower half of the votes counts. No two keys are equal, so
        # exactly one warp has k - 1 ahead of its own.
        if isa.popcount(isa.ballot(i32(other > best)) & 0xFFFF) == k - 1 and lane == 0:
            isa.shared_store_u32(board + WARPS * 4, best)
        # The bar is there.
        cuda.syncthreads()
        bar, count, mine = isa.shared_load_u32(board + WARPS * 4), i32(0), i32(_NOTHING)
        for p in range(held):
            count = i32(count + isa.popcount(isa.ballot(i32(keys[p] >= bar))))
        if count <= k:
            count = i32(0)
            for p in range(held):
                votes = isa.ballot(i32(keys[p] >= bar))
                if keys[p] >= bar:
                    isa.shared_store_u32(listed + (warp * k + count + isa.popcount(i32(votes & below))) * 4, keys[p])
                count = i32(count + isa.popcount(votes))
        else:
            count = i32(0)
            while count < k:
                own = i32(_NOTHING)
                for p in range(held):
                    if count == 0 or keys[p] < best:
                        own = i32(max(own, keys[p]))
                best = isa.warp_max_i32(own)
                if lane == 0:
                    isa.shared_store_u32(listed + (warp * k + count) * 4, best)
                count = i32(count + 1)
        # All lists are there.
        cuda.syncthreads()
        if lane < count:
            mine = isa.shared_load_u32(listed + (warp * k + lane) * 4)
        if count > 0:
            for e in range(per_lane):
                others[e] = i32(_NOTHING)
                if e * 32 + lane < WARPS * k:
                    others[e] = isa.shared_load_u32(listed + (e * 32 + lane) * 4)
            for n in range(count):
                key, ahead = isa.shuffle_i32(mine, n), i32(0)
                for e in range(per_lane):
                    ahead = i32(ahead + isa.popcount(isa.ballot(i32(others[e] > key))))
                if lane == 0 and ahead < k:
                    isa.shared_store_u32(chosen + ahead * 4, key)

    return isa.inlined(choose_pieces)


def make_top_k(isa: Any, *, dtype: str, k: int, pieces: int, held: int, maps: bool) -> Any:
    """`top_k(logits, best, powers, to_target, log_probs, ids, row, n_columns)`: a row's k best, for a whole block.

    Threads hold `held` pieces each: their keys choose. The sums of powers are added up while the chosen logits and
    their target ids, asked for together, are on their way. `log_probs` and `ids` are the addresses of the row's own.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    choose_pieces, low = make_choose_pieces(isa, k=k, held=held), isa.LOW[dtype]
    value_key, key_value = make_value_key(isa, dtype), make_key_value(isa, dtype)
    normalise, rank = make_normalise(isa, dtype=dtype, held=held, pieces=pieces), make_rank(isa, k=k)
    zero, infinity = np.float32(0), np.float32(np.inf)
    board_words, listed_words, elements = WARPS + 1, WARPS * k, PIECE * k

    def top_k(
        logits: Any, best: Any, powers: Any, to_target: Any, log_probs: Any, ids: Any, row: Any, n_columns: Any
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        keys, sums = cuda.local.array(held, i32), cuda.local.array(held, isa.f32)
        board = isa.shared_address(cuda.shared.array(board_words, i32))
        listed = isa.shared_address(cuda.shared.array(listed_words, i32))
        chosen = isa.shared_address(cuda.shared.array(k, i32))
        found = isa.shared_address(cuda.shared.array(elements, i32))
        first = (row * pieces + tid) * 4
        # A piece past the last has a key of its own too, below every real one, and the sum 0.
        for p in range(held):
            keys[p], sums[p] = i32(_NOTHING + (_LAST - (p * THREADS + tid))), zero
            if p * THREADS + tid < pieces:
                sums[p] = isa.load_f32(powers + first + p * (4 * THREADS))
                keys[p] = i32(value_key(isa.load_f32(best + first + p * (4 * THREADS))) + (_LAST - p * THREADS - tid))
        top = keys[0]
        for p in range(1, held):
            top = i32(max(top, keys[p]))
        top = isa.warp_max_i32(top)
        if lane == 0:
            isa.shared_store_u32(board + warp * 4, top)
        # All warps' best are on the board.
        cuda.syncthreads()
        other = isa.shared_load_u32(board + (lane & (WARPS - 1)) * 4)
        largest = key_value(isa.warp_max_i32(other))
        choose_pieces(keys, top, other, board, listed, chosen, warp, lane)
        # The chosen pieces are there.
        cuda.syncthreads()
        mine, column, bits, token, bar = i32(_NOTHING), i32(0), i32(0), i32(0), i32(0)
        if warp < k:  # a chosen piece each, a lane a column
            # Of equal logits the lower column is ahead, so the chosen pieces are numbered by their columns.
            held_at, before = i32(isa.shared_load_u32(chosen + warp * 4) & _LAST), i32(0)
            bar = isa.shared_load_u32(chosen + (k - 1) * 4)
            for c in range(k):
                before = i32(before + i32((isa.shared_load_u32(chosen + c * 4) & _LAST) > held_at))
            column = i32((_LAST - held_at) * PIECE + lane)
            mine = i32(_NOTHING + (_LAST - before * PIECE - lane))
            if lane < PIECE and column < n_columns:
                bits, token = isa.load_u16(logits + (row * n_columns + column) * 2), column
                if maps:
                    token = isa.load_u32(to_target + i64(column) * 4)
        normaliser = normalise(keys, sums, largest, tid)
        if warp < k and lane < PIECE:
            if column < n_columns:
                value = low(bits)
                if value != value:  # a NaN counts as infinite, as in the best of its piece
                    value = infinity
                mine = i32(value_key(value) + (mine & _LAST))
            isa.shared_store_u32(found + (warp * PIECE + lane) * 4, mine)
        # All elements of the chosen pieces are there.
        cuda.syncthreads()
        if warp < k:
            place = rank(found, mine, bar, lane)
            if place < k:
                isa.store_f32(log_probs + place * 4, isa.minimum(key_value(mine) - normaliser, zero))
                isa.store_u32(ids + place * 4, token)

    return isa.inlined(top_k)


def make_normalise(isa: Any, *, dtype: str, held: int, pieces: int) -> Any:
    """`normalise(keys, sums, largest, tid)`: the row's log sum exp, from its pieces' largest values and sums.

    The row's largest scales every piece's sum; what rounding r left in the sums is taken out at the end.
    """
    cuda, i32, zero = isa.cuda, isa.i32, np.float32(0)
    warp_sum, offset, add_log, key_value = (
        make_warp_sum(isa), make_offset(isa), make_add_log(isa), make_key_value(isa, dtype)
    )  # fmt: skip
    log2_e, lowest = np.float32(LOG2_E), np.float32(LOWEST)

    def normalise(keys: Any, sums: Any, largest: Any, tid: Any) -> Any:
        parts = isa.shared_address(cuda.shared.array(WARPS, isa.f32, alignment=16))
        largest = isa.maximum(largest, lowest)
        scale, total = offset(largest), zero
        for p in range(held):
            if p * THREADS + tid < pieces:
                total = total + sums[p] * isa.exp2(offset(key_value(keys[p])) - scale)
        total = warp_sum(total)
        if (tid & 31) == 0:
            isa.shared_store_f32(parts + (tid >> 5) * 4, total)
        # The warps' sums are there.
        cuda.syncthreads()
        total = zero
        for quad in range(WARPS // 4):  # in order, whoever adds
            four = isa.shared_load_f32x4(parts + i32(quad * 16))
            for i in range(4):
                total = total + four[i]
        return add_log(largest, total, isa.fused(largest, log2_e, -scale))

    return isa.inlined(normalise)


def make_rank(isa: Any, *, k: int) -> Any:
    """`rank(found, mine, bar, lane)`: how many of all elements `found` are ahead of a lane's own; k: too many.

    A warp looks at the 16 elements of its piece, `mine` of its first 16 lanes. The k chosen pieces' best are k elements
    that are no smaller than the last piece's, whose key is `bar`: what is smaller is not ranked.
    """
    cuda, i32 = isa.cuda, isa.i32
    elements, words = PIECE * k, -(-PIECE * k // 32)

    def rank(found: Any, mine: Any, bar: Any, lane: Any) -> Any:
        others, place = cuda.local.array(words, i32), i32(k)
        for e in range(words):
            others[e] = i32(_NOTHING)
            if e * 32 + lane < elements:
                others[e] = isa.shared_load_u32(found + (e * 32 + lane) * 4)
        votes = isa.ballot(i32(lane < PIECE and (mine >> 16) >= (bar >> 16)))
        while votes != 0:
            n, ahead = isa.popcount(i32((votes & -votes) - 1)), i32(0)
            key = isa.shuffle_i32(mine, n)
            # An element's place is the number of those ahead of it: no sorting, and no two write one place.
            for e in range(words):
                ahead = i32(ahead + isa.popcount(isa.ballot(i32(others[e] > key))))
            if lane == n:
                place = ahead
            votes = i32(votes & (votes - 1))
        return place

    return isa.inlined(rank)
