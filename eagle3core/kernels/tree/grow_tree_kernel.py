"""The kernel of `grow_tree`: a block a row finds its candidates, the last block of a tree makes the next beam of them.

Source: see `grow_tree`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.isa.early import make_early
from eagle3core.kernels.isa.last import make_is_last
from eagle3core.kernels.isa.reductions import make_sortable
from eagle3core.kernels.tree.top_k_kernel import THREADS, make_top_k


def teams(k: int) -> int:
    """Lanes that count together how many candidates beat one: a power of two, with which a block holds k * k teams."""
    return 4 if k <= 11 else 2


def make_grow_tree(
    isa: Any, *, dtype: str, k: int, pieces: int, held: int, words: int, maps: bool, fixed: bool, overlap: bool
) -> Any:
    """Grid (rows of a tree, trees). What was known before the logits is read beside them, by whichever block."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    shift, reciprocal = teams(k).bit_length() - 1, 65536 // k + 1
    top_k = make_top_k(isa, dtype=dtype, k=k, pieces=pieces, held=held, maps=maps)
    count_ahead, extend = make_count_ahead(isa, k=k), make_extend(isa, words)
    early, is_last, sortable, zero = make_early(isa, THREADS), make_is_last(isa), make_sortable(isa), np.float32(0)

    def kernel(
        logits: Any, best: Any, powers: Any, fixed_scores: Any, draft_to_target: Any, log_probs: Any, ids: Any,
        arrived: Any, scores: Any, tokens: Any, parents: Any, beam_scores: Any, beam_flat: Any, beam_tokens: Any,
        beam_rows: Any, beam_mask: Any, level: Any, pool: Any, n_columns: Any,
    ) -> None:  # fmt: skip
        tid, tree = i32(cuda.threadIdx.x), i64(cuda.blockIdx.y)
        rows, candidates, start = i32(1), i32(k), i32(0)
        if level > 0:
            rows, candidates, start = i32(k), i32(k * k), i32(k + (level - 1) * (k * k))
        row, mask = tree * rows + i64(cuda.blockIdx.x), cuda.local.array(words, i32)
        me, part = i32(tid >> shift), i32(tid & ((1 << shift) - 1))
        # me / k by a product: exact up to 256 candidates.
        node = i32(i32(me * reciprocal) >> 16)
        at, first = (tree * candidates + me) * 4, (row * pieces + tid) * 4
        early((best + first) ^ (powers + first) ^ (logits + row * n_columns) ^ (log_probs + at) ^ (ids + at))
        if overlap:
            isa.wait_previous()
            isa.let_next_start()  # only now: blocks of kernels further on would crowd this one's multiprocessors
        above, parent = zero, i32(-1)
        for w in range(words):
            mask[w] = i32(0)
        if level > 0 and me < candidates:
            old = (tree * k + node) * 4
            above, parent = isa.load_f32(beam_scores + old), isa.load_u32(beam_flat + old)
            for w in range(words):
                mask[w] = isa.load_u32(beam_mask + old * words + w * 4)
        top_k(logits, best, powers, draft_to_target, log_probs + row * k * 4, ids + row * k * 4, row, n_columns)
        if is_last(arrived + tree * 4, rows, tid) == 0:
            return
        score, token = zero, i32(0)
        if me < candidates:
            token = isa.load_u32(ids + at)
            step = isa.load_f32(fixed_scores + at) if fixed else isa.load_f32(log_probs + at)
            score = above + isa.minimum(step, zero)
        # -0 is the equal of +0.
        place = count_ahead(sortable(score + zero), candidates, me, part)
        if part == 0 and me < candidates:
            at = (tree * pool + start + me) * 4
            isa.store_f32(scores + at, score)
            isa.store_u32(tokens + at, token)
            isa.store_u32(parents + at, parent)
            # The k best are the next beam; the pool above keeps every candidate.
            if place < k:
                at = (tree * k + place) * 4
                isa.store_f32(beam_scores + at, score)
                isa.store_u32(beam_flat + at, i32(start + me))
                isa.store_u32(beam_tokens + at, token)
                isa.store_u32(beam_rows + at, i32(i32(tree) * rows + node))
                extend(beam_mask + at * words, mask, i32(level * k + place))

    return kernel


def make_count_ahead(isa: Any, *, k: int) -> Any:
    """`count_ahead(key, candidates, me, part)`: how many candidates beat `me`, which is its place: all are distinct.

    A candidate's team counts together. Of equal keys the earlier candidate is ahead: of an earlier four those that are
    as good count, of a later four only what is better; the candidate's own four are looked at once more.
    """
    cuda, i32 = isa.cuda, isa.i32
    team, quads, least = teams(k), -(-k * k // 4), -(1 << 31)
    padded, turns, shift = 4 * quads, -(-quads // team), team.bit_length() - 1

    def count_ahead(key: Any, candidates: Any, me: Any, part: Any) -> Any:
        board = isa.shared_address(cuda.shared.array(padded, i32, alignment=16))
        if me >= candidates:
            key = i32(least)
        if part == 0 and me < padded:
            isa.shared_store_u32(board + me * 4, key)
        # All keys are there.
        cuda.syncthreads()
        place, own = i32(0), i32(me >> 2)
        for turn in range(turns):
            quad = i32(turn * team + part)
            if quad < quads:
                others, bar = isa.shared_load_u32x4(board + quad * 16), key
                if quad >= own:
                    bar = i32(key + 1)
                for i in range(4):
                    place = i32(place + i32(others[i] >= bar))
        if part == 0 and own < quads:
            others = isa.shared_load_u32x4(board + own * 16)
            for i in range(3):
                if others[i] == key and i < (me & 3):
                    place = i32(place + 1)
        # The team's counts; integers, so any order gives the same place.
        for bit in range(shift):
            place = i32(place + isa.shuffle_xor_i32(place, 1 << bit))
        return place

    return isa.inlined(count_ahead)


def make_extend(isa: Any, words: int) -> Any:
    """`extend(address, mask, bit)`: the parent's mask with one bit more."""
    i32 = isa.i32

    def extend(address: Any, mask: Any, bit: Any) -> None:
        for w in range(words):
            word = mask[w]
            if (bit >> 5) == w:
                word = i32(word | (1 << (bit & 31)))
            isa.store_u32(address + w * 4, word)

    return isa.inlined(extend)
