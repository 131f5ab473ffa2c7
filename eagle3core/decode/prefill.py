"""Prefill: one request's prompt into a slot, chunk by chunk.

The target reads the prompt in block-aligned chunks, one request a launch. The draft then reads every entry whose two
halves are known, 0..P-2; entry P-1, which needs the first sampled token, waits as the slot's pending entry and is read
by the first decode step like every later one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.decode.state import DecodeState
from eagle3core.kernels.tree.accept import argmax_reference
from eagle3core.model.block import Pass
from eagle3core.model.draft import DraftModel
from eagle3core.model.target import TargetModel
from eagle3core.trace import Trace


def prefill(
    target: TargetModel,
    draft: DraftModel | None,
    state: DecodeState,
    slot: int,
    prompt: Tensor,
    chunk: int,
    trace: Trace,
) -> int:
    """Fill `slot` with `prompt: [P]` int64 and give the first sampled token; the slot is then active."""
    n_prompt = len(prompt)
    with trace.scope("prefill"):
        first, taps = _prefill_target(target, state, slot, prompt, chunk, trace)
        if draft is not None:
            _prefill_draft(draft, state, slot, prompt, taps[:-1], chunk, trace)
            state.pending_taps[slot, 0] = taps[-1]
            state.pending_tokens[slot, 0] = first
            state.pending_counts[slot] = 1
            state.draft_lengths[slot] = n_prompt - 1
    state.lengths[slot] = n_prompt
    state.roots[slot] = first
    state.active[slot] = True
    return first


def _prefill_target(
    target: TargetModel, state: DecodeState, slot: int, prompt: Tensor, chunk: int, trace: Trace
) -> tuple[int, Tensor]:
    """First sampled token, and the taps `[P, n_taps * E]` of every prompt position."""
    state.target_cache.reserve(slot, len(prompt))
    view = state.target_cache.view(torch.tensor([slot], device=prompt.device))
    taps, logits = [], None
    for start in range(0, len(prompt), chunk):
        tokens = prompt[None, start : start + chunk]
        is_last = start + chunk >= len(prompt)
        output = target.forward(tokens, _causal_pass(start, tokens), view, trace, head="last" if is_last else "none")
        taps.append(output.taps[0])
        logits = output.logits
    assert logits is not None, "a prompt has at least one token; admission refuses empty ones"
    return int(argmax_reference(logits[0, -1])), torch.cat(taps)


def _prefill_draft(
    draft: DraftModel, state: DecodeState, slot: int, prompt: Tensor, taps: Tensor, chunk: int, trace: Trace
) -> None:
    """Read draft entries 0..P-2: taps of position j with token j + 1."""
    assert state.draft_cache is not None, "a draft has a cache"
    state.draft_cache.reserve(slot, len(prompt))
    view = state.draft_cache.view(torch.tensor([slot], device=prompt.device))
    for start in range(0, len(taps), chunk):
        rows = taps[None, start : start + chunk]
        tokens = prompt[None, start + 1 : start + 1 + rows.shape[1]]
        draft.extend(rows, tokens, _causal_pass(start, tokens), view, trace, None)


def _causal_pass(start: int, tokens: Tensor) -> Pass:
    n_rows, device = tokens.shape[1], tokens.device
    return Pass(
        positions=torch.arange(start, start + n_rows, device=device)[None],
        prefix_lens=torch.tensor([start], device=device),
        mask=torch.ones(1, n_rows, n_rows, dtype=torch.bool, device=device).tril(),
        valid=torch.ones(1, n_rows, dtype=torch.bool, device=device),
    )
