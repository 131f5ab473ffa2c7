"""Bugs in the draft, in the order of its stages; one short prompt shows each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle3core.kernels import Call
from eagle3core.kernels.layer import rms_norm_reference
from eagle3core.weights import PackedDraft
from lab.parity.derived import cache_write
from lab.parity.faults.fault import Fault, Place, after, around, before, edited, entries_of, rolled_rows


def _unshifted_tokens(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "open_chunk":
        return [call]
    out = call.operands["out"]
    return after(call, lambda: out.entry_tokens.copy_(out.tokens.clamp_min(0)))


def _features_one_late(at: Place, call: Call) -> Sequence[Call]:
    if (at.stage, call.op) != ("draft.fc", "take_rows"):
        return [call]
    return after(call, lambda: [part.copy_(part.roll(1, dims=0)) for part in call.operands["outs"]])


def _taps_in_wrong_order(draft: PackedDraft) -> PackedDraft:
    width = draft.geometry.target_hidden_size
    assert draft.fc is not None, "a head with taps has fc"
    return replace(draft, fc=edited(draft.fc, lambda matrix: matrix.roll(width, dims=1)))


def _swapped_halves(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "draft_input":
        return [call]
    x = call.operands["x"]
    return after(call, lambda: x.copy_(x.roll(x.shape[1] // 2, dims=1)))


def _swapped_keys_and_values(draft: PackedDraft) -> PackedDraft:
    block = draft.geometry.block
    heads = [n * block.head_dim for n in (block.n_heads, block.n_kv_heads, block.n_kv_heads)]

    def swap(matrix: Tensor) -> Tensor:
        q, k, v = torch.split(matrix, heads)
        return torch.cat([q, v, k])

    return replace(draft, layer=replace(draft.layer, qkv=edited(draft.layer.qkv, swap)))


def _query_one_ahead(at: Place, call: Call) -> Sequence[Call]:
    write = cache_write(call)
    if not (at.stage == "draft.qkv" and at.level and write):
        return [call]
    q, step = write.q, write.table[1]

    def turn() -> None:
        first, second = q.to(step.dtype).chunk(2, dim=-1)
        cos, sin = step.unbind(-1)
        q.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))

    return after(call, turn)


def _hotter_attention(at: Place, call: Call) -> Sequence[Call]:
    if (at.stage, call.op) != ("draft.attn", "attention"):
        return [call]
    return before(call, lambda: call.operands["q"].mul_(1.5))


def _stale_entries(at: Place, call: Call) -> Sequence[Call]:
    write = cache_write(call)
    if (at.stage, at.scope) != ("draft.qkv", "extend") or write is None:
        return [call]
    slots, pages = write.slots, (write.k, write.v)
    held: list[Tensor] = []

    def hold() -> None:
        held[:] = [page.clone() for page in pages]

    def put_back() -> None:
        rows = slots.view(at.batch, -1) >= 0  # [B, k + 1]
        row, n_chained = torch.arange(rows.shape[1], device=slots.device), rows.shape[1] - 2
        is_stale = (row < rows.sum(dim=1, keepdim=True) - 1) & (row < n_chained)
        hit = entries_of(pages[0], slots.where(is_stale.flatten(), -1))
        for now, old in zip(pages, held, strict=True):
            now.copy_(old.where(hit, now))

    return around(call, hold, put_back)


def _unnormed_mlp(at: Place, call: Call) -> Sequence[Call]:
    if (at.stage, call.op) != ("draft.attn", "gemm"):
        return [call]
    stream, scaled, sums, eps = (call.operands[name] for name in ("y", "second", "third", "eps"))

    def without_norm() -> None:
        scaled.copy_(stream)
        sums.zero_()
        sums[:, 0] = stream.shape[1] * (1 - eps)  # the root of their mean plus eps is 1

    return after(call, without_norm)


def _normed_feedback(at: Place, call: Call) -> Sequence[Call]:
    if not (at.stage == "draft.mlp" and call.op == "gemm" and "gain" in call.operands):
        return [call]
    out, gain, eps = (call.operands[name] for name in ("y", "gain", "eps"))
    return after(call, lambda: out.copy_(rms_norm_reference(out, gain, eps)))


def _scaled_norm(draft: PackedDraft) -> PackedDraft:
    return replace(draft, final_gain=draft.final_gain * 1.25)


def _rolled_head(draft: PackedDraft) -> PackedDraft:
    return replace(draft, head=edited(draft.head, rolled_rows(draft.geometry.draft_vocab_size)))


def _unmapped_ids(draft: PackedDraft) -> PackedDraft:
    map_ = draft.draft_to_target
    same = None if map_ is None else torch.arange(len(map_), dtype=map_.dtype, device=map_.device)
    return replace(draft, draft_to_target=same)


DRAFT_FAULTS = (
    Fault(
        "unshifted_tokens", "entries have their own position's token", "draft.tokens", "prefill",
        change=_unshifted_tokens,
    ),
    Fault(
        "shifted_features", "entries have another row's features", "draft.taps", "prefill", change=_features_one_late
    ),
    Fault("tap_order", "the taps reach fc in the wrong order", "draft.fc", "prefill", draft=_taps_in_wrong_order),
    Fault(
        "swapped_concat", "hidden state first, embedding second", "draft.concat", "prefill", change=_swapped_halves
    ),
    Fault("swapped_kv", "keys and values are swapped", "draft.qkv", "prefill", draft=_swapped_keys_and_values),
    Fault(
        "stale_draft_kv", "entries of accepted tokens keep the chained steps' keys and values", "draft.qkv",
        "after acceptance", needs="accepted drafts, and k >= 2", change=_stale_entries,
    ),
    Fault(
        "rope_query_off_by_one", "chained steps rotate their query one position too far; extend passes stay right",
        "draft.rope", "chain1", needs="k >= 2", change=_query_one_ahead,
    ),
    Fault("hot_attention", "scores are scaled by 1.5", "draft.attn", "extend", change=_hotter_attention),
    Fault(
        "unnormed_mlp", "the feed-forward reads the un-normed residual", "draft.feedback", "extend",
        change=_unnormed_mlp,
    ),
    Fault("normed_feedback", "the state fed back is normed", "draft.feedback", "extend", change=_normed_feedback),
    Fault("scaled_draft_norm", "the final norm has the wrong gain", "draft.norm", "extend", draft=_scaled_norm),
    Fault("rolled_draft_head", "the logits are one id off", "draft.head", "extend", draft=_rolled_head),
    Fault(
        "missing_d2t", "draft ids are used as target ids", "draft.tokens", "chain1",
        needs="a draft vocabulary smaller than the target's, and k >= 2", draft=_unmapped_ids,
    ),
)  # fmt: skip
