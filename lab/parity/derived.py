"""Stages that a program never forms as tensors, read from the operands of its calls once a stage has run.

Ops are fused: rotation and cache writes happen inside the q, k, v map, norms inside the maps that read them. What a
stage would have been is still there in what those calls leave behind, and is put together here, in fp64 where a
formula is needed, so that next to nothing is added to the error that is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.card import Call
from eagle3core.step.program import Program, Stage, Tap
from eagle3core.step.replay import Enqueue, Replayer, Staged, offer
from eagle3core.trace import Trace
from lab.parity.names import split_name

# Of a prompt the draft's keys and values are all that is needed, so nothing past them is computed.
NOT_COMPUTED = ("prefill/draft.attn", "prefill/draft.mlp", "prefill/draft.feedback")
# How each derived stage is made; the report prints these words.
DERIVED = {
    "draft.rope": "q from its buffer, k from the cache after the write",
    "draft.qkv": "q and k as draft.rope has them, turned back in fp64 by the kernels' own table; v from the cache",
    "draft.positions": "operand of the q, k, v map",
    "draft.attn": "residual stream after attention, which the o map writes; compared with fc + attention's output",
    "draft.norm": "what the head reads: scaled stream times rsqrt of its partial sums, in fp64",
    "target.norm": "what the head reads: scaled stream times rsqrt of its partial sums, in fp64",
    "target.taps": "the captured streams side by side, as target.<i>.mlp tapped them",
    "tree.parents": "operand of the acceptance",
    "draft.feedback_in": "the state fed, which chain passes tap as draft.fc",
    "draft.mlp": "only its sum with the residual stream exists: compared as draft.feedback",
}


class TappingReplayer:
    """Runs programs as another replayer does, and offers the derived stages when they run one by one."""

    def __init__(self, inner: Replayer) -> None:
        self.inner = inner

    def whole(self, program: Program) -> Enqueue:
        """The program at once, without taps."""
        return self.inner.whole(program)

    def staged(self, program: Program) -> Staged:
        """The program stage by stage, each followed by its own taps and the derived ones."""
        parts = [(self.inner.staged((stage,)), stage, at) for stage, at in zip(program, _passes(program), strict=True)]

        def play(trace: Trace) -> None:
            for run, stage, at in parts:
                run(trace)
                for name, tap in derived(stage, at):
                    offer(trace, name, tap)

        return play


@dataclass(frozen=True)
class _PassOf:
    """The pass that a stage belongs to: its scope, and the slots of its rows."""

    scope: str
    slots: Tensor | None


def _passes(program: Program) -> list[_PassOf]:
    """By stage, the pass of the newest tap so far."""
    found, now = [], _PassOf("", None)
    for stage in program:
        for tap in stage.taps.values():
            now = _PassOf(tap.scope, tap.slots)
        found.append(now)
    return found


def derived(stage: Stage, at: _PassOf) -> Iterator[tuple[str, Tap]]:
    """Stages to be read from what `stage` has just left behind."""
    if not stage.calls:
        return
    last = stage.calls[-1].operands
    if stage.name == "draft.qkv":
        rotated, turned_back = _projections(last)
        yield "draft.positions", Tap(last["positions"], at.slots, at.scope)
        yield "draft.qkv", Tap(turned_back, at.slots, at.scope)
        yield "draft.rope", Tap(rotated, at.slots, at.scope)
    elif stage.name == "draft.attn":
        yield "draft.attn", Tap(last["y"], at.slots, at.scope)
    elif stage.name in ("draft.head", "target.head"):
        product = _call(stage, "gemm").operands
        yield stage.name.replace("head", "norm"), Tap(_normed(product), at.slots, at.scope)
    elif stage.name == "accept" and any(call.op == "accept" for call in stage.calls):  # a prefill's end has no tree
        yield "tree.parents", Tap(_call(stage, "accept").operands["parents"].flatten())


def _call(stage: Stage, op: str) -> Call:
    return next(call for call in stage.calls if call.op == op)


def _projections(last: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Rotated q and k side by side, and q, k, v side by side before rotation, of every row."""
    q, slots, table = last["y"], last["slots"], last["table"][last["positions"].long()]
    heads = (last["q_heads"], last["kv_heads"])
    block = last["second"].shape[2]
    slot = slots.clamp_min(0).long()  # rows of padding are dropped by whoever records
    k, v = (pages[slot // block, :, slot % block].flatten(1) for pages in (last["second"], last["third"]))
    back = [_turned_back(rows, n, table) for rows, n in zip((q, k), heads, strict=True)]
    return torch.cat([q, k], dim=1), torch.cat([*back, v.double()], dim=1)


def _turned_back(rows: Tensor, n_heads: int, table: Tensor) -> Tensor:
    """`rows: [R, H * D]` before their rotation by `table: [R, D / 2, 2]`, in fp64."""
    cos, sin = (part[:, None] for part in table.double().unbind(-1))
    first, second = rows.double().view(len(rows), n_heads, -1).chunk(2, dim=-1)
    length = cos.square() + sin.square()  # not 1 where the table carries a scale
    turned = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
    return (turned / torch.cat([length, length], dim=-1)).flatten(1)


def _normed(product: Mapping[str, Any]) -> Tensor:
    """The normed rows whose product with the head's weights is made."""
    scaled = product["x"].double()
    mean = product["sums"][: len(scaled)].double().sum(dim=1, keepdim=True) / product["k"]
    normed: Tensor = scaled * torch.rsqrt(mean + product["eps"])
    return normed


def with_derived(tensors: dict[str, Tensor], taps: Sequence[int], widths: dict[str, int]) -> dict[str, Tensor]:
    """A recording of a program's taps under the names of docs/engine.md.

    Args:
        taps: layers whose input the draft reads. widths: columns of logits that are no padding.
    """
    named = {}
    for name, value in tensors.items():
        pass_name, stage = split_name(name)
        if stage in widths:
            value = value[:, : widths[stage]]
        if stage == "accept.tokens":
            value = value[value >= 0]
        named[name] = value
        if stage == "draft.fc" and "/chain" in pass_name:
            named[f"{pass_name}/draft.feedback_in"] = value
    for pass_name in dict.fromkeys(split_name(name)[0] for name in tensors):
        streams = [f"{pass_name}/target." + (f"{layer - 1}.mlp" if layer else "embed") for layer in taps]
        if all(stream in tensors for stream in streams):
            named[f"{pass_name}/target.taps"] = torch.cat([tensors[stream] for stream in streams], dim=-1)
    return named


def as_programs_have_it(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reference's tensors under what a program has by the same names, where that differs."""
    kept = {}
    for name, value in tensors.items():
        pass_name, stage = split_name(name)
        if name in NOT_COMPUTED or stage == "draft.mlp":
            continue
        kept[name] = tensors[f"{pass_name}/draft.fc"] + value if stage == "draft.attn" else value
    return kept
