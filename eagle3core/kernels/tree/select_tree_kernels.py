"""The kernel of `select_tree`: blocks rank the candidates, the last one lines the chosen ones up and describes them.

Source: see `select_tree`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.isa.early import make_early
from eagle3core.kernels.isa.last import make_is_last
from eagle3core.kernels.isa.reductions import make_sortable
from eagle3core.kernels.tree.tree_masks_kernel import make_describe

# Three blocks fill a multiprocessor. Of 512 threads four would fit, and the next launch's blocks, which come while this
# one's leave, would then crowd some multiprocessors: 4.1 us instead of 3.8 for sixteen trees.
THREADS = 544
WARPS = THREADS // 32
LEAST_KEY = -(1 << 31)  # below the key of every score


def make_select_tree(isa: Any, *, pool: int, nodes: int, path_len: int, overlap: bool) -> Any:
    """Grid (pool / 32, trees). What the last block needs beside the ranks is asked for before them, by every block."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    blocks, tiles = -(-pool // 32), -(-pool // THREADS)
    rank, line_up = make_rank(isa, pool=pool), make_line_up(isa, pool=pool, nodes=nodes)
    describe = make_describe(isa, nodes=nodes, path_len=path_len, threads=THREADS)
    early, is_last, kept = make_early(isa, THREADS), make_is_last(isa), -(-nodes // 32) * 32

    def kernel(
        scores: Any, tokens: Any, parents: Any, roots: Any, token_rows: Any, lengths: Any, ranks: Any, arrived: Any,
        flat_of: Any, tokens_of: Any, parents_of: Any, mask: Any, depths: Any, positions: Any, leaves: Any, paths: Any,
        first_child: Any, next_sibling: Any,
    ) -> None:  # fmt: skip
        tid, tree, own = i32(cuda.threadIdx.x), i64(cuda.blockIdx.y), i32(cuda.blockIdx.x)
        token, parent = cuda.local.array(tiles, i32), cuda.local.array(tiles, i32)
        above = isa.shared_address(cuda.shared.array(kept, i32))
        first, of_nodes = (tree * pool + tid) * 4, tree * (nodes * 4)
        early((scores + first) ^ tokens ^ parents ^ roots ^ token_rows ^ lengths ^ (ranks + first))
        if overlap:
            isa.wait_previous()
            isa.let_next_start()  # only now: blocks of kernels further on would crowd this one's multiprocessors
        for t in range(tiles):
            token[t], parent[t] = i32(0), i32(-1)
            if t * THREADS + tid < pool:
                token[t] = isa.load_u32(tokens + first + t * (4 * THREADS))
                parent[t] = isa.load_u32(parents + first + t * (4 * THREADS))
        row, root, length = i32(-1), isa.load_u32(roots + tree * 4), isa.load_u32(lengths + tree * 4)
        if tid < nodes:
            row = isa.load_u32(token_rows + of_nodes + tid * 4)
        rank(scores + tree * (pool * 4), ranks + tree * (pool * 4), own, tid)
        if is_last(arrived + tree * 4, i32(blocks), tid) == 0:
            return
        line_up(
            ranks + first, token, parent, row, root, above, flat_of + of_nodes, tokens_of + of_nodes,
            parents_of + of_nodes, tid,
        )  # fmt: skip
        # The nodes' parents are there.
        cuda.syncthreads()
        describe(above, length, tree, mask, depths, positions, leaves, paths, first_child, next_sibling)

    return kernel


def make_rank(isa: Any, *, pool: int) -> Any:
    """`rank(scores, ranks, own, tid)`: of the candidates 32 `own`.. of a pool how many are ahead of each, to `ranks`.

    A lane a candidate, each of 17 warps compares it with some of the pool's 32s. Scores become integers: all of an
    earlier 32 that are as good are ahead, of a later 32 only what is better, so that one comparison serves; equal ones
    in the candidate's own 32 are added by one warp.
    """
    cuda, i32 = isa.cuda, isa.i32
    tiles, threads, warps = -(-pool // 32), THREADS, WARPS
    padded, turns, loads = tiles * 32, -(-tiles // warps), -(-pool // threads)
    sortable, zero = make_sortable(isa), np.float32(0)

    def rank(scores: Any, ranks: Any, own: Any, tid: Any) -> None:
        lane, warp = i32(tid & 31), i32(tid >> 5)
        keys, ahead = cuda.local.array(loads, i32), cuda.local.array(2, i32)
        board = isa.shared_address(cuda.shared.array(padded, i32, alignment=16))
        counts = isa.shared_address(cuda.shared.array(threads, i32))
        for p in range(loads):
            keys[p] = i32(LEAST_KEY)
            if p * threads + tid < pool:  # zero makes -0 the +0 it equals
                keys[p] = sortable(isa.load_f32(scores + (p * threads + tid) * 4) + zero)
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
            total = i32(0)
            for w in range(warps):
                total = i32(total + isa.shared_load_u32(counts + (w * 32 + lane) * 4))
            isa.store_u32(ranks + (own * 32 + lane) * 4, total)

    return isa.inlined(rank)


def make_line_up(isa: Any, *, pool: int, nodes: int) -> Any:
    """`line_up(ranks, token, parent, row, root, above, ..., tid)`: a candidate's node index is one more than the number
    of chosen ones before it.

    `ranks` is the address of the thread's first candidate's rank, `token` and `parent` are of its candidates, `row` of
    the node `tid` whether it is to have a token. Parents go to the shared words `above` too, -1 for the root.
    """
    cuda, i32 = isa.cuda, isa.i32
    tiles = -(-pool // THREADS)
    words, per_lane = tiles * WARPS, -(-tiles * WARPS // 32)
    place, count_before = make_place(isa), make_count_before(isa, words, per_lane)

    def line_up(
        ranks: Any, token: Any, parent: Any, row: Any, root: Any, above: Any, flat_of: Any, tokens_of: Any,
        parents_of: Any, tid: Any,
    ) -> None:  # fmt: skip
        lane, warp = i32(tid & 31), i32(tid >> 5)
        chosen = cuda.local.array(tiles, i32)
        bits = isa.shared_address(cuda.shared.array(words, i32))
        before = isa.shared_address(cuda.shared.array(words, i32))
        held = isa.shared_address(cuda.shared.array(nodes, i32))
        for t in range(tiles):  # all loads first: their latencies overlap
            chosen[t] = i32(nodes)
            if t * THREADS + tid < pool:
                chosen[t] = isa.load_u32(ranks + t * (4 * THREADS))
        for t in range(tiles):
            chosen[t] = i32(chosen[t] < nodes - 1)
            word = isa.ballot(chosen[t])
            if lane == 0:
                isa.shared_store_u32(bits + (t * WARPS + warp) * 4, word)
        if tid < nodes:
            isa.shared_store_u32(held + tid * 4, row)
        # The chosen ones' bits are there, and whether a node is to have a token.
        cuda.syncthreads()
        if warp == 0:
            count_before(bits, before, lane)
        cuda.syncthreads()
        for t in range(tiles):
            if chosen[t] == 1:
                flat = i32(t * THREADS + tid)
                node, parent_node = place(bits, before, flat), i32(0)
                if isa.shared_load_u32(held + node * 4) < 0:
                    token[t] = i32(-1)
                if parent[t] >= 0:
                    parent_node = place(bits, before, parent[t])
                isa.shared_store_u32(above + node * 4, parent_node)
                isa.store_u32(flat_of + node * 4, flat)
                isa.store_u32(tokens_of + node * 4, token[t])
                isa.store_u32(parents_of + node * 4, parent_node)
        if tid == 0:
            if row < 0:
                root = i32(-1)
            isa.shared_store_u32(above, -1)
            isa.store_u32(flat_of, -1)
            isa.store_u32(tokens_of, root)
            isa.store_u32(parents_of, -1)

    return isa.inlined(line_up)


def make_place(isa: Any) -> Any:
    """`place(bits, before, flat)`: the node index of a chosen candidate."""
    i32 = isa.i32

    def place(bits: Any, before: Any, flat: Any) -> Any:
        word = flat >> 5
        below = isa.shared_load_u32(bits + word * 4) & ((1 << (flat & 31)) - 1)
        return i32(isa.shared_load_u32(before + word * 4) + isa.popcount(i32(below)) + 1)

    return isa.inlined(place)


def make_count_before(isa: Any, words: int, per_lane: int) -> Any:
    """`count_before(bits, before, lane)`: a warp leaves the set bits before each of the shared words at `bits`."""
    i32 = isa.i32

    def count_before(bits: Any, before: Any, lane: Any) -> None:
        running = i32(0)
        for p in range(per_lane):  # 32 words at a time, by a scan over the lanes
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

    return isa.inlined(count_before)
