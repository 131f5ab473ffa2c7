"""Random pairs whose draft is an EAGLE-1 head, in the layout that SafeAILab publishes such heads in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from random_pairs import rewrite_config
from safetensors.torch import load_file, save_file
from tiny_engines import Pair, write_tiny_pair


def write_eagle_pair(
    directory: Path, *, bias: bool = True, qkv_bias: bool = False, own_embedding: bool = False, seed: int = 0,
    **geometry: Any,
) -> Pair:  # fmt: skip
    """A target as `write_tiny_pair` makes it, and a head of its width.

    Args:
        bias: `fc.bias`; SafeAILab's code takes an absent key as true. qkv_bias: of q, k and v.
        own_embedding: the file brings a table, which differs from the target's.
    """
    target, draft = write_tiny_pair(directory, **{**geometry, "seed": seed, "draft_vocab": None})
    path, random = draft / "model.safetensors", torch.Generator().manual_seed(seed + 1)
    old = load_file(path)
    hidden = old["fc.weight"].shape[0]
    dtype = old["fc.weight"].dtype
    names = [name for name in old if name.startswith("midlayer.") and not name.endswith("norm.weight")]
    weights = {name.replace("midlayer.", "layers.0."): old[name] for name in names}
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj"
        weights[f"{name}.weight"] = weights[f"{name}.weight"][:, :hidden].contiguous() * 2**0.5
        if qkv_bias:
            weights[f"{name}.bias"] = torch.randn(len(weights[f"{name}.weight"]), generator=random).to(dtype) / 4
    weights["layers.0.post_attention_layernorm.weight"] = old["midlayer.post_attention_layernorm.weight"]
    fc = torch.randn(hidden, 2 * hidden, generator=random) / (2 * hidden) ** 0.5
    weights["fc.weight"] = fc.to(dtype)
    if bias:
        weights["fc.bias"] = torch.randn(hidden, generator=random).to(dtype) / 4
    if own_embedding:
        table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        weights["embed_tokens.weight"] = table + 0.3 * torch.randn(table.shape, generator=random).to(dtype)
    save_file(weights, path, metadata={"format": "pt"})
    rewrite_config(
        draft, architectures=["LlamaForCausalLM"], eagle_config=None, draft_vocab_size=None,
        bias=None if bias else False, qkv_bias=qkv_bias or None, eagle_aux_hidden_state_layer_convention=None,
    )  # fmt: skip
    assert "eagle_config" not in json.loads((draft / "config.json").read_text())
    return target, draft
