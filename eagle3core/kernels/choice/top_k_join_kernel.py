"""The second kernel of `top_k`: a block a row finds the k best in the few groups that can hold them.

A logit has sixteen bits, so its value and its place fit one integer that orders as top-k does: the larger value, then
the lower place. The k best elements of a row lie in its k best groups of columns, equal groups being ordered by their
columns, and are no less than the k-th group's best. So only those few groups are read again, from L2.
Source: see `top_k`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.choice.top_k_keys import GROUP, LOG2_E, LOWEST, SEEKERS, make_key_value, make_value_key
from eagle3core.kernels.isa.early import make_early
from eagle3core.kernels.isa.reductions import make_add_log, make_warp_sum

SUMMERS = 4  # warps that add up the sums
JOIN_THREADS = 32 * (SEEKERS + SUMMERS)
_SEEK, _SUM = 1, 2  # the seekers' barrier, the summers'
_NOTHING = -(1 << 31)  # below every key
_LAST = 0xFFFF  # the lower half of a key is this less the place


def make_join_sums(isa: Any, *, groups: int, held: int) -> Any:
    """`join_sums(tops, scratch, part, lane)`: log sum exp of a row, in every lane of the summers, `part` of them.

    Lane l of part s adds up groups (p * 4 + s) * 32 + l; the parts are added in order. `scratch` holds eight words.
    What rounding the largest * LOG2_E left in the sums is taken out at the end, where it is exact.
    """
    add_log, warp_sum, stride = make_add_log(isa), make_warp_sum(isa), 32 * held
    per_lane, zero, lowest, log2_e = -(-groups // (32 * SUMMERS)), np.float32(0), np.float32(LOWEST), np.float32(LOG2_E)

    def join_sums(tops: Any, scratch: Any, part: Any, lane: Any) -> Any:
        i32, i64, f32 = isa.i32, isa.i64, isa.f32
        own, totals = isa.cuda.local.array(per_lane, f32), isa.cuda.local.array(per_lane, f32)
        largest, total = lowest, zero
        for p in range(per_lane):
            own[p], totals[p] = lowest, zero
            group = i32((p * SUMMERS + part) * 32 + lane)
            if group < groups:
                slot = i32((group & (SEEKERS - 1)) * stride + (group >> 4))
                own[p], totals[p] = isa.load_f32x2(tops + i64(slot) * 8)
        for p in range(per_lane):
            own[p] = isa.maximum(own[p], lowest)
            largest = isa.maximum(largest, own[p])
        for step in range(5):
            largest = isa.maximum(largest, isa.shuffle_xor_f32(largest, 1 << step))
        scale = isa.product(largest, log2_e)
        for p in range(per_lane):
            total = total + totals[p] * isa.exp2(isa.product(own[p], log2_e) - scale)
        total = warp_sum(total)
        if lane == 0:
            isa.shared_store_f32x2(scratch + part * 8, largest, total)
        # Of the summers alone: the seekers have barriers of their own and are not waited for.
        isa.named_barrier(_SUM, 32 * SUMMERS)
        largest, total = lowest, zero
        for s in range(SUMMERS):
            largest = isa.maximum(largest, isa.shared_load_f32(scratch + s * 8))
        scale = isa.product(largest, log2_e)
        for s in range(SUMMERS):
            share = isa.exp2(isa.product(isa.shared_load_f32(scratch + s * 8), log2_e) - scale)
            total = total + isa.shared_load_f32(scratch + (s * 8 + 4)) * share
        return add_log(largest, total, isa.fused(largest, log2_e, -scale))

    return isa.inlined(join_sums)


def make_choose_groups(isa: Any, *, k: int, held: int) -> Any:
    """`choose_groups(keys, board, listed, chosen, warp, lane)`: the k best groups of a row, best first, in `chosen`.

    `keys[p]` of a lane is the key of its p-th group. The k-th best of the warps' best is a bar that at least k groups
    clear; each warp lists its own that do, the k best if there are more, and the listed are ranked. No barrier follows.
    """
    i32, per_lane, seekers = isa.i32, -(-SEEKERS * k // 32), 32 * SEEKERS

    def choose_groups(keys: Any, board: Any, listed: Any, chosen: Any, warp: Any, lane: Any) -> None:
        others, below = isa.cuda.local.array(per_lane, i32), i32((1 << lane) - 1)
        if lane < k:
            isa.shared_store_u32(listed + (warp * k + lane) * 4, _NOTHING)
        best = keys[0]
        for p in range(1, held):
            best = i32(max(best, keys[p]))
        best = isa.warp_max_i32(best)
        if lane == 0:
            isa.shared_store_u32(board + warp * 4, best)
        # All warps' best are on the board.
        isa.named_barrier(_SEEK, seekers)
        other = isa.shared_load_u32(board + (lane & (SEEKERS - 1)) * 4)
        # The board is read twice over by 32 lanes: the lower half of the votes counts. No two keys are equal, so
        # exactly one warp has k - 1 ahead of its own.
        if isa.popcount(isa.ballot(i32(other > best)) & 0xFFFF) == k - 1 and lane == 0:
            isa.shared_store_u32(board + SEEKERS * 4, best)
        # The bar is there.
        isa.named_barrier(_SEEK, seekers)
        bar, count, mine = isa.shared_load_u32(board + SEEKERS * 4), i32(0), i32(_NOTHING)
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
        isa.named_barrier(_SEEK, seekers)
        if lane < count:
            mine = isa.shared_load_u32(listed + (warp * k + lane) * 4)
        if count > 0:
            for e in range(per_lane):
                others[e] = i32(_NOTHING)
                if e * 32 + lane < SEEKERS * k:
                    others[e] = isa.shared_load_u32(listed + (e * 32 + lane) * 4)
            for n in range(count):
                key, ahead = isa.shuffle_i32(mine, n), i32(0)
                for e in range(per_lane):
                    ahead = i32(ahead + isa.popcount(isa.ballot(i32(others[e] > key))))
                if lane == 0 and ahead < k:
                    isa.shared_store_u32(chosen + ahead * 4, key)

    return isa.inlined(choose_groups)


def make_read_group(isa: Any, *, dtype: str, k: int) -> Any:
    """`read_group(row_start, n_columns, group, base, floor, lane)`: a group's k best, none below `floor`; how many.

    Lane r gets the r-th best as a value key that holds `base` + the place in the group.
    """
    i32, i64, low, high, value_key = isa.i32, isa.i64, isa.LOW[dtype], isa.HIGH[dtype], make_value_key(isa, dtype)

    def read_group(row_start: Any, n_columns: Any, group: Any, base: Any, floor: Any, lane: Any) -> Any:
        found, place = isa.cuda.local.array(8, i32), i32(base + lane * 8)
        for i in range(8):
            found[i] = i32(_NOTHING)
        column = i32(group * GROUP + lane * 8)
        if column < n_columns:
            words = isa.load_u32x4(row_start + i64(column) * 2)
            for i in range(4):
                found[2 * i] = i32(value_key(low(words[i])) + (_LAST - 2 * i - place))
                found[2 * i + 1] = i32(value_key(high(words[i])) + (_LAST - 2 * i - 1 - place))
        own, kept, count = found[0], i32(_NOTHING), i32(0)
        for i in range(1, 8):
            own = i32(max(own, found[i]))
        top = isa.warp_max_i32(own)
        # At most k rounds: each takes the group's best below the one before.
        while top >= floor and top != _NOTHING and count < k:
            if lane == count:
                kept = top
            own = i32(_NOTHING)
            for i in range(8):  # the next best of this lane
                if found[i] < top:
                    own = i32(max(own, found[i]))
            count = i32(count + 1)
            top = isa.warp_max_i32(own)
        return kept, count

    return isa.inlined(read_group)


def make_top_k_join(isa: Any, *, dtype: str, k: int, groups: int, held: int, overlap: bool) -> Any:
    """A block a row: its warps choose the best groups, read one each and rank what they find; four add up the sums.

    Where a row's columns fit the lower half of a key, keys hold them, so no two are equal; else columns lie beside.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    choose_groups, read_group = make_choose_groups(isa, k=k, held=held), make_read_group(isa, dtype=dtype, k=k)
    value_key, key_value = make_value_key(isa, dtype), make_key_value(isa, dtype)
    early, join_sums = make_early(isa, JOIN_THREADS), make_join_sums(isa, groups=groups, held=held)
    per_lane, is_whole = -(-k * k // 32), groups * GROUP <= _LAST + 1
    zero, stride, seekers = np.float32(0), 32 * held, 32 * SEEKERS
    board_words, listed_words, found_words, part_words = SEEKERS + 1, SEEKERS * k, k * k, 2 * SUMMERS

    def kernel(logits: Any, tops: Any, log_probs: Any, ids: Any, lse: Any, n_columns: Any) -> None:
        tid, row = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        own = cuda.local.array(held, i32)
        others, others_at = cuda.local.array(per_lane, i32), cuda.local.array(per_lane, i32)
        board = isa.shared_address(cuda.shared.array(board_words, i32))
        listed = isa.shared_address(cuda.shared.array(listed_words, i32))
        chosen = isa.shared_address(cuda.shared.array(k, i32))
        values = isa.shared_address(cuda.shared.array(found_words, i32))
        columns = isa.shared_address(cuda.shared.array(found_words, i32))
        parts = isa.shared_address(cuda.shared.array(part_words, isa.f32, alignment=8))
        whole = isa.shared_address(cuda.shared.array(1, isa.f32))
        tops += row * (SEEKERS * stride * 8)
        first = tops + i64(i32(warp * stride + lane)) * 8
        early(first ^ (logits + row * n_columns))
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        count, value, column = i32(0), i32(_NOTHING), i32(0)
        if warp < SEEKERS:
            for p in range(held):
                group = i32((p * 32 + lane) * SEEKERS + warp)
                # A group past the last has a key of its own too, below every real one.
                own[p] = i32(_NOTHING + (_LAST - group))
                if group < groups:
                    top = isa.load_f32(first + p * 256)
                    own[p] = i32(value_key(top) + (_LAST - group))
            choose_groups(own, board, listed, chosen, warp, lane)
            isa.named_barrier(_SEEK, seekers)
            if warp < k:
                group = i32(_LAST - (isa.shared_load_u32(chosen + warp * 4) & _LAST))
                floor = i32(isa.shared_load_u32(chosen + (k - 1) * 4) & -65536)
                base, row_start = i32(0), logits + row * n_columns * 2
                if is_whole:
                    base = i32(group * GROUP)
                value, count = read_group(row_start, n_columns, group, base, floor, lane)
                if not is_whole:
                    value, column = i32(value & -65536), i32(group * GROUP + (_LAST - (value & _LAST)))
                if lane < k:
                    isa.shared_store_u32(values + (warp * k + lane) * 4, value)
                    if not is_whole:
                        isa.shared_store_u32(columns + (warp * k + lane) * 4, column)
        else:
            normaliser = join_sums(tops, parts, i32(warp - SEEKERS), lane)
            if tid == seekers:
                isa.shared_store_f32(whole, normaliser)
                isa.store_f32(lse + row * 4, normaliser)
        # Here seekers and summers meet, once.
        cuda.syncthreads()
        if count > 0:
            normaliser = isa.shared_load_f32(whole)
            for e in range(per_lane):
                others[e], others_at[e] = i32(_NOTHING), i32(0)
                if e * 32 + lane < found_words:
                    others[e] = isa.shared_load_u32(values + (e * 32 + lane) * 4)
                    if not is_whole:
                        others_at[e] = isa.shared_load_u32(columns + (e * 32 + lane) * 4)
            # A candidate's place is the number of candidates ahead of it: no sorting, and no two write one place.
            for n in range(count):
                mine, ahead = isa.shuffle_i32(value, n), i32(0)
                mine_at = i32(_LAST - (mine & _LAST))
                if not is_whole:
                    mine_at = isa.shuffle_i32(column, n)
                for e in range(per_lane):
                    is_ahead = i32(others[e] > mine)
                    if not is_whole:
                        is_ahead = is_ahead | (i32(others[e] == mine) & i32(others_at[e] < mine_at))
                    ahead = i32(ahead + isa.popcount(isa.ballot(is_ahead)))
                if lane == 0 and ahead < k:
                    at = (row * k + ahead) * 4
                    isa.store_f32(log_probs + at, isa.minimum(key_value(mine) - normaliser, zero))
                    isa.store_u32(ids + at, mine_at)

    return kernel
