"""Stages of the kernels' path: their ranges, taps, weights and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import NANO, device_engine, engine_by_meaning, packed_pair
from random_pairs import write_random_pair
from tiny_engines import Pair, new_tokens, random_prompts, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3core import Engine, EngineConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.kernels.gemm.order.weight import unpack_weight
from eagle3core.step.replay import EagerReplayer, compute
from eagle3core.step.sizes import DeviceSizes, StateShape
from eagle3core.step.state import new_device_state, state_bytes
from eagle3core.step.tree import chain_tree
from eagle3core.trace import RecordingTrace, StagedTrace
from eagle3core.weights import PackedMlp

pytestmark = pytest.mark.reference


PUBLIC = {
    "EagleModule::forward", "EAGLE_DRAFT_ATTENTION_FMHA", "EAGLE_DRAFT_FFN", "EAGLE_DRAFT_LM_HEAD", "EAGLE_TREE_MASKS",
    "BASE_DECODE_STEP", "EAGLE_ACCEPT", "EAGLE_TAIL_COMMIT", "EAGLE::KVCacheRewind",
}  # fmt: skip


class Ranges(StagedTrace):
    """Which ranges were opened, and around how many calls."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.calls: dict[str, int] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.open.append(name)
        self.calls.setdefault(name, 0)
        yield
        self.open.pop()


MADE = {"empty", "zeros", "full", "new_empty", "scalar_tensor", "_to_copy", "copy_", "fill_"}
CUT = {"view", "slice", "select", "expand", "detach", "alias"}


class SizesAlone(TorchDispatchMode):
    """On the meta device tensors are made and cut only; torch would import its compiler for arithmetic there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_meta:
            name = str(func).split(".")[1]
            assert name in MADE | CUT, name
        return result


def test_staged_steps_bracket_every_launch_by_the_public_ranges_and_change_no_token(nano_pair: Pair) -> None:
    prompts = random_prompts([9, 70], n_vocab=256)
    trace, unbracketed = Ranges(), []

    def noted(calls: Any) -> None:
        if not PUBLIC & set(trace.open):
            unbracketed.append(calls)
        for name in trace.open:
            trace.calls[name] += len(calls)
        compute(calls)

    made = device_engine(nano_pair, 2, EagerReplayer(noted), session_len=256, trace=trace)
    assert tokens_of(made.generate(prompts, new_tokens(8))) == tokens_of(
        engine_by_meaning(nano_pair, 2).generate(prompts, new_tokens(8))
    )
    assert unbracketed == []
    assert set(trace.calls) >= PUBLIC
    # A rewind is a shorter length, which the kernel of the commit writes.
    assert {name for name in PUBLIC if trace.calls[name] == 0} == {"EAGLE::KVCacheRewind"}


def test_stages_leave_the_taps_of_plain_torch_in_fp32(nano_pair: Pair) -> None:
    prompt = random_prompts([70], n_vocab=256)
    ours, theirs = RecordingTrace(), RecordingTrace()
    engine_by_meaning(nano_pair, 3, trace=ours).generate(prompt, new_tokens(6))
    config = dataclasses.replace(engine_by_meaning(nano_pair, 3).config, dtype="float32")
    Engine.from_pretrained(nano_pair[0], config, trace=theirs).generate(prompt, new_tokens(6))
    shared = [name for name in theirs.tensors if name in ours.tensors and not name.endswith("tokens")]
    for prefix in ("prefill/target.1.mlp", "prefill/target.head", "prefill/draft.fc", "step0/extend/draft.feedback",
                   "step0/chain1/draft.head", "step0/verify/target.0.attn", "step1/verify/target.head"):  # fmt: skip
        assert prefix in shared
    for name in shared:
        exact, got = theirs.tensors[name].float(), ours.tensors[name].float()
        assert got.shape == exact.shape, name
        if got.is_floating_point():
            assert (got - exact).abs().max() <= 0.05 * exact.abs().max(), name


def test_packed_weights_are_the_checkpoints(nano_pair: Pair) -> None:
    plain = load_target(nano_pair[0], dtype=torch.bfloat16)
    weights = dict(plain.weights)
    target, draft = packed_pair(nano_pair)
    assert draft is not None
    layer = target.layers[1]
    prefix = "model.layers.1."
    for made, names in ((layer.qkv, "qkv"), (layer.o, "o")):
        expected = torch.cat([weights[f"{prefix}self_attn.{name}_proj.weight"] for name in names])
        assert torch.equal(unpack_weight(made.weight, made.epilogue, made.k), expected)
    expected = torch.cat([weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert isinstance(layer.mlp, PackedMlp)
    gate_up = layer.mlp.gate_up
    assert torch.equal(unpack_weight(gate_up.weight, gate_up.epilogue, 64), expected)
    fc = load_draft(nano_pair[1], plain.geometry, dtype=torch.bfloat16).weights["fc.weight"]
    assert torch.equal(unpack_weight(draft.fc.weight, draft.fc.epilogue, 192), fc)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie": True, "vocab": 250, "draft_vocab": 60}, {"draft_hidden": 128, "draft_heads": 4, "draft_kv_heads": 2},
        *(pytest.param(changes, marks=pytest.mark.slow) for changes in (
            {"own_head": False, "draft_vocab": None}, {"heads": 4, "kv_heads": 2},
            {"tie": True}, {"vocab": 250, "draft_vocab": 60}, {"bias": True}, {"draft_vocab": None}, {"taps": (0, 2)},
        )),
    ],
    ids=lambda changes: ", ".join(changes),
)  # fmt: skip
def test_other_geometries_give_the_baselines_tokens(tmp_path: Path, changes: dict[str, Any]) -> None:
    pair = write_random_pair(tmp_path, **{**NANO, **changes, "seed": 5})
    vocab = changes.get("vocab", 256)
    prompts = random_prompts([4, 11, 1], n_vocab=vocab)
    expected = tokens_of(engine_by_meaning(pair, None).generate(prompts, new_tokens(16)))
    exact = EngineConfig(session_len=256, device="cpu", dtype="float32")
    theirs = tokens_of(Engine.from_pretrained(pair[0], exact).generate(prompts, new_tokens(16)))
    assert [tokens[:3] for tokens in theirs] == [tokens[:3] for tokens in expected]
    assert tokens_of(engine_by_meaning(pair, 3).generate(prompts, new_tokens(16))) == expected


def test_a_states_bytes_are_counted_without_allocating_it(nano_pair: Pair) -> None:
    target, draft = packed_pair(nano_pair)
    assert draft is not None
    shape = StateShape(target.geometry, draft.geometry, torch.bfloat16, torch.device("cpu"))
    sizes = DeviceSizes(2, 128, 140, chain_tree(3), chunk=64, span=8)
    cached, others = state_bytes("sm_90a", shape, sizes)
    assert cached == 2 * 3 * (2 * 3) * 64 * 1 * 64 * 2  # k and v, 2 + 1 layers, blocks, tokens, heads, size, bytes
    with SizesAlone():
        assert state_bytes("sm_90a", shape, sizes) == (cached, others)
    state = new_device_state("sm_90a", shape, sizes)
    assert state.k.nbytes + state.v.nbytes == cached * 2 // 3
    assert others > state.act.partial.nbytes + state.head.logits.nbytes
