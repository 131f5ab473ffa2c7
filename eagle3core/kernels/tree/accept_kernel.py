"""The kernel of `accept`: a block a sequence, a thread a node, ancestors as mask words. Source: see `accept`."""

from __future__ import annotations

from typing import Any


def make_accept(isa: Any, *, nodes: int, path_len: int, overlap: bool) -> Any:
    """A thread a node: it is accepted when the words of nodes that match contain all of its ancestors."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    words = -(-nodes // 32)
    threads = words * 32

    def kernel(
        node_tokens: Any, choices: Any, parents: Any, depths: Any, mask: Any, ends: Any, n_accepted: Any,
        n_committed: Any, path: Any, tokens: Any, bonus: Any, stop: Any, n_ends: Any,
    ) -> None:  # fmt: skip
        me = i32(cuda.threadIdx.x)
        sequence = i64(cuda.blockIdx.x)
        chosen = isa.shared_address(cuda.shared.array(threads, i32))
        matches = isa.shared_address(cuda.shared.array(words, i32))
        deepest = isa.shared_address(cuda.shared.array(words, i32))
        kept = isa.shared_address(cuda.shared.array(words, i32))
        stops = isa.shared_address(cuda.shared.array(words, i32))
        # A node's ancestors and itself, a bit each, in registers.
        own = cuda.local.array(words, i32)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        token, choice, parent, depth = i32(-1), i32(-1), i32(-1), i32(0)
        for w in range(words):
            own[w] = i32(0)
        if me < nodes:
            at = (sequence * nodes + me) * 4
            token, choice = isa.load_u32(node_tokens + at), isa.load_u32(choices + at)
            parent, depth = isa.load_u32(parents + at), isa.load_u32(depths + at)
            for w in range(words):
                own[w] = isa.load_u32(mask + at * words + w * 4)
        # What the target chose after each node: children compare with their parent's.
        isa.shared_store_u32(chosen + me * 4, choice)
        # All choices are there.
        cuda.syncthreads()
        is_match = i32(0)
        # The root is what the last step committed: it always matches.
        if me == 0:
            is_match = i32(1)
        if me < nodes and parent >= 0 and isa.shared_load_u32(chosen + max(parent, 0) * 4) == token:
            is_match = i32(1)
        word = isa.ballot(is_match)
        if (me & 31) == 0:
            isa.shared_store_u32(matches + (me >> 5) * 4, word)
        # All words of matches are there; an ancestor that does not match is a bit of `missing`.
        cuda.syncthreads()
        missing, is_alive = i32(0), i32(0)
        for w in range(words):
            missing = i32(missing | (own[w] & ~isa.shared_load_u32(matches + w * 4)))
            is_alive = i32(is_alive | own[w])
        # Of several deepest nodes, which only equal siblings can give, the earliest wins.
        key = i32(-1)
        if missing == 0 and is_alive != 0:
            # Depth first, then the earlier node: at most 256 nodes, so both fit.
            key = i32(depth * 256 + (255 - me))
        key = isa.warp_max_i32(key)
        if (me & 31) == 0:
            isa.shared_store_u32(deepest + (me >> 5) * 4, key)
        cuda.syncthreads()
        for w in range(words):
            key = max(key, isa.shared_load_u32(deepest + w * 4))
        last, accepted = i32(255 - (key & 255)), i32(key >> 8)
        if me == last and key >= 0:
            for w in range(words):
                isa.shared_store_u32(kept + w * 4, own[w])
        elif me == 0 and key < 0:
            for w in range(words):
                isa.shared_store_u32(kept + w * 4, 0)
        cuda.syncthreads()
        row = sequence * path_len * 4
        # A node's place on the path is the number of its ancestors: the kept bits before its own, as parents come
        # before children.
        place, is_kept = i32(0), i32(0)
        for w in range(words):
            word = isa.shared_load_u32(kept + w * 4)
            if w < (me >> 5):
                place = i32(place + isa.popcount(word))
            elif w == (me >> 5):
                place = i32(place + isa.popcount(i32(word & ((1 << (me & 31)) - 1))))
                is_kept = i32((word >> (me & 31)) & 1)
        ending = i32(0x7FFFFFFF)
        if is_kept == 1:
            if place < path_len:
                isa.store_u32(path + row + place * 4, me)
            if place > 0 and place <= path_len:
                isa.store_u32(tokens + row + (place - 1) * 4, token)
            if me == last and accepted < path_len:
                isa.store_u32(tokens + row + accepted * 4, choice)
            for e in range(n_ends):
                end = isa.load_u32(ends + e * 4)
                if end == token and place > 0:
                    ending = min(ending, i32(place - 1))
                if end == choice and me == last:
                    ending = min(ending, accepted)
        # What the path does not reach: threads write the tail together, each its own entries.
        p = me
        while p < path_len:
            if key < 0 or p > accepted:
                isa.store_u32(path + row + p * 4, -1)
                isa.store_u32(tokens + row + p * 4, -1)
            p = i32(p + threads)
        # The first of several end tokens counts.
        ending = isa.warp_min_i32(ending)
        if (me & 31) == 0:
            isa.shared_store_u32(stops + (me >> 5) * 4, ending)
        cuda.syncthreads()
        if me == 0:
            for w in range(words):
                ending = min(ending, isa.shared_load_u32(stops + w * 4))
            if ending == 0x7FFFFFFF:
                ending = i32(-1)
            isa.store_u32(n_accepted + sequence * 4, max(accepted, 0))
            isa.store_u32(n_committed + sequence * 4, accepted + 1)
            isa.store_u32(stop + sequence * 4, ending)
            added = i32(-1)
            if key >= 0:
                added = isa.shared_load_u32(chosen + last * 4)
            isa.store_u32(bonus + sequence * 4, added)

    return kernel
