"""Random (target, draft) pairs on disk: genuine files in the published layouts, of any small geometry.

The target is one that `AutoModelForCausalLM` loads, the draft follows SafeAILab's (or speculators') names. Weights are
those of `random_weights`; such a draft is right only by luck.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from random_weights import table, weights_of_draft, weights_of_target
from safetensors.torch import save_file
from torch import Tensor

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write_random_pair(
    directory: str | Path,
    *,
    n_layers: int = 8,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 128,
    vocab: int = 512,
    tie: bool = False,
    draft_hidden: int | None = None,
    draft_heads: int | None = None,
    draft_kv_heads: int | None = None,
    draft_ffn: int | None = None,
    draft_vocab: int | None = 128,
    taps: Iterable[int] | None = None,
    convention: str | None = None,
    rope: dict[str, Any] | None = None,
    draft_rope: dict[str, Any] | None = None,
    bias: bool = False,
    own_head: bool = True,
    layout: str = "safeailab",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    bin: bool = False,
    eos: int | list[int] = 2,
    max_position: int = 2048,
    family: str = "llama",
    **keys: Any,
) -> tuple[Path, Path]:
    """Directories of a new target and draft under `directory`.

    Args:
        directory: parent of the two, `target` and `draft`.
        n_layers, hidden, heads, kv_heads, head_dim, ffn, vocab, tie, bias, eos, max_position: the target.
        draft_hidden, draft_heads, draft_kv_heads: the draft's, as the target's when None; another width brings its
            own embedding. draft_ffn: the draft's, twice its width when None.
        draft_vocab: size of the draft's vocabulary; None or `vocab` means no map.
        taps: ids written into the draft's config (`eagle_config`), with `convention` beside them when given.
        rope: HF rope settings of the target, e.g. `{"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}`.
        draft_rope: the same for the draft; None writes no rope key at all.
        own_head: whether the draft brings lm_head.
        layout: "safeailab" (`midlayer.*`) or "speculators" (`layers.0.*`, nested config, all variant flags false).
        dtype: of the files.
        seed: of the weights.
        bin: store the draft as pytorch_model.bin.
        family: the target's `model_type`: "llama", "mistral", "qwen2", "qwen3", "qwen3_moe" or "gpt_oss". keys: further
            ones of its config. A gpt-oss with `quantization_config` `MXFP4` has its experts so.
    """
    target_dir, draft_dir = Path(directory) / "target", Path(directory) / "draft"
    random = torch.Generator().manual_seed(seed)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tie,
        "attention_bias": bias,
        "mlp_bias": bias,
        "bos_token_id": 1,
        "eos_token_id": eos,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **_rope_keys(rope or {"rope_theta": 10000.0}),
        **(family_keys(family) | keys),
    }
    _write(target_dir, config, dict(weights_of_target(config, random)), dtype, bin=False)
    width = draft_hidden or hidden
    rows = draft_vocab or vocab
    n_taps = len(tuple(taps)) if taps is not None else 3
    draft_config = {
        **{key: config[key] for key in ("vocab_size", "hidden_act", "rms_norm_eps", "torch_dtype")},
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": width,
        "intermediate_size": draft_ffn or 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": draft_heads or heads,
        "num_key_value_heads": draft_kv_heads or kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        **_rope_keys(draft_rope),
    }
    weights = dict(weights_of_draft(draft_config, hidden * n_taps, rows, own_head, random))
    if width != hidden:
        weights["embed_tokens.weight"] = table(vocab, width, random)
    if rows < vocab:
        ids = torch.randperm(vocab, generator=random)[:rows].sort().values
        weights["d2t"] = ids - torch.arange(rows)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    draft_config = {**draft_config, **_tap_keys(taps, convention)}
    if layout == "speculators":
        weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
        draft_config = _speculators(draft_config)
    wide = {"target_hidden_size": hidden} if width != hidden else {}  # the key alone says that an embedding is brought
    _write(draft_dir, {**draft_config, "draft_vocab_size": rows, **wide}, weights, dtype, bin)
    return target_dir, draft_dir


def family_keys(family: str) -> dict[str, Any]:
    """What a target's config has more, or other, than a Llama's."""
    names = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
             "qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM"}  # fmt: skip
    more = {"model_type": family, "architectures": [names.get(family, "LlamaForCausalLM")]}
    window = {"mistral": {"sliding_window": None}, "llama": {}}
    if family == "qwen3_moe":
        more |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
    if family == "gpt_oss":
        return more | {
            "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 8, "attention_bias": True,
            "rope_theta": 150000.0, "rope_scaling": ROPE_GPT_OSS,
        }  # fmt: skip
    return more | window.get(family, {"use_sliding_window": False, "sliding_window": None})


def rewrite_config(directory: Path, **changes: Any) -> None:
    """Change keys of a written config.json; None removes a key."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _rope_keys(rope: dict[str, Any] | None) -> dict[str, Any]:
    """The old spelling, which every reader of either age understands."""
    if rope is None:
        return {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    return {**theta, **({"rope_scaling": scaling} if scaling else {})}


def _tap_keys(taps: Iterable[int] | None, convention: str | None) -> dict[str, Any]:
    if taps is None:
        return {}
    keys: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}}
    if convention is not None:
        keys["eagle_aux_hidden_state_layer_convention"] = convention
    return keys


def _speculators(config: dict[str, Any]) -> dict[str, Any]:
    taps = {key: config.pop(key) for key in list(config) if key.startswith("eagle_aux")}
    taps.update(config.pop("eagle_config", {}))
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        **taps,
    }


def _write(directory: Path, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype, bin: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    stored = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in weights.items()}
    if bin:
        torch.save(stored, directory / "pytorch_model.bin")
    else:
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
