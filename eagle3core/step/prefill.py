"""Prefill as programs: one for a chunk of a prompt, one for its end; the same kernels as a step, with more rows.

A chunk's bits depend only on its tokens and its prefix, and its rows are summed in the same order as a step's, so a
prompt gives the same keys whether it is read in chunks or token by token. Of the draft, which has one layer, a prompt
needs keys and values only. Source: house rule of fixed-size chunks; EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

import torch

from eagle3core.kernels.layer.take_rows import take_rows
from eagle3core.kernels.slots.admit import Admitted, admit
from eagle3core.kernels.slots.open_chunk import open_chunk
from eagle3core.step.buffers import columns_of, rows_of
from eagle3core.step.passes import DRAFT, DraftPass, Emitter, Rows, TargetPass, draft_keys, target_stages
from eagle3core.step.program import Program, Stage, Tap, after_all
from eagle3core.step.state import DeviceState
from eagle3core.weights.packed import PackedDraft, PackedTarget


def chunk_program(emit: Emitter, target: PackedTarget, draft: PackedDraft | None, state: DeviceState) -> Program:
    """Read the chunk that begins at `state.start` of `state.prompt` into the slot of `state.request`."""
    sizes, chunk = state.sizes, state.chunk
    n = sizes.chunk
    opening = open_chunk(
        emit.arch, state.request, state.start, state.prompt, state.tables, chunk, sizes.block, sizes.seed_row
    )
    stages = [Stage("tree.masks", tuple(after_all(opening)), ("EAGLE_TREE_MASKS",))]
    # Spans of one chunk read each other's keys, so attention waits for the kernel that writes them.
    rows = Rows(chunk.positions, chunk.slots, chunk.prefix, chunk.tables, state.chunk_masks, keys_are_old=False)
    over = TargetPass(
        target, state.act, chunk.tokens, rows_of(state.step.ids, n), state.k, state.v, state.chunk_captured
    )
    stages += target_stages(emit, over, rows, "", first_waits=True)
    if draft is None or state.draft is None:
        return tuple(stages)
    own = state.draft
    taps, hidden, x = (rows_of(t, n, t.shape[1]) for t in (own.taps, own.hidden, own.x))
    every = torch.arange(n, dtype=torch.int32, device=target.device)
    parts = columns_of(taps, target.geometry.block.hidden_size)
    fuse = take_rows(emit.arch, state.chunk_captured, every, parts)
    fuse += emit.linear(draft.fc, taps, hidden, draft.geometry.block)
    stages.append(Stage("draft.fc", tuple(fuse), DRAFT, {"draft.taps": Tap(taps, chunk.entry_slots)}))
    entries = Rows(chunk.positions, chunk.entry_slots, chunk.prefix, chunk.tables, state.chunk_masks)
    reading = DraftPass(draft, own.act, hidden, chunk.entry_tokens, x, own.out, own.k, own.v)
    return (*stages, draft_keys(emit, reading, entries, "", first_waits=False))


def finish_program(emit: Emitter, target: PackedTarget, draft: PackedDraft | None, state: DeviceState) -> Program:
    """Sample the first token from the last row of the chunk just read, and let the slot run."""
    n, act, chunk = state.sizes.chunk, state.act, state.chunk
    scaled, sums = (rows_of(t, n, t.shape[1]) for t in (act.scaled, act.sums))
    head = take_rows(emit.arch, (scaled, sums), chunk.last, (state.last_scaled, state.last_sums))
    head = after_all(head)
    head += emit.head(target.head, state.last_scaled, state.last_sums, state.head, target.geometry.block)
    logits = rows_of(state.head.logits, 1, state.head.logits.shape[1])
    stages = [
        Stage("target.head", tuple(head), ("BASE_DECODE_STEP",), {"target.head": Tap(logits)}),
        Stage("accept", tuple(emit.choose(state.head, 1, state.first)), ("EAGLE_ACCEPT",)),
    ]
    seed = []
    if draft is not None:
        seed = take_rows(emit.arch, state.chunk_captured, chunk.last, state.captured, into=chunk.seed)
    changed = Admitted(state.state, state.ends, state.pending_tokens, state.pending_rows, state.turn, state.results)
    seed += admit(emit.arch, state.request, state.first, changed, state.sizes.seed_row)
    return (*stages, Stage("commit", tuple(seed), ("EAGLE_TAIL_COMMIT",)))
