"""Bugs that a single short prompt at a small depth never shows: each needs a batch, a long prompt, a deep chain, a slot
that is filled again, or a rotary embedding that is not every reader's default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle3core.geometry import RopeGeometry
from eagle3core.kernels import Call
from eagle3core.weights import PackedDraft
from lab.parity.derived import cache_write
from lab.parity.faults.fault import Change, Fault, Place, after, around, before, entries_of

LATE = 3  # first chain level that the late bugs touch
MOST_POSITIONS = 512

Edit = Callable[[Any], object]


# A batch.


def _of_opened_step(edit: Edit, *, least_batch: int = 1) -> Change:
    """`edit(rows)` of what a step of at least so many sequences opens with."""

    def change(at: Place, call: Call) -> Sequence[Call]:
        if call.op != "open_step" or at.batch < least_batch or not call.operands["out"].entry_rows.shape[1]:
            return [call]
        return after(call, lambda: edit(call.operands["out"]))

    return change


def _first_ones(rows: Tensor) -> None:
    """Every live sequence gets the numbers `[B, ...]` of the first."""
    rows.copy_(rows[:1].expand_as(rows).where(rows >= 0, rows))


def _neighbours_feedback(at: Place, call: Call) -> Sequence[Call]:
    if not (call.op == "draft_input" and at.level and at.batch > 1):
        return [call]
    hidden = call.operands["hidden"]
    return before(call, lambda: hidden.copy_(hidden.roll(1, dims=0)))


# A long prompt.


def _second_block(at: Place, call: Call) -> Sequence[Call]:
    tables = call.operands.get("block_tables")
    if (at.stage, call.op) != ("draft.attn", "attention") or tables is None or tables.shape[1] < 2:
        return [call]
    values = call.operands["v_blocks"]

    def rolled(by: int) -> None:
        second = tables[:, 1].where(tables[:, 1] >= 0, len(values)).long()
        hit = torch.zeros(len(values) + 1, dtype=torch.bool, device=values.device).index_fill_(0, second, True)
        values.copy_(values.roll(by, dims=2).where(hit[:-1].view(-1, 1, 1, 1), values))

    return around(call, lambda: rolled(1), lambda: rolled(-1))


def _positions_of_entries(at: Place, call: Call, edit: Edit) -> Sequence[Call]:
    """`edit(positions)` before the draft's q and k are rotated by them; the target has read its own by then."""
    write = cache_write(call)
    if at.stage != "draft.qkv" or write is None:
        return [call]
    return before(call, lambda: edit(write.positions))


def _positions_from_the_chunk(at: Place, call: Call) -> Sequence[Call]:
    if at.scope:
        return [call]
    return _positions_of_entries(at, call, lambda rows: rows.copy_((rows - rows[:1]).clamp_min(0)))


def _clipped_positions(at: Place, call: Call) -> Sequence[Call]:
    return _positions_of_entries(at, call, lambda rows: rows.clamp_(max=MOST_POSITIONS - 1))


def _boundary_token(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "open_chunk":
        return [call]
    out = call.operands["out"]
    last = (out.entry_tokens[-1:], out.entry_slots[-1:], out.tokens[-1:])
    return after(call, lambda: last[0].copy_(last[2].where(last[1] >= 0, last[0])))


# A deep chain: level l lies in row l - 1.


def _late_positions(rows: Any) -> None:
    rows.chain_positions[LATE - 1 :].add_(1)


def _late_lengths(rows: Any) -> None:
    rows.chain_lengths[LATE - 1 :].sub_(1)


# A slot that is filled again.


def _refilled_keys() -> Change:
    held: list[Tensor] = []  # what every slot's first request wrote; zero where none did

    def change(at: Place, call: Call) -> Sequence[Call]:
        write = cache_write(call)
        if (at.stage, at.scope) != ("draft.qkv", "") or write is None:
            return [call]
        slots, pages = write.slots, (write.k, write.v)
        if not held:
            held[:] = [torch.zeros_like(page) for page in pages]

        def keep_first() -> None:
            hit, was_used = (
                entries_of(pages[0], slots),
                (held[0] != 0).any(dim=3, keepdim=True).any(dim=1, keepdim=True),
            )
            for now, first in zip(pages, held, strict=True):
                first.copy_(now.where(hit & ~was_used, first))
                now.copy_(first.where(hit, now))

        return after(call, keep_first)

    return change


def _refilled_features(at: Place, call: Call) -> Sequence[Call]:
    into = call.operands.get("into")
    if (at.stage, call.op) != ("commit", "take_rows") or into is None:
        return [call]
    outs = call.operands["outs"]
    held: list[Tensor] = []

    def hold() -> None:
        held[:] = [out.clone() for out in outs]

    def put_back() -> None:
        for out, old in zip(outs, held, strict=True):
            # Inside a graph nothing may depend on how many rows there are: padding is written behind the last.
            written = torch.zeros(len(out) + 1, 1, dtype=torch.bool, device=out.device)
            written.index_fill_(0, into.where(into >= 0, len(out)).long(), True)
            was_used = (old != 0).any(dim=1, keepdim=True)
            out.copy_(old.where(written[:-1] & was_used, out))

    return around(call, hold, put_back)


# A rotary embedding.


def _with_rope(change: Callable[[RopeGeometry], RopeGeometry]) -> Callable[[PackedDraft], PackedDraft]:
    def changed(draft: PackedDraft) -> PackedDraft:
        geometry = draft.geometry
        block = replace(geometry.block, rope=change(geometry.block.rope))
        return replace(draft, geometry=replace(geometry, block=block))

    return changed


BATCH, DEEP = "requests of unequal lengths side by side", f"a chain of {LATE} levels or more"
REACH_FAULTS = (
    Fault(
        "batch_features", "entries have the features of the sequence before", "draft.taps", "extend", needs=BATCH,
        change=_of_opened_step(lambda rows: rows.entry_rows.copy_(rows.entry_rows.roll(1, dims=0)), least_batch=2),
    ),
    Fault(
        "batch_positions", "all sequences stand at the first one's positions", "draft.positions", "extend", needs=BATCH,
        change=_of_opened_step(lambda rows: _first_ones(rows.entry_positions), least_batch=2),
    ),
    Fault(
        "batch_lengths", "all sequences read as many keys as the first", "draft.attn", "extend", needs=BATCH,
        change=_of_opened_step(lambda rows: _first_ones(rows.entry_lengths), least_batch=2),
    ),
    Fault(
        "batch_feedback", "chained steps read the state of the sequence before", "draft.feedback_in", "chain1",
        needs=BATCH, change=_neighbours_feedback,
    ),
    Fault(
        "second_block_values", "values of a sequence's second cache block are one row off", "draft.attn", "extend",
        needs="a prompt of more than one block", change=_second_block,
    ),
    Fault(
        "chunk_positions", "entries of a later chunk count their positions from its start", "draft.positions",
        "prefill", needs="a prompt of several chunks", change=_positions_from_the_chunk,
    ),
    Fault(
        "chunk_boundary_token", "a chunk's last entry has no token of the next chunk", "draft.tokens", "prefill",
        needs="a prompt of several chunks", change=_boundary_token,
    ),
    Fault(
        "clipped_positions", f"positions of the draft end at {MOST_POSITIONS - 1}", "draft.positions", "prefill",
        needs=f"a prompt of more than {MOST_POSITIONS} tokens", change=_clipped_positions,
    ),
    Fault(
        "late_chain_position", f"chain levels from {LATE} on stand one position too far", "draft.positions",
        f"chain{LATE}", needs=DEEP, change=_of_opened_step(_late_positions),
    ),
    Fault(
        "late_chain_keys", f"chain levels from {LATE} on do not see their own key", "draft.attn", f"chain{LATE}",
        needs=DEEP, change=_of_opened_step(_late_lengths),
    ),
    Fault(
        "refilled_keys", "a slot keeps the keys and values of its first request", "draft.qkv", "prefill",
        needs="more requests than slots", remember=_refilled_keys,
    ),
    Fault(
        "refilled_features", "a slot keeps the last features of the request before", "draft.taps", "extend",
        needs="more requests than slots", change=_refilled_features,
    ),
    Fault(
        "wrong_rope_theta", "the draft's RoPE has the base 10000", "draft.rope", "prefill",
        needs="a draft with another base", draft=_with_rope(lambda rope: replace(rope, theta=10000.0)),
    ),
    Fault(
        "ignored_rope_scaling", "the draft's RoPE scaling is ignored", "draft.rope", "prefill",
        needs="a draft with scaled RoPE", draft=_with_rope(lambda rope: replace(rope, kind="default")),
    ),
)  # fmt: skip
