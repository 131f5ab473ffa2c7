"""A step's layers with experts on the kernels, lane by lane, beside what their launches mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import device_engine, packed_pair, write_nano_pair
from emulated_steps import LANES, MEANING
from quantised_heads import write_fp8
from random_pairs import MXFP4
from rings import exhaustive_but
from tiny_engines import Pair, new_tokens, random_prompts

from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.experts.matrices import OrderedMatrices
from eagle3core.kernels.layer.embedding import partial_squares_reference
from eagle3core.step.buffers import Sizes, new_activations
from eagle3core.step.passes import Emitter
from eagle3core.weights import PackedExperts

pytestmark = pytest.mark.emulated

QWEN: dict[str, Any] = {
    "family": "qwen3_moe", "n_layers": 1, "taps": (0, 1), "vocab": 64, "moe_intermediate_size": 32, "seed": 5,
    "rope": {"rope_theta": 1e6},
}  # fmt: skip
GPT_OSS: dict[str, Any] = {"family": "gpt_oss", "n_layers": 1, "taps": (0, 1), "vocab": 64, "ffn": 32, "seed": 5}

WIDE_QWEN: dict[str, Any] = {**QWEN, "hidden": 192, "num_experts": 4}  # gate and up read more than a block of 128


def in_blocks(pair: Pair, folder: Path) -> Pair:
    """The pair with its target in FP8, a scale for 16 rows by 128 columns."""
    return write_fp8(pair[0], folder / "blocks", "fp8", block=(16, 128)), pair[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    exhaustive_but(
        ["gpt_oss in MXFP4", "qwen3_moe in FP8 by block"],
        ["qwen3_moe", "gpt_oss in MXFP4", "qwen3_moe in FP8 by block"],
    ),
)
def test_drafts_change_no_token_on_the_kernels_which_are_those_of_their_meaning(kind: str, tmp_path: Path) -> None:
    how = {"qwen3_moe": QWEN, "gpt_oss in MXFP4": {**GPT_OSS, "quantization_config": MXFP4}}
    pair = write_nano_pair(tmp_path, **how.get(kind, WIDE_QWEN))
    if kind not in how:
        pair = in_blocks(pair, tmp_path)
    prompt, n = random_prompts([5], n_vocab=64, seed=2), new_tokens(3)
    plain, drafted, meaning = (
        device_engine(pair, k, by, n_slots=1, chunk=8).generate(prompt, n)[0].token_ids
        for k, by in ((None, LANES), (2, LANES), (None, MEANING))
    )
    assert plain == drafted == meaning


@pytest.mark.parametrize(("stored", "form"), [("plain", "plain"), ("MXFP4", "mxfp4"), ("FP8 by block", "fp8_blocks")])
def test_the_experts_of_a_layer_are_those_of_their_meaning(stored: str, form: str, tmp_path: Path) -> None:
    how = {"quantization_config": MXFP4} if stored == "MXFP4" else {}
    pair = write_nano_pair(tmp_path, **(WIDE_QWEN if form == "fp8_blocks" else GPT_OSS), **how)
    if form == "fp8_blocks":
        pair = in_blocks(pair, tmp_path)
    target, _ = packed_pair(pair, drafts=False)
    block, layer = target.geometry.block, target.layers[0]
    assert isinstance(layer.mlp, PackedExperts)
    assert isinstance(layer.mlp.gate_up, OrderedMatrices)
    assert layer.mlp.gate_up.form == form
    act = new_activations("sm_90a", block, Sizes(5, ((1, 5),), 16), torch.bfloat16, torch.device("cpu"), (2, 2))
    act.middle.copy_(torch.randn(5, block.hidden_size, generator=torch.Generator().manual_seed(0)))
    act.sums.copy_(partial_squares_reference(act.middle))
    scaled, sums, out = act.middle * layer.mlp_gain, act.sums.clone(), {}
    emit = Emitter("sm_90a")
    for by in ("meaning", "lanes"):
        act.scaled.copy_(scaled)
        act.sums.copy_(sums)
        route = emit.route(layer.mlp, act, 5, block)
        for call in [route, *emit.mlp(layer, act, 5, act.stream, target.final_gain, block)]:
            if by == "meaning":
                call.meaning()
            else:
                emulator.execute(call.launches)
        assert act.experts is not None
        out[by] = [t.clone() for t in (act.experts.chosen, act.experts.shares, act.stream, act.scaled, act.sums)]
    assert torch.equal(out["lanes"][0], out["meaning"][0])
    for ours, theirs in zip(out["lanes"][1:], out["meaning"][1:], strict=True):
        assert float((ours - theirs).abs().max()) <= 2**-6 * float(theirs.abs().max())
