"""Prefill as programs: one for a chunk of a prompt, one for its end; the same kernels as a step, with more rows.

A chunk's bits depend only on its tokens and its prefix, and its rows are summed in the same order as a step's, so a
prompt gives the same keys whether it is read in chunks or token by token. Of the draft, which has one layer, a prompt
needs keys and values only. Source: house rule of fixed-size chunks; EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

import torch

from eagle3core.kernels.card import Call
from eagle3core.kernels.layer.take_rows import TAKE_ROWS
from eagle3core.kernels.slots.admit import ADMIT, Admitted
from eagle3core.kernels.slots.open_chunk import OPEN_CHUNK, ChunkRows
from eagle3core.kernels.tree.mask_words import pack_words
from eagle3core.step.buffers import columns_of, rows_of
from eagle3core.step.draw import draw, keep_known
from eagle3core.step.outcome import KeptLogprobs, keep_logprobs
from eagle3core.step.passes import DRAFT, DraftPass, Emitter, Rows, TargetPass, draft_keys, target_stages
from eagle3core.step.program import Program, Stage, Tap, after_all
from eagle3core.step.state import DeviceState
from eagle3core.weights.packed import Drafter, PackedDraft, PackedTarget


def chunk_program(emit: Emitter, target: PackedTarget, draft: Drafter | None, state: DeviceState, n: int) -> Program:
    """Read the chunk of `n` rows that begins at `state.start` of `state.prompt` into the slot of `state.request`."""
    sizes, span = state.sizes, min(state.sizes.span, n)
    chunk = _first_rows(state.chunk, n, n // span)
    opening = OPEN_CHUNK.call(
        emit.arch, state.request, state.start, state.prompt, state.tables, chunk, sizes.block, sizes.seed_row
    )
    stages = [Stage("tree.masks", tuple(after_all([opening])), ("EAGLE_TREE_MASKS",))]
    triangle = torch.ones(span, span, dtype=torch.bool, device=target.device).tril()
    masks = pack_words(triangle).expand(n // span, -1, -1).contiguous()
    # Spans of one chunk read each other's keys, so attention waits for the kernel that writes them.
    rows = Rows(chunk.positions, chunk.slots, chunk.prefix, chunk.tables, masks, keys_are_old=False)
    captured = tuple(rows_of(rows, n, rows.shape[1]) for rows in state.chunk_captured)
    over = TargetPass(target, state.act, chunk.tokens, rows_of(state.step.ids, n), state.k, state.v, captured)
    stages += target_stages(emit, over, rows, "", first_waits=True)
    if isinstance(draft, PackedTarget) and state.small is not None:
        small = state.small  # reads the same tokens into its own cache, at the same places
        over = TargetPass(draft, small.act, chunk.tokens, rows_of(small.ids, n), small.k, small.v, ())
        return (*stages, *target_stages(emit, over, rows, "", first_waits=True, role="draft"))
    if not isinstance(draft, PackedDraft) or state.draft is None:
        return tuple(stages)
    own = state.draft
    taps, hidden, x = (rows_of(t, n, t.shape[1]) for t in (own.taps, own.hidden, own.x))
    every = torch.arange(n, dtype=torch.int32, device=target.device)
    parts = columns_of(taps, target.geometry.block.hidden_size)
    fuse = [TAKE_ROWS.call(emit.arch, captured, every, parts)]
    fuse += emit.linear(draft.fc, taps, hidden, draft.geometry.block)
    stages.append(Stage("draft.fc", tuple(fuse), DRAFT, {"draft.taps": Tap(taps, chunk.entry_slots)}))
    entries = Rows(chunk.positions, chunk.entry_slots, chunk.prefix, chunk.tables, masks)
    reading = DraftPass(draft, own.act, hidden, chunk.entry_tokens, x, own.out, own.k, own.v)
    return (*stages, draft_keys(emit, reading, entries, "", first_waits=False))


def _first_rows(chunk: ChunkRows, n: int, spans: int) -> ChunkRows:
    """The chunk's tensors for `n` rows in `spans` spans."""
    kept = {"prefix": spans, "tables": spans, "last": 1, "seed": 1}
    return ChunkRows(**{name: tensor[: kept.get(name, n)] for name, tensor in chunk._asdict().items()})


def finish_program(
    emit: Emitter,
    target: PackedTarget,
    draft: Drafter | None,
    state: DeviceState,
    *,
    draws: bool = False,
    logprobs: KeptLogprobs | None = None,
) -> Program:
    """Sample the first token from the last row of the chunk just read, and let the slot run; `logprobs`: where its
    log-probability is kept."""
    n, act, chunk = state.sizes.chunk, state.act, state.chunk
    scaled, sums = (rows_of(t, n, t.shape[1]) for t in (act.scaled, act.sums))
    last = TAKE_ROWS.call(emit.arch, (scaled, sums), chunk.last, (state.last_scaled, state.last_sums))
    head = after_all([last])
    head += emit.head(target.head, state.last_scaled, state.last_sums, state.head, target.geometry.block)
    logits = rows_of(state.head.logits, 1, state.head.logits.shape[1])
    choose = emit.choose(state.head, 1, state.first)
    if draws:
        slot, n_prompt = state.request[:1], state.request[1:2]
        choose.append(draw(logits, n_prompt, slot, state.draws, state.first, ahead=0))
        if state.sizes.draws_drafts:
            choose.append(keep_known(state.draws, state.first))
    stages = [
        Stage("target.head", tuple(head), ("BASE_DECODE_STEP",), {"target.head": Tap(logits)}),
        Stage("accept", tuple(choose), ("EAGLE_ACCEPT",)),
    ]
    seed: list[Call] = []
    if isinstance(draft, PackedDraft):
        seed.append(TAKE_ROWS.call(emit.arch, state.chunk_captured, chunk.last, state.captured, into=chunk.seed))
    changed = Admitted(state.state, state.ends, state.pending_tokens, state.pending_rows, state.turn, state.results)
    unread = 0 if isinstance(draft, PackedTarget) else 1
    seed.append(ADMIT.call(emit.arch, state.request, state.first, changed, state.sizes.seed_row, unread))
    if logprobs is not None:  # after ADMIT, which turns to the block that it writes
        first = state.first.view(1, 1)
        seed.append(keep_logprobs(logits, first, torch.zeros_like(first), state.turn, logprobs))
    return (*stages, Stage("commit", tuple(seed), ("EAGLE_TAIL_COMMIT",)))
