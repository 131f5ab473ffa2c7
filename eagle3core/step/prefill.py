"""Prefill as programs: a pass over prompts, the ends of them, the draft's pass; the same kernels as a step, more rows.

A pass has spans, each of one prompt, so that short prompts are read side by side and a long one in chunks. A span's
bits depend only on its tokens and its prefix, and its rows are summed in the same order as a step's, so a prompt gives
the same keys however it is read, beside whatever. Of the target's last layer a prompt needs keys and values only, but
for its last token: unless a draft reads that layer's output, the program of the ends makes the rest of it. Of the
draft, which has one layer, it needs keys and values only, and those after its first token: so the draft reads last,
while the token is on its way to the host.
Source: house rule of fixed-size chunks; EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle3core.kernels.card import Call
from eagle3core.kernels.layer.take_rows import TAKE_ROWS
from eagle3core.kernels.slots.admit import ADMIT, Admitted
from eagle3core.kernels.slots.open_chunk import OPEN_CHUNK, ChunkRows
from eagle3core.kernels.slots.slot_state import REQUEST
from eagle3core.kernels.tree.mask_words import pack_words
from eagle3core.step.buffers import rows_of
from eagle3core.step.draw import draw, keep_known
from eagle3core.step.heads import DraftPass, draft_keys, fuse_taps
from eagle3core.step.outcome import KeptLogprobs, keep_logprobs
from eagle3core.step.passes import (
    DRAFT,
    TREE,
    Emitter,
    LayerInput,
    Rows,
    TargetPass,
    rest_of_last_layer,
    target_stages,
)
from eagle3core.step.program import Program, Stage, Tap, after_all
from eagle3core.step.results import GivenPass, given_pass
from eagle3core.step.sizes import ChunkShape
from eagle3core.step.state import DeviceState
from eagle3core.weights.packed import Drafter, PackedDraft, PackedTarget


def chunk_program(emit: Emitter, target: PackedTarget, state: DeviceState, shape: ChunkShape) -> Program:
    """Read the spans of `state.given`, a pass of `shape`, into their slots."""
    given, chunk = given_pass(state.given, state.sizes.n_ends, shape), _first_rows(state.chunk, shape)
    opening = OPEN_CHUNK.call(emit.arch, given.spans, given.tokens, state.tables, chunk, state.sizes.block)
    stages = [Stage("tree.masks", tuple(after_all([opening])), TREE)]
    over = _target_pass(target, state, chunk)
    rows, alone = _rows(chunk, shape), _are_ends_alone(target, state)
    return (*stages, *target_stages(emit, over, rows, "", first_waits=True, ends_with_keys=alone))


def draft_chunk_program(emit: Emitter, draft: Drafter | None, state: DeviceState, shape: ChunkShape) -> Program:
    """Read the spans of the pass of `shape` just made with the draft as well; no stages where nothing reads."""
    chunk, n = _first_rows(state.chunk, shape), shape.rows
    if isinstance(draft, PackedTarget) and state.small is not None:
        small = state.small  # reads the same tokens into its own cache, at the same places
        over = TargetPass(draft, small.act, chunk.tokens, rows_of(small.ids, n), small.k, small.v, ())
        rows = _rows(chunk, shape)
        return tuple(target_stages(emit, over, rows, "", first_waits=True, role="draft", ends_with_keys=True))
    if not isinstance(draft, PackedDraft) or state.draft is None:
        return ()
    own = state.draft
    taps, hidden, x = (rows_of(t, n, t.shape[1]) for t in (own.taps, own.hidden, own.x))
    every = torch.arange(n, dtype=torch.int32, device=taps.device)
    reading = DraftPass(draft, own.act, hidden, chunk.entry_tokens, x, own.out, own.k, own.v)
    fuse = after_all(fuse_taps(emit, reading, own, _captured(state, n), every, taps))
    fused = Stage("draft.fc", tuple(fuse), DRAFT, {"draft.taps": Tap(taps, chunk.entry_slots)})
    entries = replace(_rows(chunk, shape), slots=chunk.entry_slots, keys_are_old=True)
    return (fused, draft_keys(emit, reading, entries, "", first_waits=False))


def _rows(chunk: ChunkRows, shape: ChunkShape) -> Rows:
    """The rows of a pass over prompts."""
    triangle = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=chunk.tokens.device).tril()
    masks = pack_words(triangle).expand(shape.spans, -1, -1).contiguous()
    # Spans of one prompt read each other's keys, so attention waits for the kernel that writes them.
    return Rows(chunk.positions, chunk.slots, chunk.prefix, chunk.tables, masks, keys_are_old=False)


def _are_ends_alone(target: PackedTarget, state: DeviceState) -> bool:
    """Whether a pass makes keys and values alone of the target's last layer, and the ends of prompts the rest."""
    return not state.sizes.last_states and not (state.chunk_captured and len(target.layers) in target.taps)


def _target_pass(target: PackedTarget, state: DeviceState, rows: ChunkRows) -> TargetPass:
    """The target over the rows of a pass over prompts, or over those that end in it."""
    n = len(rows.tokens)
    ids = rows_of(state.step.ids, n)
    return TargetPass(target, state.act, rows.tokens, ids, state.k, state.v, _captured(state, n))


def _captured(state: DeviceState, n: int) -> tuple[Tensor, ...]:
    """What a pass over `n` rows captures for the draft."""
    return tuple(rows_of(rows, n, rows.shape[1]) for rows in state.chunk_captured)


def _first_rows(chunk: ChunkRows, shape: ChunkShape) -> ChunkRows:
    """The tensors of a pass of `shape`."""
    kept = dict.fromkeys(("prefix", "tables"), shape.spans)
    return ChunkRows(**{name: tensor[: kept.get(name, shape.rows)] for name, tensor in chunk._asdict().items()})


def finish_program(
    emit: Emitter,
    target: PackedTarget,
    draft: Drafter | None,
    state: DeviceState,
    *,
    draws: bool = False,
    logprobs: KeptLogprobs | None = None,
) -> Program:
    """Sample the first tokens from the last rows of the prompts that ended in the pass just made, and let their slots
    run; `draws`, `logprobs`: as in `step_program`."""
    n, sizes = state.sizes.n_ends, state.sizes
    given = given_pass(state.given, n, ChunkShape(sizes.n_spans, sizes.span))
    slots, n_prompt, last_rows, seed_rows = (
        given.requests[REQUEST.index(name)] for name in ("slot", "n_prompt", "last_row", "seed_row")
    )
    layer, head = _of_last_rows(emit, target, state, given)
    logits = rows_of(state.head.logits, n, state.head.logits.shape[1])
    choose = emit.choose(state.head, n, state.first)
    if draws:
        choose.append(draw(logits, n_prompt, slots, state.draws, state.first, ahead=0))
        if sizes.draws_drafts:
            choose.append(keep_known(state.draws, slots, state.first))
    stages = [
        *layer,
        Stage("target.head", tuple(head), ("BASE_DECODE_STEP",), {"target.head": Tap(logits, slots)}),
        Stage("accept", tuple(choose), ("EAGLE_ACCEPT",)),
    ]
    seed: list[Call] = []
    if isinstance(draft, PackedDraft):
        seed.append(TAKE_ROWS.call(emit.arch, state.chunk_captured, last_rows, state.captured, into=seed_rows))
    changed = Admitted(state.state, state.ends, state.pending_tokens, state.pending_rows, state.turn, state.results)
    unread = 0 if isinstance(draft, PackedTarget) else 1
    seed.append(ADMIT.call(emit.arch, given.requests, given.ends, state.first, changed, unread))
    if logprobs is not None:  # after ADMIT, which turns to the block that it writes
        first = state.first.view(n, 1)
        seed.append(keep_logprobs(logits, first, torch.zeros_like(first), state.turn, logprobs))
    return (*stages, Stage("commit", tuple(seed), ("EAGLE_TAIL_COMMIT",)))


def _of_last_rows(
    emit: Emitter, target: PackedTarget, state: DeviceState, given: GivenPass
) -> tuple[list[Stage], list[Call]]:
    """What is left of the last layer for the rows that end, and the calls that make their logits."""
    sizes, n, block, alone = state.sizes, state.sizes.n_ends, target.geometry.block, _are_ends_alone(target, state)
    found = _target_pass(target, state, state.chunk).input_of(len(target.layers) - int(alone), sizes.chunk)
    last = LayerInput(state.last_stream, state.last_scaled, state.last_sums)
    last_rows = given.requests[REQUEST.index("last_row")]
    take = TAKE_ROWS.call(
        emit.arch, (found.stream, found.scaled, found.sums), last_rows, (last.stream, last.scaled, last.sums)
    )
    first = after_all([take])
    if not alone:
        return [], first + emit.head(target.head, last.scaled, last.sums, state.head, block)
    opening = OPEN_CHUNK.call(emit.arch, given.last_spans, given.last_tokens, state.tables, state.last, sizes.block)
    opened = Stage("tree.masks", tuple(after_all([opening])), TREE)
    over, rows = _target_pass(target, state, state.last), _rows(state.last, ChunkShape(n, 1))
    left = over.input_of(len(target.layers), n)
    ordered = emit.left_for(target.head, target.layers[-1], n)
    head = emit.head(target.head, left.scaled, left.sums, state.head, block, ordered=ordered)
    return [opened, *rest_of_last_layer(emit, over, rows, last, first)], head
