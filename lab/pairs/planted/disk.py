"""A planted pair as checkpoints on disk, so that Hugging Face and other engines can read the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from eagle3core.geometry import BlockGeometry, ExpertsGeometry, RopeGeometry, TargetGeometry
from eagle3core.weights import stored_bytes
from lab.errors import ExperimentError
from lab.pairs.layout import write_draft, write_target
from lab.pairs.on_disk import Pair, pair_on_disk
from lab.pairs.planted.pair import PlantedPair

MOST_BYTES = 8 * 2**30  # of one half: each is written as a single file, from memory


def write_pair(directory: str | Path, pair: PlantedPair) -> Pair:
    """Writes `target`, `draft` and `card.json` under `directory`, the target for transformers, the draft as SafeAILab.

    Raises:
        ExperimentError: the pair is too large for single files, or the directory already holds something.
    """
    root = Path(directory)
    if root.exists() and any(root.iterdir()):
        raise ExperimentError(
            f"{root.name} is not empty", "a new or empty directory", "name another, or empty this one"
        )
    for side in (pair.target_weights, pair.draft_weights):
        n_bytes = sum(stored_bytes(*named, pair.dtype.itemsize) for named in side.shapes.items())
        if n_bytes > MOST_BYTES:
            raise ExperimentError(
                f"geometry {pair.geometry.name} has a half of {n_bytes / 2**30:.1f} GiB",
                f"at most {MOST_BYTES / 2**30:.0f} GiB on disk",
                "write a smaller geometry; large ones are made on the device, from their seed",
            )
    target = dict(pair.target_weights)
    pair.draft_weights.share_table(target["model.embed_tokens.weight"])
    draft = dict(pair.draft_weights)
    ids = pair.tokens.draft_to_target
    if len(ids) < pair.geometry.target.vocab_size:
        draft["d2t"] = ids - torch.arange(len(ids))
        # Without it a few ids of many, none of them neighbours, could not be told from a table of absolute ids.
        draft["t2d"] = torch.zeros(pair.geometry.target.vocab_size, dtype=torch.bool).index_fill_(0, ids.cpu(), True)
    write_target(root / "target", target_config(pair), target)
    write_draft(root / "draft", draft_config(pair), draft, target_hidden=pair.geometry.draft.target_hidden_size)
    (root / "card.json").write_text(json.dumps(pair.card(), indent=1) + "\n", encoding="utf-8")
    return pair_on_disk(root / "target", root / "draft")


def target_config(pair: PlantedPair) -> dict[str, Any]:
    """The target's config.json."""
    target = pair.geometry.target
    return {
        "architectures": ["LlamaForCausalLM"],
        **_block_config(target.block, pair),
        **({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} if target.block.has_qk_norm else {}),
        **(_experts_config(target, target.block.experts) if target.block.experts is not None else {}),
        "vocab_size": target.vocab_size,
        "num_hidden_layers": target.n_layers,
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": target.attention_bias,
        "mlp_bias": target.mlp_bias,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids) or None,
    }


def _experts_config(target: TargetGeometry, experts: ExpertsGeometry) -> dict[str, Any]:
    """What the families with experts say of them; gpt-oss also of its windows."""
    if experts.gate == "clamped":
        in_4_bits = {"quantization_config": {"quant_method": "mxfp4"}} if experts.is_mxfp4 else {}
        kinds = ["sliding_attention" if window else "full_attention" for window in target.windows]
        return {
            "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": experts.n,
            "num_experts_per_tok": experts.n_chosen, "intermediate_size": experts.intermediate_size,
            "layer_types": kinds, "sliding_window": max(target.windows), "swiglu_limit": 7.0, **in_4_bits,
        }  # fmt: skip
    return {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": experts.n,
        "num_experts_per_tok": experts.n_chosen, "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.is_normalised, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def draft_config(pair: PlantedPair) -> dict[str, Any]:
    """The draft's config.json; tap ids are layer inputs, and it says so."""
    draft = pair.geometry.draft
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_block_config(draft.block, pair),
        "vocab_size": draft.vocab_size,
        "draft_vocab_size": draft.draft_vocab_size,
        "num_hidden_layers": 1,
        "max_position_embeddings": pair.geometry.target.max_position_embeddings,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(draft.taps), "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_convention": "input",
    }


def _block_config(block: BlockGeometry, pair: PlantedPair) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_attention_heads": block.n_heads,
        "num_key_value_heads": block.n_kv_heads,
        "head_dim": block.head_dim,
        "rms_norm_eps": block.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": str(pair.dtype).removeprefix("torch."),
        **rope_config(block.rope),
    }


def rope_config(rope: RopeGeometry) -> dict[str, Any]:
    """Rotary keys as config.json spells them."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    if rope.kind == "longrope":
        scaling |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        scaling |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    if rope.kind in ("llama3", "longrope", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
