"""Small valid heads and targets of many kinds: every layout that is read, variants, families, rotary scalings.

Their weights are noise: what matters is that each is taken as it stands, so that damage is what gets one refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3core.weights import quantised
from lab.probes.fuzz.pairs import SHAPE

Weights = dict[str, Tensor]
Config = dict[str, Any]
WIDTH, VOCAB, DRAFTED, LAYERS, HEAD_DIM = SHAPE.hidden, SHAPE.vocab, SHAPE.draft_vocab, SHAPE.layers, SHAPE.head_dim
TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "eagle_aux_hidden_state_layer_convention": "input"}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64}  # fmt: skip
ROPES: dict[str, Config] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
             "beta_fast": 32, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0, "truncate": False,
             "rope_theta": 1e5}},
    "longrope": {"rope_scaling": LONGROPE},
    "mrope": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
}  # fmt: skip


@dataclass
class Model:
    """A half of a pair: `config.json`, tensors by stored name, and for a head how it drafts."""

    config: Config
    weights: Weights
    settings: Config = field(default_factory=dict)


def all_heads() -> dict[str, Model]:
    """Heads by what is special about them."""
    variants = {name: _changed(change) for name, change in _VARIANTS.items()}
    layouts = {name: _changed(change) for name, change in _LAYOUTS.items()}
    ropes = {f"{name} rotation": _changed(_with(**rope)) for name, rope in ROPES.items() if name != "dynamic"}
    return {"plain": _plain(), **variants, **layouts, **ropes, "EAGLE-1": _eagle(), "EAGLE-1, biases": _eagle(True),
            "FP8": in_fp8(_plain())}  # fmt: skip


def all_targets() -> dict[str, Model]:
    """Targets by family and rotation."""
    tied = target_model("llama", {"tie_word_embeddings": True})
    del tied.weights["lm_head.weight"]
    return {
        "qwen2": target_model("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}),
        "qwen3": target_model("qwen3", {"head_dim": HEAD_DIM, "attention_bias": False, "layer_types": None}),
        "mistral": target_model("mistral", {"head_dim": HEAD_DIM, "sliding_window": None}),
        "biases": target_model("llama", {"attention_bias": True, "mlp_bias": True}),
        "tied": tied,
        "FP8": in_fp8(target_model("llama", {})),
        **{name: target_model("llama", rope) for name, rope in ROPES.items()},
    }


def in_fp8(model: Model) -> Model:
    """The model with its projections stored in e4m3, a scale a row, as compressed-tensors describes it."""
    weights = dict(model.weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name], scales = quantised(weights[name])
        weights[name.replace(".weight", ".weight_scale")] = scales[:, None]
    how = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    method = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": how}}}
    return Model({**model.config, "quantization_config": method}, weights, model.settings)


def target_model(family: str, more: Config) -> Model:
    config = {"model_type": family, "num_hidden_layers": LAYERS, "eos_token_id": [1, 2], "bos_token_id": 0,
              **_layer(), **more}  # fmt: skip
    weights = {"model.embed_tokens.weight": noise(VOCAB, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for i in range(LAYERS):
        one = _layer_tensors(WIDTH)
        if family == "qwen3":
            one |= {f"self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
        biased = [name for name in _maps(one) if name[10] in "qkv" and family == "qwen2"]
        biased += _maps(one) if more.get("attention_bias") else []
        one |= {f"{name}.bias": noise(len(one[f"{name}.weight"])) for name in biased}
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in one.items()}
    return Model(config, {**weights, "lm_head.weight": noise(VOCAB, WIDTH)})


def _plain() -> Model:
    kept = torch.arange(DRAFTED) * 2
    weights = {
        "fc.weight": noise(WIDTH, 3 * WIDTH),
        "midlayer.hidden_norm.weight": torch.ones(WIDTH),
        **{f"midlayer.{name}": tensor for name, tensor in _layer_tensors(2 * WIDTH).items()},
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": noise(DRAFTED, WIDTH),
        "d2t": kept - torch.arange(DRAFTED),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True),
    }
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
              "draft_vocab_size": DRAFTED, **_layer(), **TAPS}  # fmt: skip
    return Model(config, weights)


def _eagle(biased: bool = False) -> Model:
    weights = {"fc.weight": noise(WIDTH, 2 * WIDTH)}
    weights |= {f"layers.0.{name}": tensor for name, tensor in _layer_tensors(WIDTH).items()}
    del weights["layers.0.input_layernorm.weight"]
    if biased:
        weights["fc.bias"] = noise(WIDTH)
        for name in "qkv":
            weights[f"layers.0.self_attn.{name}_proj.bias"] = noise(
                len(weights[f"layers.0.self_attn.{name}_proj.weight"])
            )
    keys = {"model_type": "llama", "num_hidden_layers": 1, "bias": biased, "qkv_bias": biased}
    return Model({**keys, **_layer()}, weights, {"method": "eagle"})


def _layer() -> Config:
    return {"hidden_size": WIDTH, "intermediate_size": SHAPE.ffn, "num_attention_heads": SHAPE.heads,
            "num_key_value_heads": SHAPE.kv_heads, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "hidden_act": "silu",
            "max_position_embeddings": SHAPE.max_position}  # fmt: skip


def _layer_tensors(reads: int) -> Weights:
    out = {"q": (SHAPE.heads * HEAD_DIM, reads), "k": (SHAPE.kv_heads * HEAD_DIM, reads),
           "v": (SHAPE.kv_heads * HEAD_DIM, reads), "o": (WIDTH, SHAPE.heads * HEAD_DIM)}  # fmt: skip
    return {
        "input_layernorm.weight": torch.ones(WIDTH),
        **{f"self_attn.{name}_proj.weight": noise(*shape) for name, shape in out.items()},
        "post_attention_layernorm.weight": torch.ones(WIDTH),
        "mlp.gate_proj.weight": noise(SHAPE.ffn, WIDTH),
        "mlp.up_proj.weight": noise(SHAPE.ffn, WIDTH),
        "mlp.down_proj.weight": noise(WIDTH, SHAPE.ffn),
    }


def _maps(weights: Weights) -> list[str]:
    return [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) / 8


Change = Callable[[Model], object]


def _changed(change: Change) -> Model:
    model = _plain()
    change(model)
    return model


def _with(**keys: Any) -> Change:
    return lambda model: model.config.update(keys)


def _renamed(rename: Callable[[str], str]) -> Change:
    def change(model: Model) -> None:
        model.weights = {rename(name): tensor for name, tensor in model.weights.items()}

    return change


def _numbered(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def _speculators(model: Model) -> None:
    model.config.pop("eagle_aux_hidden_state_layer_convention")
    top = {"draft_vocab_size", "eagle_aux_hidden_state_layer_ids"}
    layer = {key: model.config.pop(key) for key in list(model.config) if key not in top}
    flags = {"norm_before_residual": True, "norm_before_fc": False, "norm_output": True}
    nested = {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]}
    model.config |= {"transformer_layer_config": layer, "speculators_model_type": "eagle3", **flags}
    model.config |= {"architectures": ["Eagle3DraftModel"], "speculators_config": nested}
    _renamed(_numbered)(model)
    model.weights["embed_tokens.weight"] = noise(VOCAB, WIDTH)


def _modelopt(model: Model) -> None:
    ids = model.config.pop("eagle_aux_hidden_state_layer_ids")
    flags = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    model.config["eagle_config"] = {**flags, "eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    model.config |= {"rope_theta": None, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}
    _renamed(_numbered)(model)


def _last_state(model: Model) -> None:
    model.config["eagle_config"] = {"use_aux_hidden_state": False}
    for name in TAPS:
        del model.config[name]
    del model.weights["fc.weight"]


def _full(model: Model) -> None:
    del model.weights["d2t"], model.weights["t2d"], model.config["draft_vocab_size"]
    model.weights["lm_head.weight"] = noise(VOCAB, WIDTH)


def _normed(*names: str, **keys: Any) -> Change:
    def change(model: Model) -> None:
        model.config |= keys
        model.weights |= {f"{name}.weight": torch.ones(WIDTH if len(names) > 1 else 3 * WIDTH) for name in names}

    return change


def _normed_heads(model: Model) -> None:
    model.weights |= {f"midlayer.self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}


def _biased(model: Model) -> None:
    model.config |= {"attention_bias": True, "mlp_bias": True, "bias": True}
    maps = [*_maps(model.weights), "fc"]
    model.weights |= {f"{name}.bias": noise(len(model.weights[f"{name}.weight"])) for name in maps}


_LAYOUTS: dict[str, Change] = {
    "speculators": _speculators,
    "ModelOpt": _modelopt,
    "NeMo": _renamed(lambda name: name if name == "lm_head.weight" else f"model.{name}"),
    "behind module.draft_model": _renamed(lambda name: f"module.draft_model.{name}"),
    "midlayer.0": _renamed(lambda name: name.replace("midlayer.", "midlayer.0.")),
}
_VARIANTS: dict[str, Change] = {
    "norm over all taps": _normed("input_norm", norm_before_fc=True),
    "EAGLE 3.1": _normed("fc_norm.0", "fc_norm.1", "fc_norm.2", fc_norm=True, return_hidden_post_norm=True),
    "older norms": _normed("aux_norm_low", "aux_norm_mid", "aux_norm_high", use_aux_norm=True),
    "normed residual": _with(norm_before_residual=True, logit_scale=0.5, hidden_act="gelu"),
    "biases": _biased,
    "a window": _with(layer_types=["sliding_attention"], sliding_window=32, use_sliding_window=True),
    "norms of heads": _normed_heads,
    "last state": _last_state,
    "full vocabulary": _full,
    "no mask": lambda model: model.weights.pop("t2d"),
    "neighbours rotate": _with(rope_is_neox_style=False, truncated_vocab_size=DRAFTED, num_aux_hidden_states=3),
}
