"""Passes of a draft head as stages of calls: its input from captured states, then its one layer.

What a variant norms more than the plain head is a launch more, of the card `rms_norm`, which rounds as the fused norms
do. An EAGLE-1 head's fc reads embeddings in the place of taps, and its layer what fc gives.
Source: EAGLE-3, arXiv 2503.01840, section 3; EAGLE, arXiv 2401.15077, section 3; variants: docs/checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.kernels.card import Call
from eagle3core.kernels.layer.draft_input import DRAFT_INPUT, TakenRows
from eagle3core.kernels.layer.feature_input import FEATURE_INPUT
from eagle3core.kernels.layer.rms_norm import RMS_NORM
from eagle3core.kernels.layer.take_rows import TAKE_ROWS
from eagle3core.step.buffers import Activations, columns_of, rows_of
from eagle3core.step.passes import DRAFT, Emitter, Rows
from eagle3core.step.program import Stage, Tap, after_all
from eagle3core.step.state import DraftTensors
from eagle3core.weights.eagle import PackedEagle
from eagle3core.weights.packed import PackedDraft


@dataclass(frozen=True)
class DraftPass:
    """Operands of a pass over the draft layer.

    Attributes:
        hidden: `[n, Hd]` fused taps, or the feedback of the level before; of an EAGLE-1 head what its fc gives.
        tokens: `[n]` target ids. x: `[n, 2 Hd]` scratch. out: `[n, Hd]` the layer's output.
        k, v: `[n_blocks, K, block, D]`.
        residual: `[n, Hd]` scratch for the normed residual, of heads that have one.
        above: rows `[m, Hd]` and `[n]` int32 which of them `hidden` is; the pass puts them there. None: it is there.
    """

    model: PackedDraft
    act: Activations
    hidden: Tensor
    tokens: Tensor
    x: Tensor
    out: Tensor
    k: Tensor
    v: Tensor
    residual: Tensor | None = None
    above: tuple[Tensor, Tensor] | None = None


def fuse_taps(
    emit: Emitter, over: DraftPass, own: DraftTensors, captured: Sequence[Tensor], index: Tensor, taps: Tensor
) -> list[Call]:
    """Calls that make the layer's input `over.hidden` of the `captured` rows that `index: [n]` names.

    `taps: [n, taps * H]` is left with the raw streams side by side.
    """
    model, n = over.model, len(index)
    calls = [TAKE_ROWS.call(emit.arch, captured, index, columns_of(taps, model.geometry.target_hidden_size))]
    if isinstance(model, PackedEagle):
        return calls + fused_feature(emit, over, taps, model.hidden_gain)
    if model.fc is None:
        assert model.input_gain is not None, "a head without fc reads the target's normed state"
        return [*calls, RMS_NORM.call(emit.arch, taps, model.input_gain, over.hidden, model.input_eps)]
    if model.input_gain is not None:
        assert own.normed is not None, "a state made for such a head has its tensors"
        normed, by = rows_of(own.normed, n, own.normed.shape[1]), len(model.input_gain)
        rows, out = taps.view(-1, by), normed.view(-1, by)  # all taps of a row at once, or one after the other
        calls.append(RMS_NORM.call(emit.arch, rows, model.input_gain, out, model.input_eps))
        taps = normed
    return calls + emit.linear(model.fc, taps, over.hidden, model.geometry.block)


def fused_feature(emit: Emitter, over: DraftPass, feature: Tensor, gain: Tensor | None) -> list[Call]:
    """`over.hidden` of an EAGLE-1 head: fc of the tokens' embeddings beside `feature: [n, H]`.

    `gain`: of the target's final norm, where the features are its captured streams; None where the head's own are fed.
    """
    model, block = over.model, over.model.geometry.block
    assert model.fc is not None, "an EAGLE-1 head is its fc and a layer"
    eps = block.rms_norm_eps if gain is None else model.input_eps
    join = FEATURE_INPUT.call(emit.arch, over.tokens, model.embedding, feature, gain, over.x, eps)
    return [join, *emit.linear(model.fc, over.x, over.hidden, block)]


def draft_keys(
    emit: Emitter, over: DraftPass, rows: Rows, scope: str, *, first_waits: bool, attends: bool = False
) -> Stage:
    """The draft's attention input, its k and v in the cache, and where it `attends` q."""
    model, block = over.model, over.model.geometry.block
    if isinstance(model, PackedEagle):  # whose fc has read the embedding, and which norms nothing before q, k, v
        calls = emit.qkv(model.layer, over.hidden, None, over.act, rows, (over.k, over.v), block, attends=attends)
        return _keys_stage(calls, over, rows, scope)
    read, by = (over.hidden, None) if over.above is None else (over.above[0], TakenRows(over.above[1], over.hidden))
    # A state that is normed already takes the place of what the launch makes of it with the embedding's gain.
    gains = (model.layer.attn_gain, model.layer.attn_gain if model.hidden_gain is None else model.hidden_gain)
    joined = DRAFT_INPUT.call(
        emit.arch, over.tokens, model.embedding, read, *gains, over.x, block.rms_norm_eps, by
    )  # fmt: skip
    calls = after_all([joined]) if first_waits else [joined]
    if model.hidden_gain is None:
        every = torch.arange(rows.n, dtype=torch.int32, device=over.x.device)
        calls.append(TAKE_ROWS.call(emit.arch, (over.hidden,), every, columns_of(over.x, block.hidden_size)[1:]))
    calls += emit.qkv(model.layer, over.x, None, over.act, rows, (over.k, over.v), block, attends=attends)
    return _keys_stage(calls, over, rows, scope)


def _keys_stage(calls: list[Call], over: DraftPass, rows: Rows, scope: str) -> Stage:
    taps = {
        "draft.tokens": Tap(over.tokens, rows.slots, scope), "draft.fc": Tap(over.hidden, rows.slots, scope),
        "draft.concat": Tap(over.x, rows.slots, scope),
    }  # fmt: skip
    return Stage("draft.qkv", tuple(calls), (*DRAFT, "EAGLE_DRAFT_ATTENTION_FMHA"), taps)


def draft_stages(emit: Emitter, over: DraftPass, rows: Rows, scope: str, *, first_waits: bool) -> list[Stage]:
    """The draft layer; its output is left in `over.out`, what the head reads in the activations."""
    model, act, block, n = over.model, over.act, over.model.geometry.block, rows.n
    residual, attend = over.hidden, list[Call]()
    if over.residual is not None:  # before attention, whose output its map reads with nothing in between
        assert model.hidden_gain is not None, "a head whose residual is normed has that norm"
        residual = over.residual
        attend.append(RMS_NORM.call(emit.arch, over.hidden, model.hidden_gain, residual, block.rms_norm_eps))
    attend += emit.attend(model.layer, act, rows, (over.k, over.v), block)
    attend += emit.project(model.layer, act, n, residual, block)
    forward = emit.mlp(model.layer, act, n, over.out, model.final_gain, block)
    if model.feedback_gain is not None:  # in place: the head has what it reads of it already
        forward.append(RMS_NORM.call(emit.arch, over.out, model.feedback_gain, over.out, block.rms_norm_eps))
    feedback = {"draft.feedback": Tap(over.out, rows.slots, scope)}
    return [
        draft_keys(emit, over, rows, scope, first_waits=first_waits, attends=True),
        Stage("draft.attn", tuple(attend), (*DRAFT, "EAGLE_DRAFT_ATTENTION_FMHA")),
        Stage("draft.mlp", tuple(forward), (*DRAFT, "EAGLE_DRAFT_FFN"), feedback),
    ]
