"""The two kernels of `select_tree`: ranks of the candidates; then the chosen ones, in order. Source: `select_tree`."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.isa.early import make_early
from eagle3core.kernels.isa.reductions import make_sortable

THREADS = 256
# Three blocks fill a multiprocessor. Of 512 threads four would fit, and the next launch's blocks, which come while this
# one's leave, would then crowd some multiprocessors: 4.1 us instead of 3.8 for sixteen trees.
RANK_THREADS = 544
LEAST_KEY = -(1 << 31)  # below the key of every score


def make_rank_pool(isa: Any, *, pool: int, overlap: bool) -> Any:
    """Grid (pool / 32, trees): a lane a candidate, each of 17 warps compares it with some of the pool's 32s.

    Scores become integers: all of an earlier 32 that are as good are ahead, of a later 32 only what is better, so that
    one comparison serves; equal ones in the candidate's own 32 are added by one warp.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    tiles, threads, warps = -(-pool // 32), RANK_THREADS, RANK_THREADS // 32
    padded, turns, loads = tiles * 32, -(-tiles // warps), -(-pool // threads)
    sortable, early, zero = make_sortable(isa), make_early(isa, threads), np.float32(0)

    def kernel(scores: Any, ranks: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        tree, own = i64(cuda.blockIdx.y), i32(cuda.blockIdx.x)
        keys, ahead = cuda.local.array(loads, i32), cuda.local.array(2, i32)
        board = isa.shared_address(cuda.shared.array(padded, i32, alignment=16))
        counts = isa.shared_address(cuda.shared.array(threads, i32))
        start = scores + (tree * pool + tid) * 4
        early(start)
        if overlap:
            isa.wait_previous()
            isa.let_next_start()  # only now: see `choice.top_k_kernel`
        for p in range(loads):
            keys[p] = i32(LEAST_KEY)
            if p * threads + tid < pool:
                keys[p] = sortable(isa.load_f32(start + p * (4 * threads)) + zero)  # zero makes -0 the +0 it equals
        for p in range(loads):
            if p * threads + tid < padded:
                isa.shared_store_u32(board + (p * threads + tid) * 4, keys[p])
        cuda.syncthreads()
        me = isa.shared_load_u32(board + (own * 32 + lane) * 4)
        ahead[0], ahead[1] = i32(0), i32(0)
        for turn in range(turns):
            tile = i32(turn * warps + warp)
            if tile < tiles:
                # `>= me` before its own 32, `> me` from there on, by one comparison.
                bar = i32(me + i32(tile >= own))
                for quad in range(8):
                    others = isa.shared_load_u32x4(board + tile * 128 + quad * 16)
                    for i in range(4):
                        if others[i] >= bar:
                            ahead[i & 1] = i32(ahead[i & 1] + 1)
        if warp == warps - 1:  # it has the fewest turns
            for quad in range(8):
                others = isa.shared_load_u32x4(board + own * 128 + quad * 16)
                for i in range(4):
                    if others[i] == me and quad * 4 + i < lane:
                        ahead[i & 1] = i32(ahead[i & 1] + 1)
        isa.shared_store_u32(counts + tid * 4, i32(ahead[0] + ahead[1]))
        cuda.syncthreads()
        if warp == 0 and own * 32 + lane < pool:
            # Counts of 17 warps; integers, so any order gives the same rank.
            rank = i32(0)
            for w in range(warps):
                rank = i32(rank + isa.shared_load_u32(counts + (w * 32 + lane) * 4))
            isa.store_u32(ranks + (tree * pool + own * 32 + lane) * 4, rank)

    return kernel


def make_line_up(isa: Any, *, pool: int, nodes: int, overlap: bool) -> Any:
    """A block a tree: a candidate's node index is one more than the number of chosen ones before it."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    tiles = -(-pool // THREADS)
    words, per_lane, early = tiles * 8, -(-tiles * 8 // 32), make_early(isa, THREADS)
    node_turns = -(-nodes // THREADS)

    def place(bits: Any, before: Any, flat: Any) -> Any:
        word = flat >> 5
        below = isa.shared_load_u32(bits + word * 4) & ((1 << (flat & 31)) - 1)
        return i32(isa.shared_load_u32(before + word * 4) + isa.popcount(i32(below)) + 1)

    place = isa.inlined(place)

    def kernel(
        ranks: Any, tokens: Any, parents: Any, roots: Any, token_rows: Any, flat_of: Any, tokens_of: Any,
        parents_of: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        tree = i64(cuda.blockIdx.x)
        token, parent = cuda.local.array(tiles, i32), cuda.local.array(tiles, i32)
        chosen = cuda.local.array(tiles, i32)
        bits = isa.shared_address(cuda.shared.array(words, i32))
        before = isa.shared_address(cuda.shared.array(words, i32))
        held = isa.shared_address(cuda.shared.array(nodes, i32))
        row = cuda.local.array(node_turns, i32)
        early((ranks + (tree * pool + tid) * 4) ^ tokens ^ parents ^ roots ^ token_rows)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        for t in range(tiles):  # all loads first: their latencies overlap
            flat = i32(t * THREADS + tid)
            token[t], parent[t], chosen[t] = i32(0), i32(-1), i32(nodes)
            if flat < pool:
                at = (tree * pool + flat) * 4
                chosen[t], token[t] = isa.load_u32(ranks + at), isa.load_u32(tokens + at)
                parent[t] = isa.load_u32(parents + at)
        for n in range(node_turns):
            row[n] = i32(-1)
            if n * THREADS + tid < nodes:
                row[n] = isa.load_u32(token_rows + (tree * nodes + n * THREADS + tid) * 4)
        root = i32(0)
        if tid == 0:
            root = isa.load_u32(roots + tree * 4)
        for t in range(tiles):
            chosen[t] = i32(chosen[t] < nodes - 1)
            word = isa.ballot(chosen[t])
            if lane == 0:
                isa.shared_store_u32(bits + (t * 8 + warp) * 4, word)
        for n in range(node_turns):
            if n * THREADS + tid < nodes:
                isa.shared_store_u32(held + (n * THREADS + tid) * 4, row[n])
        # The chosen ones' bits are there, and whether a node is to have a token.
        cuda.syncthreads()
        if warp == 0:
            # Set bits before each word, 32 words at a time, by a scan over the lanes.
            running = i32(0)
            for p in range(per_lane):
                own = i32(0)
                if p * 32 + lane < words:
                    own = isa.popcount(isa.shared_load_u32(bits + (p * 32 + lane) * 4))
                upto = own
                for step in range(5):
                    lower = isa.shuffle_i32(upto, max(lane - (1 << step), 0))
                    if lane >= (1 << step):
                        upto = i32(upto + lower)
                if p * 32 + lane < words:
                    isa.shared_store_u32(before + (p * 32 + lane) * 4, i32(running + upto - own))
                running = i32(running + isa.shuffle_i32(upto, 31))
        cuda.syncthreads()
        for t in range(tiles):
            if chosen[t] == 1:
                flat = i32(t * THREADS + tid)
                node, above = place(bits, before, flat), i32(0)
                at, chosen_token = (tree * nodes + node) * 4, token[t]
                if isa.shared_load_u32(held + node * 4) < 0:
                    chosen_token = i32(-1)
                if parent[t] >= 0:
                    above = place(bits, before, parent[t])
                isa.store_u32(flat_of + at, flat)
                isa.store_u32(tokens_of + at, chosen_token)
                isa.store_u32(parents_of + at, above)
        if tid == 0:
            if row[0] < 0:
                root = i32(-1)
            isa.store_u32(flat_of + tree * nodes * 4, -1)
            isa.store_u32(tokens_of + tree * nodes * 4, root)
            isa.store_u32(parents_of + tree * nodes * 4, -1)

    return kernel
