"""`config.json` and `model.safetensors` as SafeAILab, SpecForge, ModelOpt and speculators publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3core.checkpoint.taps import CONVENTION_KEY, TAP_KEY
from eagle3core.checkpoint.writing.head import Head
from eagle3core.geometry import RopeGeometry

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
_ARCHITECTURES = {"speculators": "Eagle3DraftModel"}
_NUMBERED = ("modelopt", "speculators")  # call their layer layers.0


def write_flat(head: Head, directory: Path, form: str) -> dict[str, str]:
    """Both files; gives the stored name of every tensor."""
    config = _speculators(head) if form == "speculators" else _flat(head, form)
    config["architectures"] = [_ARCHITECTURES.get(form, "LlamaForCausalLMEagle3")]
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors = {**head.weights, **_maps(head, form)}
    names = {name: name.replace("midlayer.", "layers.0.") if form in _NUMBERED else name for name in tensors}
    stored = {names[name]: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return names


def _layer(head: Head, form: str) -> dict[str, Any]:
    """Keys of the decoder layer."""
    geometry, block, variant = head.geometry, head.geometry.block, head.geometry.variant
    keys: dict[str, Any] = {
        "model_type": "llama", "hidden_size": block.hidden_size, "intermediate_size": block.intermediate_size,
        "num_hidden_layers": 1, "num_attention_heads": block.n_heads, "num_key_value_heads": block.n_kv_heads,
        "head_dim": block.head_dim, "hidden_act": _ACTIVATIONS.get(variant.activation, variant.activation),
        "rms_norm_eps": block.rms_norm_eps, "vocab_size": geometry.vocab_size,
        "max_position_embeddings": head.max_position, "attention_bias": variant.qkv_bias, "mlp_bias": variant.mlp_bias,
        "tie_word_embeddings": False, **_rope(block.rope, form),
    }  # fmt: skip
    if geometry.window:
        slides = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
        keys |= {**slides, "sliding_window": geometry.window}
    return keys


def _rope(rope: RopeGeometry, form: str) -> dict[str, Any]:
    kind, scaling = rope.kind, dict[str, Any]()
    trained = {"original_max_position_embeddings": rope.original_max_position}
    if kind == "default":
        return {"rope_theta": rope.theta}
    if kind == "llama3":
        scaling = {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor, **trained}
    if kind == "yarn":
        scaling = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate, **trained}
    if kind == "longrope":
        lists = {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        scaling = {**lists, **trained}
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    named = "type" if form == "safeailab" else "rope_type"  # the official code knows no other key
    return {"rope_theta": rope.theta, "rope_scaling": {named: kind, "factor": rope.factor, **scaling}}


def _head(head: Head) -> dict[str, Any]:
    """Keys of every head, at the top."""
    geometry = head.geometry
    keys: dict[str, Any] = {
        "draft_vocab_size": geometry.draft_vocab_size,
        "torch_dtype": str(head.weights["norm.weight"].dtype).removeprefix("torch."),
    }
    # With equal widths the official loader takes the key as a sign to make up an embedding.
    if geometry.target_hidden_size != geometry.block.hidden_size:
        keys["target_hidden_size"] = geometry.target_hidden_size
    if geometry.variant.fc_bias:
        keys["bias"] = True
    if geometry.variant.logit_scale != 1.0:
        keys["logit_scale"] = geometry.variant.logit_scale
    return keys


def _flat(head: Head, form: str) -> dict[str, Any]:
    variant = head.geometry.variant
    keys = {**_layer(head, form), **_head(head)}
    if form == "safeailab":
        return keys
    inner: dict[str, Any] = {"use_aux_hidden_state": not variant.reads_last}
    if head.taps_known and not variant.reads_last:
        inner |= {TAP_KEY: [tap - 1 for tap in head.geometry.taps], CONVENTION_KEY: "output"}
    if variant.fusion_norm == "all":
        inner["norm_before_fc"] = True
    if variant.fusion_norm == "each":
        keys["fc_norm"] = True
    if variant.normed_residual:
        keys["norm_before_residual"] = True
    if variant.feeds_normed:
        inner["return_hidden_post_norm"] = True
    if form == "modelopt":
        inner |= {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    if len(head.geometry.taps) != 3 and not variant.reads_last:
        keys["num_aux_hidden_states"] = len(head.geometry.taps)
    return {**keys, "eagle_config": inner}


def _speculators(head: Head) -> dict[str, Any]:
    variant = head.geometry.variant
    taps = {TAP_KEY: list(head.geometry.taps)} if head.taps_known else {}
    return {
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": _layer(head, "speculators"),
        **_head(head),
        "norm_before_residual": variant.normed_residual,
        "norm_before_fc": variant.fusion_norm == "all",
        "fc_norm": variant.fusion_norm == "each",
        "norm_output": variant.feeds_normed,
        **taps,
    }


def _maps(head: Head, form: str) -> dict[str, Tensor]:
    """Offsets and mask, as the format's own files have them."""
    rows, vocab = head.geometry.draft_vocab_size, head.geometry.vocab_size
    if head.draft_to_target is None:
        full = {"d2t": torch.zeros(rows, dtype=torch.int64), "t2d": torch.ones(vocab, dtype=torch.bool)}
        return full if form == "specforge" else {}
    maps = {"d2t": head.draft_to_target - torch.arange(rows)}
    if form != "modelopt":
        maps["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, head.draft_to_target, True)
    return maps
