"""Bugs in the target and in the acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle3core.kernels import Call
from eagle3core.weights import PackedExperts, PackedMlp, PackedTarget
from lab.parity.faults.fault import Fault, Place, before, edited, rolled_rows


def _shifted_embedding(target: PackedTarget) -> PackedTarget:
    return replace(target, embedding=target.embedding.roll(1, dims=0))


def _large_eps(target: PackedTarget) -> PackedTarget:
    geometry = target.geometry
    return replace(target, geometry=replace(geometry, block=replace(geometry.block, rms_norm_eps=0.1)))


def _default_rope(target: PackedTarget) -> PackedTarget:
    geometry = target.geometry
    block = replace(geometry.block, rope=replace(geometry.block.rope, kind="default"))
    return replace(target, geometry=replace(geometry, block=block))


def _swapped_gate_and_up(target: PackedTarget) -> PackedTarget:
    def swap(matrix: Tensor) -> Tensor:
        gate, up = matrix.chunk(2)
        return torch.cat([up, gate])

    mlp = target.layers[0].mlp
    if isinstance(mlp, PackedExperts):
        return target
    return with_first_mlp(target, replace(mlp, gate_up=edited(mlp.gate_up, swap)))


def with_first_mlp(target: PackedTarget, mlp: PackedMlp | PackedExperts) -> PackedTarget:
    """The target with another feed-forward in its first layer."""
    first = replace(target.layers[0], mlp=mlp)
    return replace(target, layers=(first, *target.layers[1:]))


def _neighbouring_tap(target: PackedTarget) -> PackedTarget:
    if not target.taps:  # a plain engine captures nothing
        return target
    last = target.taps[-1]
    moved = last + 1 if last < target.geometry.n_layers else last - 1
    return replace(target, taps=(*target.taps[:-1], moved))


def _scaled_norm(target: PackedTarget) -> PackedTarget:
    return replace(target, final_gain=target.final_gain * 1.25)


def _rolled_head(target: PackedTarget) -> PackedTarget:
    return replace(target, head=edited(target.head, rolled_rows(target.geometry.vocab_size)))


def _second_best(at: Place, call: Call) -> Sequence[Call]:
    if not (at.stage == "accept" and at.batch and call.op == "argmax_of_partials"):
        return [call]
    best = call.operands["best"]
    return before(call, lambda: best.scatter_(1, best.argmax(dim=1, keepdim=True), float("-inf")))


TARGET_FAULTS = (
    Fault(
        "shifted_embedding", "the token table is one row off", "target.embed", "prefill", target=_shifted_embedding
    ),
    Fault("wrong_rms_eps", "RMSNorm uses an epsilon of 0.1", "target.0.attn", "prefill", target=_large_eps),
    Fault(
        "ignored_target_rope_scaling", "the target's RoPE scaling is ignored", "target.0.attn", "prefill",
        needs="a target with scaled RoPE", target=_default_rope,
    ),
    Fault(
        "swapped_gate_up", "gate and up of the first layer are swapped", "target.0.mlp", "prefill",
        target=_swapped_gate_and_up,
    ),
    Fault("wrong_tap", "the last tap is one layer off", "target.taps", "prefill", target=_neighbouring_tap),
    Fault("scaled_target_norm", "the final norm has the wrong gain", "target.norm", "prefill", target=_scaled_norm),
    Fault("rolled_target_head", "the head's rows are one token off", "target.head", "prefill", target=_rolled_head),
    Fault(
        "second_best", "the best token of another group of 16 is taken", "accept.tokens", "step", change=_second_best
    ),
)  # fmt: skip
