"""Stages that a program never forms as tensors, read from the operands of its calls once a stage has run.

Ops are fused: rotation and cache writes happen inside the q, k, v map, norms inside the maps that read them. What a
stage would have been is still there in what those calls leave behind, and is put together here, in fp64 where a
formula is needed, so that next to nothing is added to the error that is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels import Call
from eagle3core.kernels.gemm import unpack_weight
from eagle3core.step import DeviceState, Enqueue, Program, Replayer, Stage, Staged, Tap
from eagle3core.trace import Trace
from lab.parity.by_request import Owners, RequestTrace
from lab.parity.names import split_name

# Of a prompt the draft's keys and values are all that is needed, so nothing past them is computed; and no q, which is
# left out of the stages that would have it.
NOT_COMPUTED = ("prefill/draft.attn", "prefill/draft.mlp", "prefill/draft.feedback")
WITHOUT_Q = ("prefill/draft.qkv", "prefill/draft.rope")
# How each derived stage is made; the report prints these words.
DERIVED = {
    "draft.rope": "q from its buffer, k from the cache after the write",
    "draft.qkv": "q and k made of the q, k, v map's operands in fp64, un-normed; v from the cache after the write",
    "draft.positions": "operand of the call that rotates q and k",
    "draft.attn": "residual stream after attention, which the o map writes; compared with fc + attention's output",
    "draft.norm": "what the head reads: scaled stream times rsqrt of its partial sums, in fp64",
    "target.norm": "what the head reads: scaled stream times rsqrt of its partial sums, in fp64",
    "target.taps": "the captured streams side by side, as target.<i>.mlp tapped them",
    "tree.parents": "operand of the acceptance",
    "draft.feedback_in": "the state fed, which chain passes tap as draft.fc",
    "draft.mlp": "only its sum with the residual stream exists: compared as draft.feedback",
}


class TappingReplayer:
    """Runs programs as another replayer does; stage by stage, it hands every stage to a `RequestTrace`.

    Args:
        inner: what runs them.
        state: that the programs work on; it says whose rows are whose.
    """

    def __init__(self, inner: Replayer, state: DeviceState) -> None:
        self.inner, self.state = inner, state
        self._of_pass: Owners | None = None  # whose rows the newest pass over prompts works on

    def whole(self, program: Program) -> Enqueue:
        """The program at once, without taps."""
        return self.inner.whole(program)

    def staged(self, program: Program) -> Staged:
        """The program stage by stage, each followed by its own taps and the derived ones."""
        bare = [self.inner.staged((replace(stage, taps={}),)) for stage in program]
        parts = list(zip(bare, program, passes_of(program), strict=True))
        owners = Owners(program, self.state)

        def play(trace: Trace) -> None:
            assert isinstance(trace, RequestTrace), "stages are recorded by request"
            self._of_pass = owners if owners.opens else self._of_pass
            whose = self._of_pass if owners.goes_on else owners
            assert whose is not None, "a pass over prompts is opened before the draft reads it"
            for run, stage, at in parts:
                run(trace)
                for name, tap in (*stage.taps.items(), *derived(stage, at)):
                    trace.keep(name, tap, whose.read())

        return play


@dataclass(frozen=True)
class PassOf:
    """The pass that a stage belongs to: its scope, and the slots of its rows."""

    scope: str
    slots: Tensor | None


def passes_of(program: Program) -> list[PassOf]:
    """By stage, the pass of the newest tap so far."""
    found, now = [], PassOf("", None)
    for stage in program:
        for tap in stage.taps.values():
            now = PassOf(tap.scope, tap.slots)
        found.append(now)
    return found


def derived(stage: Stage, at: PassOf) -> Iterator[tuple[str, Tap]]:
    """Stages to be read from what `stage` has just left behind."""
    if not stage.calls:
        return
    if stage.name == "draft.qkv":
        write = next(write for write in map(cache_write, stage.calls) if write is not None)
        projected, rotated = _projections(_call(stage, "gemm").operands, write)
        if not at.scope:  # a prompt's, as `WITHOUT_Q` has them
            projected, rotated = projected[:, write.q[0].numel() :], rotated[:, write.q[0].numel() :]
        yield "draft.positions", Tap(write.positions, at.slots, at.scope)
        yield "draft.qkv", Tap(projected, at.slots, at.scope)
        yield "draft.rope", Tap(rotated, at.slots, at.scope)
    elif stage.name == "draft.attn":
        yield "draft.attn", Tap(_call(stage, "gemm").operands["y"], at.slots, at.scope)
    elif stage.name in ("draft.head", "target.head"):
        product = _call(stage, "gemm").operands
        yield stage.name.replace("head", "norm"), Tap(_normed(product), at.slots, at.scope)
    elif stage.name == "accept" and any(call.op == "accept" for call in stage.calls):  # a prefill's end has no tree
        yield "tree.parents", Tap(_call(stage, "accept").operands["parents"].flatten())


def _call(stage: Stage, op: str) -> Call:
    return next(call for call in stage.calls if call.op == op)


@dataclass(frozen=True)
class CacheWrite:
    """What a call leaves that rotates q and k and writes k and v.

    Attributes:
        q: `[n, H, D]` rotated. k, v: `[n_blocks, K, block, D]`. positions, slots: `[n]`.
        table: `[positions, D / 2, 2]` cos and sin.
        factors: `[2]` what k and v were multiplied by, in a cache of FP8.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slots: Tensor
    table: Tensor
    factors: Tensor | None = None

    def kept(self) -> tuple[Tensor, Tensor]:
        """k and v `[n, K * D]` of every row as attention will read them, in the dtype of q; padding reads any row."""
        block = self.k.shape[2]
        slot = self.slots.clamp_min(0).long()
        k, v = (pages[slot // block, :, slot % block].flatten(1) for pages in (self.k, self.v))
        if self.factors is None:
            return k, v
        wide = (part.double() / factor for part, factor in zip((k, v), self.factors.double(), strict=True))
        k, v = (part.to(self.q.dtype) for part in wide)
        return k, v


def cache_write(call: Call) -> CacheWrite | None:
    """Of a map of q, k and v, or of the launch behind it where heads are normed first; None of any other call."""
    of = call.operands
    if call.op == "rope":
        q, k, v = of["q"], of["k_blocks"], of["v_blocks"]
    elif call.op == "gemm" and of.get("slots") is not None:
        k, v = of["second"], of["third"]
        q = of["y"].view(len(of["y"]), of["q_heads"], k.shape[-1])
    else:
        return None
    return CacheWrite(q, k, v, of["positions"], of["slots"], of["table"], of.get("factors"))


def _projections(product: Mapping[str, Any], write: CacheWrite) -> tuple[Tensor, Tensor]:
    """q, k, v side by side before norm and rotation, and rotated q and k side by side, of every row; without q where
    the map has none.

    The map rotates what it sums, so q and k exist in rotated form only. Before it they are made of its operands, and
    what the map itself gets wrong shows in the rotated ones; v, which is not rotated, is read where it was written.
    """
    k, v = write.kept()  # rows of padding are dropped by whoever records
    weight = unpack_weight(product["w"], product["epilogue"], product["k"]) if product["packed"] else product["w"]
    sums = product["x"].double() @ weight.double()[: -v.shape[1]].T
    if "bias" in product:
        sums = sums + product["bias"].double()[: -v.shape[1]]
    return torch.cat([sums, v.double()], dim=1), torch.cat([write.q.flatten(1), k], dim=1)


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
            named[f"{pass_name}/draft.feedback_in"] = value.clone()  # files hold no tensor twice
    for pass_name in dict.fromkeys(split_name(name)[0] for name in tensors):
        streams = [f"{pass_name}/target." + (f"{layer - 1}.mlp" if layer else "embed") for layer in taps]
        if streams and all(stream in tensors for stream in streams):  # a plain engine captures none
            named[f"{pass_name}/target.taps"] = torch.cat([tensors[stream] for stream in streams], dim=-1)
    return named


def as_programs_have_it(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a plain model under what a program has by the same names, where that differs.

    Without the stage that it has to be added to, an attention's output is left out.
    """
    kept = {}
    for name, value in tensors.items():
        pass_name, stage = split_name(name)
        before = tensors.get(f"{pass_name}/draft.fc")
        if name in NOT_COMPUTED or stage == "draft.mlp" or (stage == "draft.attn" and before is None):
            continue
        kept[name] = before + value if stage == "draft.attn" and before is not None else value
    return without_q(kept)


def without_q(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A recording without the q of the draft's pass over the prompt, which programs once made."""
    if not all(name in tensors for name in WITHOUT_Q):
        return tensors
    projected, rotated = (tensors[name] for name in WITHOUT_Q)
    width = projected.shape[-1] - rotated.shape[-1]  # of v, and so of k
    return {**tensors, WITHOUT_Q[0]: projected[..., -2 * width :], WITHOUT_Q[1]: rotated[..., -width:]}
