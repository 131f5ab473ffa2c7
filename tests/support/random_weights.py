"""Random weights of targets and drafts by name, scaled so that logits spread and greedy output varies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Named = Iterator[tuple[str, Tensor]]


def weights_of_target(config: dict[str, Any], random: torch.Generator) -> Named:
    """Of a target with such a config, under the names that `AutoModelForCausalLM` reads."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", table(vocab, hidden, random)
    for i in range(config["num_hidden_layers"]):
        for name, tensor in _gpt_oss_parts(config, hidden, random):
            yield f"model.layers.{i}.{name}", tensor
        for name, tensor in (*_layer(config, hidden, random, i), *_experts(config, hidden, random, i)):
            yield f"model.layers.{i}.{name}.weight", tensor
            is_qkv = name.endswith(("q_proj", "k_proj", "v_proj"))
            has_bias = config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]
            if tensor.dim() == 2 and (has_bias or (is_qkv and config["model_type"] == "qwen2")):
                yield f"model.layers.{i}.{name}.bias", 0.1 * torch.randn(len(tensor), generator=random)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            for name in ("q_norm", "k_norm"):
                yield f"model.layers.{i}.self_attn.{name}.weight", 2.0 * _norm(config["head_dim"], random)
    yield "model.norm.weight", _norm(hidden, random)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", 3.0 * _matrix(vocab, hidden, random)


def weights_of_draft(config: dict[str, Any], fused: int, rows: int, own_head: bool, random: torch.Generator) -> Named:
    """Of a draft under SafeAILab's names: `fused` columns of all taps; a head of `rows` tokens where it has its own."""
    hidden = config["hidden_size"]
    yield "fc.weight", _matrix(hidden, fused, random)
    yield "midlayer.hidden_norm.weight", _norm(hidden, random)
    for name, tensor in _layer(config, 2 * hidden, random):
        yield f"midlayer.{name}.weight", tensor
    yield "norm.weight", _norm(hidden, random)
    if own_head:
        yield "lm_head.weight", 3.0 * _matrix(rows, hidden, random)


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    """Whether a target's layer has experts in the place of one feed-forward."""
    if config["model_type"] != "qwen3_moe":
        return config["model_type"] == "gpt_oss"
    return layer not in config.get("mlp_only_layers", ()) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _experts(config: dict[str, Any], hidden: int, random: torch.Generator, layer: int) -> Named:
    if config["model_type"] == "gpt_oss" or not _has_experts(config, layer):
        return
    inner = config["moe_intermediate_size"]
    yield "mlp.gate", _matrix(config["num_experts"], hidden, random)
    for i in range(config["num_experts"]):
        for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"mlp.experts.{i}.{part}_proj", 2.0 * _matrix(rows, columns, random)  # a few: mistakes in one show


def _gpt_oss_parts(config: dict[str, Any], hidden: int, random: torch.Generator) -> Named:
    """What a layer of gpt-oss has beside Llama's: sinks, the router, and the experts, all of a map in one tensor."""
    if config["model_type"] != "gpt_oss":
        return
    n, inner = config["num_local_experts"], config["intermediate_size"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    yield "self_attn.sinks", normal(config["num_attention_heads"])
    yield "mlp.router.weight", _matrix(n, hidden, random)
    yield "mlp.router.bias", 0.5 * normal(n)
    # Strong enough for some to be clamped.
    for name, reads, writes, scale in (("gate_up_proj", hidden, 2 * inner, 3.0), ("down_proj", inner, hidden, 0.5)):
        yield f"mlp.experts.{name}_bias", 0.2 * scale * normal(n, writes)
        if "quantization_config" not in config:
            yield f"mlp.experts.{name}", scale * normal(n, reads, writes) / reads**0.5
            continue
        # Values of 4 bits have a root mean square of 2.9, of scales 2^-2 to 2^1 about the same again.
        typical = 127 + round(math.log2(scale / reads**0.5 / 2.9))
        shape = (n, writes, reads // 32)
        yield f"mlp.experts.{name}_blocks", torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
        yield f"mlp.experts.{name}_scales", torch.randint(typical - 2, typical + 2, shape, generator=random).byte()


def _layer(config: dict[str, Any], qkv_in: int, random: torch.Generator, layer: int = 0) -> Named:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield "input_layernorm", _norm(hidden, random)
    yield "self_attn.q_proj", 2.0 * _matrix(queries, qkv_in, random)  # peaked attention: mistakes in it show
    yield "self_attn.k_proj", _matrix(keys, qkv_in, random)
    yield "self_attn.v_proj", _matrix(keys, qkv_in, random)
    yield "self_attn.o_proj", _matrix(hidden, queries, random)
    yield "post_attention_layernorm", _norm(hidden, random)
    if _has_experts(config, layer):
        return
    yield "mlp.gate_proj", _matrix(inner, hidden, random)
    yield "mlp.up_proj", _matrix(inner, hidden, random)
    yield "mlp.down_proj", _matrix(hidden, inner, random)


def _matrix(rows: int, columns: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=random) / columns**0.5


def table(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """An embedding, `[rows, columns]`."""
    return 0.5 * torch.randn(rows, columns, generator=random)


def _norm(size: int, random: torch.Generator) -> Tensor:
    return 1.0 + 0.1 * torch.randn(size, generator=random)
