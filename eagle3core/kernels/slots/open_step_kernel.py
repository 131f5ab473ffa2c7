"""The kernel of `open_step`: blocks for the tree, for the draft and for the block table, each two loads deep.

A slot is known only once `active` has been read, so its numbers would wait for that; instead a warp reads those of 32
slots beside it, a lane each, and a shuffle picks the slot's. Source: see `open_step`.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.slots.cache_rows import COPIED, THREADS, make_copy_table, make_look_up, make_row_in, parts_of
from eagle3core.kernels.slots.slot_state import DRAFT_LENGTH, LENGTH, MOST_DRAFTS, N_PENDING, PLAIN, ROOT


def step_parts(nodes: int, pending: int, chained: int, entries: int) -> tuple[int, int, int]:
    """Blocks of a row for the nodes, for what the draft reads and for the table."""
    return parts_of(nodes), parts_of(max(pending, chained)) if pending else 0, parts_of(entries, COPIED)


def make_read_slot(isa: Any) -> Any:
    """`read_slot(active, state, row, first, second, n_slots)`: the row's slot and its two fields, one load deep.

    The fields mean nothing where the slot is -1. A slot beyond the first 32 is read once it is known.
    """
    i32 = isa.i32

    def read_slot(active: Any, state: Any, row: Any, first: Any, second: Any, n_slots: Any) -> Any:
        # Three loads that do not wait for each other; whichever slot it is, its fields are then in some lane.
        lane, own_first, own_second = i32(isa.cuda.threadIdx.x & 31), i32(-1), i32(-1)
        slot = isa.load_u32(active + row * 4)
        if lane < n_slots:
            own_first = isa.load_u32(state + (first * n_slots + lane) * 4)
            own_second = isa.load_u32(state + (second * n_slots + lane) * 4)
        one, other = isa.shuffle_i32(own_first, slot & 31), isa.shuffle_i32(own_second, slot & 31)
        if slot >= 32:
            one = isa.load_u32(state + (first * n_slots + slot) * 4)
            other = isa.load_u32(state + (second * n_slots + slot) * 4)
        return slot, one, other

    return isa.inlined(read_slot)


def make_open_step(isa: Any, *, nodes: int, pending: int, levels: int, beam: int, block: int, overlap: bool) -> Any:
    """Grid (parts, rows): see `step_parts`."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    words, (of_nodes, of_draft, _) = -(-nodes // 32), step_parts(nodes, pending, levels * beam, 1)
    chained = levels * beam
    read_slot, copy_table = make_read_slot(isa), make_copy_table(isa)
    look_up, row_in = make_look_up(isa, block), make_row_in(isa, block)

    def kernel(
        active: Any, state: Any, pending_tokens: Any, pending_rows: Any, slot_tables: Any, depths: Any, mask: Any,
        lengths: Any, tables: Any, roots: Any, token_rows: Any, positions: Any, slots: Any, masks: Any,
        entry_lengths: Any, entry_rows: Any, entry_tokens: Any, entry_positions: Any, entry_slots: Any, last_rows: Any,
        chain_lengths: Any, chain_positions: Any, chain_slots: Any, n_slots: Any, entries: Any, batch: Any,
        held: Any,
    ) -> None:  # fmt: skip
        tid, part, row = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        sees = cuda.local.array(words, i32)
        if part < of_nodes:
            t, depth = i32(part * THREADS + tid), i32(0)
            # The tree's shape is the same every step: read before the wait.
            for w in range(words):
                sees[w] = i32(0)
            if t < nodes:
                depth = isa.load_u32(depths + t * 4)
                for w in range(words):
                    sees[w] = isa.load_u32(mask + (t * words + w) * 4)
            if overlap:
                isa.let_next_start()
                isa.wait_previous()
            slot, length, root = read_slot(active, state, row, LENGTH, ROOT, n_slots)
            position, where, plain, most = i32(0), i32(-1), i32(0), i32(0)
            # An empty row: nothing is seen, nothing is written, and lengths of -1 say so to later kernels.
            if slot < 0:
                length, root = i32(-1), i32(-1)
                for w in range(words):
                    sees[w] = i32(0)
            elif t < nodes:
                plain = isa.load_u32(state + (PLAIN * n_slots + slot) * 4)
                most = isa.load_u32(state + (MOST_DRAFTS * n_slots + slot) * 4)
                table = slot_tables + i64(slot) * entries * 4
                position, where = i32(length + depth), row_in(look_up(table, i32(length + t), entries), i32(length + t))
            token_row = i32(t * batch + row)
            # A plain slot's drafts are not even looked at: what they make of the cache may be what went wrong.
            # Nor are those that its request does not use.
            if slot < 0 or (plain != 0 and t > 0) or depth > most:
                token_row = i32(-1)
            if t < nodes:
                isa.store_u32(token_rows + (row * nodes + t) * 4, token_row)
                isa.store_u32(positions + (row * nodes + t) * 4, position)
                isa.store_u32(slots + (row * nodes + t) * 4, where)
                for w in range(words):
                    isa.store_u32(masks + ((row * nodes + t) * words + w) * 4, sees[w])
            if t == 0:
                isa.store_u32(lengths + row * 4, length)
                isa.store_u32(roots + row * 4, root)
        elif part < of_nodes + of_draft:
            t = i32((part - of_nodes) * THREADS + tid)
            if overlap:
                isa.let_next_start()
                isa.wait_previous()
            slot, start, n = read_slot(active, state, row, DRAFT_LENGTH, N_PENDING, n_slots)
            if slot < 0:
                start, n = i32(-1), i32(0)
            # Looked up before any store, so that the loads overlap.
            source, token, own_block, chain_held = i32(-1), i32(0), i32(-1), i32(-1)
            table, place = slot_tables + i64(slot) * entries * 4, i32(start + n + t)
            if t < n and t < pending:
                source = isa.load_u32(pending_rows + (i64(slot) * held + t) * 4)
                token = isa.load_u32(pending_tokens + (i64(slot) * held + t) * 4)
                own_block = look_up(table, i32(start + t), entries)
            if slot >= 0 and t < chained:
                chain_held = look_up(table, place, entries)
            if t < pending:
                at, entry = (row * pending + t) * 4, i32(start + t)
                if t >= n:
                    entry = i32(0)
                isa.store_u32(entry_rows + at, source)
                isa.store_u32(entry_tokens + at, token)
                isa.store_u32(entry_positions + at, entry)
                isa.store_u32(entry_slots + at, row_in(own_block, entry))
            if t < chained:
                # Level by level: a level's rows lie side by side, as its launches read them.
                level = i32(t // beam)
                of_level = i32(level * batch + row)
                at, position = (of_level * beam + t - level * beam) * 4, i32(start + n + level)
                before = position
                if slot < 0:
                    position, before = i32(0), i32(-1)
                if t == level * beam:
                    isa.store_u32(chain_lengths + of_level * 4, before)
                isa.store_u32(chain_positions + at, position)
                isa.store_u32(chain_slots + at, row_in(chain_held, place))
            if t == 0:
                isa.store_u32(entry_lengths + row * 4, start)
                isa.store_u32(last_rows + row * 4, row * pending + max(n - 1, 0))
        else:
            if overlap:
                isa.let_next_start()
                isa.wait_previous()
            slot = isa.load_u32(active + row * 4)
            source = slot_tables + i64(slot) * entries * 4
            copy_table(source, tables + i64(row) * entries * 4, entries, i32(part - of_nodes - of_draft), slot)

    return kernel
