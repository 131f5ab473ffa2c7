"""The kernel of `commit`: a warp a row, whose lanes look for end tokens and write the row. Source: see `commit`."""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.slots.slot_state import (
    BAD_ACCEPTANCE,
    BUDGET,
    DRAFT_LENGTH,
    FOUND_END,
    LENGTH,
    MISSING_BLOCKS,
    MOST_DRAFTS,
    MOST_ENDS,
    N_PENDING,
    N_RESULT,
    NO_CHOICE_LEFT,
    NO_ROOM,
    NOT_FINITE,
    PLAIN,
    REQUEST_ID,
    ROOT,
    RUNNING,
    SPENT_BUDGET,
    STOPPED,
    result_width,
)

THREADS = 32


def make_commit(isa: Any, *, nodes: int, path_len: int, pending: int, n_kept: int, unread: bool, overlap: bool) -> Any:
    """A warp a row; lane e looks for end token e."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    n_told = result_width(path_len, nodes)

    def kernel(
        active: Any, n_accepted: Any, path: Any, tokens: Any, choices: Any, node_tokens: Any, places: Any, ends: Any,
        state: Any, pending_tokens: Any, pending_rows: Any, kept: Any, turn: Any, results: Any, n_slots: Any,
        width: Any, first_kept: Any,
    ) -> None:  # fmt: skip
        lane, row = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        # Results go to a block of a few that are used in turn: the host reads one step behind.
        slot, block = isa.load_u32(active + row * 4), isa.load_u32(turn)
        out = results + i64(i32(block * n_slots) + row) * width * 4
        # An empty row says so all over, so that nothing of an earlier step is taken for its result.
        if slot < 0:
            at = lane
            while at < n_told:
                isa.store_u32(out + at * 4, -1)
                at = i32(at + THREADS)
            if lane == 0:
                isa.store_u32(kept + row * 4, 0)
        else:
            fields, pitch = state + slot * 4, i64(n_slots) * 4
            # All that depends on the slot is asked for at once, before the first use.
            n, choice = isa.load_u32(n_accepted + row * 4), isa.load_u32(choices + row * (nodes * 4))
            budget, plain = isa.load_u32(fields + BUDGET * pitch), isa.load_u32(fields + PLAIN * pitch)
            length, start = isa.load_u32(fields + LENGTH * pitch), isa.load_u32(fields + DRAFT_LENGTH * pitch)
            n_pending, request_id = isa.load_u32(fields + N_PENDING * pitch), isa.load_u32(fields + REQUEST_ID * pitch)
            most = isa.load_u32(fields + MOST_DRAFTS * pitch)
            end = isa.load_u32(ends + (i64(slot) * MOST_ENDS + lane) * 4)
            root_place, is_missing = isa.load_u32(places + row * (nodes * 4)), i32(0)
            at = lane
            while at < nodes:
                if isa.load_u32(places + (row * nodes + at) * 4) < 0:
                    is_missing = i32(1)
                at = i32(at + THREADS)
            fault = i32(0)
            # A fault keeps the request alive at the price of speculation: it commits the target's own token, plainly
            # from now on.
            if n < 0 or n >= path_len:
                fault = i32(BAD_ACCEPTANCE)
            if isa.any_lane(is_missing):
                fault = i32(fault | MISSING_BLOCKS)
            if root_place < 0:
                fault = i32(fault | NO_ROOM)
            if fault != 0:
                plain = i32(1)
            if plain != 0:
                n = i32(0)
            # The target's choice behind the last draft that its request uses is as good a bonus.
            n = i32(min(n, most))
            # How many tokens in a row the target did choose; all lanes count alike.
            n_chosen = i32(n + 1)
            for t in range(path_len):
                token = choice
                if plain == 0:
                    token = isa.load_u32(tokens + (row * path_len + t) * 4)
                if t < n_chosen and token < 0:
                    n_chosen = i32(t)
            is_short, is_plain_now = i32(0), plain
            if n_chosen <= n:
                n = i32(n_chosen - 1)
                if plain == 0 and nodes > 1:
                    # A drafted row may be to blame: the rest is done once more without them.
                    fault, is_plain_now = i32(fault | NOT_FINITE), i32(1)
                else:
                    is_short = i32(1)
            cut, finish, root = i32(n + 1), i32(0), choice
            # Token by token for the whole warp, each lane with an end token of its own; the first hit cuts.
            for t in range(path_len):
                token = choice
                if plain == 0:
                    token = isa.load_u32(tokens + (row * path_len + t) * 4)
                is_end = i32(0)
                if t <= n and token >= 0 and token == end:
                    is_end = i32(1)
                if isa.any_lane(is_end) and finish == 0:
                    cut, finish = i32(t + 1), i32(FOUND_END)
                if t == n:
                    root = token
            # An end token exactly at the budget's end is an end token.
            if cut > budget or (cut == budget and finish == 0):
                cut, finish = budget, i32(SPENT_BUDGET)
            if is_short != 0 and finish == 0:
                finish = i32(NO_CHOICE_LEFT)
            # Not even the root has a place in the cache: nothing can be committed.
            if (fault & NO_ROOM) != 0:
                cut, finish = i32(0), i32(STOPPED)
            at = lane
            while at < path_len:
                token, node = i32(-1), i32(0)
                if at <= n:
                    token = choice
                    if plain == 0:
                        token = isa.load_u32(tokens + (row * path_len + at) * 4)
                        node = isa.load_u32(path + (row * path_len + at) * 4)
                    # A step without drafts keeps its states behind those that the draft has not read yet.
                    entry, source = at, i32(row * nodes + node)
                    if n_kept > 0:
                        source = i32(first_kept + slot * n_kept + ((length + at) & (n_kept - 1)))
                    if unread:
                        entry = i32(n_pending + at)
                    if entry < pending:
                        isa.store_u32(pending_tokens + (i64(slot) * pending + entry) * 4, token)
                        isa.store_u32(pending_rows + (i64(slot) * pending + entry) * 4, source)
                isa.store_u32(out + (N_RESULT + at) * 4, token)
                at = i32(at + THREADS)
            # What was drafted goes into the result too; the root was not.
            at = i32(lane + 1)
            while at < nodes:
                drafted = isa.load_u32(node_tokens + (row * nodes + at) * 4)
                isa.store_u32(out + (N_RESULT + path_len - 1 + at) * 4, drafted)
                at = i32(at + THREADS)
            if lane == 0:
                is_running = i32(0)
                if finish == 0:
                    is_running = i32(1)
                # One lane writes the slot: all its fields have been read above, by this warp alone.
                isa.store_u32(fields + RUNNING * pitch, is_running)
                isa.store_u32(fields + LENGTH * pitch, length + n + 1)
                if n >= 0:
                    isa.store_u32(fields + ROOT * pitch, root)
                    if unread:
                        isa.store_u32(fields + N_PENDING * pitch, n_pending + n + 1)
                    else:
                        isa.store_u32(fields + DRAFT_LENGTH * pitch, start + n_pending)
                        isa.store_u32(fields + N_PENDING * pitch, n + 1)
                isa.store_u32(fields + BUDGET * pitch, budget - cut)
                isa.store_u32(fields + PLAIN * pitch, is_plain_now)
                isa.store_u32(kept + row * 4, n + 1)
                isa.store_u32(out, slot)
                isa.store_u32(out + 4, max(n, 0))
                isa.store_u32(out + 8, cut)
                isa.store_u32(out + 12, finish)
                isa.store_u32(out + 16, fault)
                isa.store_u32(out + 20, request_id)

    return kernel
