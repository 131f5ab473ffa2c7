"""A layer of gpt-oss-120b at its true size, stage by stage against transformers; and a head of its published sizes.

Vocabularies are small. Nobody decodes a layer's 128 experts at once, which would take 13 GB in fp32: memory stays
below 4.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agreeing_pairs import write_agreeing_pair
from random_pairs import MXFP4, write_random_pair
from rings import exhaustive_but
from safetensors.torch import load_file
from stored_experts import load_model_of_stored_experts
from tiny_engines import DYNAMIC_TREE, drafting_engine, new_tokens, random_prompts, tiny_engine, tokens_of

from eagle3core.config import EngineConfig
from eagle3core.geometry import DraftGeometry
from eagle3core.speculative import SpeculativeConfig
from eagle3core.step.kernel_limits import why_plain_torch
from lab.parity import hf_target, run_stage_parity

pytestmark = [pytest.mark.reference, pytest.mark.slow]

LAYER = {
    "family": "gpt_oss", "n_layers": 1, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn": 2880,
    "num_local_experts": 128, "num_experts_per_tok": 4, "quantization_config": MXFP4, "vocab": 512, "taps": (0, 1),
    "draft_vocab": 256, "draft_ffn": 17280, "eos": [],
}  # fmt: skip


@pytest.mark.exhaustive  # one minute of CPU, and a few
@pytest.mark.parametrize(("window", "n_prompt", "k"), [(3, 4, 1), (128, 150, 2)])
def test_every_stage_of_a_true_layer_holds(
    window: int, n_prompt: int, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the layer, and of a head of the 120B's sizes behind it."""
    pair = write_random_pair(tmp_path, **LAYER, sliding_window=window, dtype=torch.bfloat16, seed=3)
    monkeypatch.setattr(hf_target, "load_model", load_model_of_stored_experts)
    prompts = random_prompts([n_prompt], n_vocab=512)
    report = run_stage_parity(*pair, prompts=prompts, dtype="bfloat16", device="cpu", k=k, steps=1, prefill_chunk=64)
    assert report.passed, report.verdict
    stages = {cell.stage for cell in report.cells if cell.pass_name == "step0/verify"}
    assert {f"target.0.{name}" for name in ("attn", "router", "experts", "mlp")} <= stages


# Beside a head of those sizes a target of the 120B's width and depth, whose layers are narrow inside.
BEHIND_NARROW_LAYERS = {
    "family": "gpt_oss", "n_layers": 36, "hidden": 2880, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 32,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "vocab": 512, "draft_vocab": 256, "eos": [],
    "taps": (1, 17, 32), "convention": "output", "draft_heads": 64, "draft_kv_heads": 8,
}  # fmt: skip


@pytest.mark.parametrize("ffn", exhaustive_but([720], [17280, 720]))
def test_a_head_of_the_120bs_sizes_drafts_and_changes_no_token(ffn: int, tmp_path: Path) -> None:
    pair = write_agreeing_pair(tmp_path, **BEHIND_NARROW_LAYERS, draft_ffn=ffn, dtype=torch.bfloat16, seed=4)
    prompts = random_prompts([9, 4], n_vocab=512)
    plain = tokens_of(tiny_engine(pair, None, dtype="float32").generate(prompts, new_tokens(8)))
    for fields in ({"num_speculative_tokens": 3}, DYNAMIC_TREE):
        engine = drafting_engine(pair, fields, dtype="float32")
        responses = engine.generate(prompts, new_tokens(8))
        assert tokens_of(responses) == plain
        assert sum(step.n_accepted for each in responses for step in each.req_metrics.steps) > 0
    head = engine.draft.geometry
    assert isinstance(head, DraftGeometry)
    widths = (head.block.n_heads * head.block.head_dim, head.block.n_kv_heads * head.block.head_dim)
    assert (head.block.hidden_size, *widths, head.taps) == (2880, 4096, 512, (2, 18, 33))
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(pair[1] / "model.safetensors").items()}
    assert shapes["fc.weight"] == (2880, 8640)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (4096, 5760)
    dense = replace(engine.target.geometry, block=replace(engine.target.geometry.block, experts=None))
    how = EngineConfig(speculative_config=SpeculativeConfig(model="a head", num_speculative_tokens=3))
    assert why_plain_torch(dense, head, how, torch.bfloat16) is None
