"""How a block describes a tree: relatives by bit planes, ancestors by a walk, paths by the set bits of a leaf's mask.

Source: see `tree_masks`.
"""

from __future__ import annotations

from typing import Any


def make_relatives(isa: Any, nodes: int) -> Any:
    """`relatives(planes, parent, me)`: first child and next sibling of a node, -1 for none.

    Row w of `planes` tells of the 32 nodes from 32 w: word b has bit b of their parents, the next one who has a parent.
    The nodes whose parent is x are then the product of a few words, each as it is or inverted.
    """
    i32 = isa.i32
    words, bits, pitch = -(-nodes // 32), (nodes - 1).bit_length(), plane_pitch(nodes)

    def relatives(planes: Any, parent: Any, me: Any) -> Any:
        child, sibling = i32(-1), i32(-1)
        # This node and those before it: siblings that follow lie beyond.
        upto = i32(i32(1 << (me & 31)) | ((1 << (me & 31)) - 1))
        for w in range(words):
            row = planes + w * (4 * pitch)
            children = siblings = isa.shared_load_u32(row + bits * 4)
            for b in range(bits):
                plane = isa.shared_load_u32(row + b * 4)
                # Bit b of the wanted parent is 1: the plane; else its inverse. What is left after all bits are the
                # nodes of that parent.
                children = i32(children & (plane ^ (((me >> b) & 1) - 1)))
                siblings = i32(siblings & (plane ^ (((parent >> b) & 1) - 1)))
            if (me >> 5) == w:
                siblings = i32(siblings & ~upto)
            elif (me >> 5) > w:
                siblings = i32(0)
            if child < 0 and children != 0:
                child = i32(w * 32 + isa.popcount(i32((children & -children) - 1)))
            if sibling < 0 and parent >= 0 and siblings != 0:
                sibling = i32(w * 32 + isa.popcount(i32((siblings & -siblings) - 1)))
        return child, sibling

    return isa.inlined(relatives)


def plane_pitch(nodes: int) -> int:
    """Words of a row of `relatives`' planes."""
    return (nodes - 1).bit_length() + 1


def make_nth_bit(isa: Any, words: int) -> Any:
    """`nth_bit(row, n)`: the index of set bit n of the shared words at `row`, or -1."""
    i32 = isa.i32

    def nth_bit(row: Any, n: Any) -> Any:
        left, word, index = n, i32(0), i32(-1)
        for w in range(words):
            here = isa.shared_load_u32(row + w * 4)
            held = isa.popcount(here)
            if index < 0 and left < held:
                word, index = here, i32(w * 32)
            elif index < 0:
                left = i32(left - held)
        if index >= 0:
            # Halves of the word by their number of set bits: five steps for any bit.
            for step in (16, 8, 4, 2, 1):
                held = isa.popcount(i32(word & ((1 << step) - 1)))
                if left >= held:
                    left, word, index = i32(left - held), i32(word >> step), i32(index + step)
        return index

    return isa.inlined(nth_bit)


def make_describe(isa: Any, *, nodes: int, path_len: int, threads: int) -> Any:
    """`describe(above, length, tree, mask, ..)`: what `TreeMasks` holds of a tree, by a block of `threads`.

    `above` are the nodes' parents in shared memory. A thread a node walks to the root, another finds its relatives;
    then all write paths. The rest are the outputs' addresses.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    words, pitch = -(-nodes // 32), plane_pitch(nodes)
    node_threads, quads, cells = words * 32, -(-nodes // 4), nodes * path_len
    plane_words, mask_words, reciprocal = words * pitch, nodes * words, (1 << 24) // path_len + 1
    relatives, nth_bit = make_relatives(isa, nodes), make_nth_bit(isa, words)

    def describe(
        above: Any, length: Any, tree: Any, mask: Any, depths: Any, positions: Any, leaves: Any, paths: Any,
        first_child: Any, next_sibling: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        planes = isa.shared_address(cuda.shared.array(plane_words, i32))
        leaf_bits = isa.shared_address(cuda.shared.array(words, i32))
        leaf_masks = isa.shared_address(cuda.shared.array(mask_words, i32))
        own, me, parent = cuda.local.array(words, i32), tid, i32(-2)
        if warp >= words:
            me = i32(tid - node_threads)
        at = (tree * nodes + me) * 4
        if me < nodes and length >= 0:
            parent = isa.shared_load_u32(above + me * 4)
        # The second half of the warps turns the parents into planes.
        if warp >= words and warp < 2 * words:
            kept = i32(0)
            for b in range(pitch):
                bit = i32((parent >> b) & 1)
                if b == pitch - 1:
                    bit = i32(parent >= 0)
                plane = isa.ballot(bit)
                if lane == b:
                    kept = plane
            if lane < pitch:
                isa.shared_store_u32(planes + ((me >> 5) * pitch + lane) * 4, kept)
        # The planes are there.
        cuda.syncthreads()
        for w in range(words):
            own[w] = i32(0)
        if warp < words:
            depth, node, position = i32(-1), me, i32(0)
            # To the root, a bit a node passed; parents come before children, so the walk ends.
            while parent >= -1 and node >= 0:
                depth = i32(depth + 1)
                for w in range(words):
                    if (node >> 5) == w:
                        own[w] = i32(own[w] | (1 << (node & 31)))
                node = isa.shared_load_u32(above + node * 4)
            if me < nodes:
                if depth >= 0:
                    position = i32(length + depth)
                for w in range(words):
                    isa.store_u32(mask + at * words + w * 4, own[w])
                isa.store_u32(depths + at, max(depth, 0))
                isa.store_u32(positions + at, position)
        elif warp < 2 * words:
            child, sibling = relatives(planes, parent, me)
            votes = isa.ballot(i32(parent >= -1 and child < 0))
            if lane == 0:
                isa.shared_store_u32(leaf_bits + (me >> 5) * 4, votes)
            if me < nodes:
                isa.store_u32(first_child + at, child)
                isa.store_u32(next_sibling + at, sibling)
        # Who is a leaf is known to all.
        cuda.syncthreads()
        n_leaves, path_row, is_leaf = i32(0), i32(0), i32(0)
        for w in range(words):
            votes = isa.shared_load_u32(leaf_bits + w * 4)
            if w == warp:
                path_row = i32(n_leaves + isa.popcount(i32(votes & ((1 << lane) - 1))))
                is_leaf = i32((votes >> lane) & 1)
            n_leaves = i32(n_leaves + isa.popcount(votes))
        if is_leaf == 1:
            for w in range(words):
                isa.shared_store_u32(leaf_masks + (path_row * words + w) * 4, own[w])
        if tid < quads:
            votes = i32(isa.shared_load_u32(leaf_bits + (tid >> 3) * 4) >> ((tid & 7) * 4))
            # Four bits to four bytes of one word: leaf marks are a byte each.
            spread = (votes & 1) | ((votes & 2) << 7) | ((votes & 4) << 14) | ((votes & 8) << 21)
            isa.store_u32(leaves + (tree * quads + tid) * 4, spread)
        cuda.syncthreads()
        cell = tid
        while cell < cells:
            # cell / path_len by a product: exact for all cells of a tree of 256 nodes.
            row, node = i32((i64(cell) * reciprocal) >> 24), i32(-1)
            if row < n_leaves:
                node = nth_bit(leaf_masks + row * (4 * words), i32(cell - row * path_len))
            isa.store_u32(paths + (tree * cells + cell) * 4, node)
            cell = i32(cell + threads)

    return isa.inlined(describe)
