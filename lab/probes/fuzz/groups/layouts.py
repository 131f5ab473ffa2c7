"""Heads of every layout, targets of every family: their keys and tensors, to preflight and the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3core.checkpoint import preflight
from lab.probes.fuzz.damage import as_bytes, damaged_text, long_text, odd_value
from lab.probes.fuzz.experts import EXPERT_KEYS, all_expert_targets, damage_experts
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.groups.headers import damaged_file
from lab.probes.fuzz.heads import Model, Weights, all_heads, all_targets
from lab.probes.fuzz.outcomes import has_three_parts
from lab.probes.fuzz.pairs import SmallPair, open_pair, prepare_pair

SETTINGS = "settings.json"  # of the engine, beside the model's own files
# Names that readers look for, set where a config may not have them.
_KEYS = (
    "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "return_hidden_post_norm",
    "use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_convention",
    "num_aux_hidden_states", "target_hidden_size", "draft_vocab_size", "truncated_vocab_size", "bias", "logit_scale",
    "rope_is_neox_style", "tie_word_embeddings", "num_hidden_layers", "intermediate_size_mlp", "attention_bias",
    "qkv_bias", "mlp_bias", "hidden_act", "partial_rotary_factor", "hidden_size", "intermediate_size", "head_dim",
    "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings",
    "rope_theta", "original_max_position_embeddings", "rope_scaling", "rope_parameters", "sliding_window",
    "layer_types", "use_sliding_window", "max_window_layers", "architectures", "model_type", "speculators_model_type",
    "speculators_config", "eagle_config", "transformer_layer_config", "quantization_config", "compression_config",
    "eos_token_id", "bos_token_id", "torch_dtype", "rope_type", "factor", "short_factor", "mscale", "truncate",
    "parallel_draft_step", "num_experts", "kv_lora_rank", "query_pre_attn_scalar", "block_size", "nobody_knows_it",
)  # fmt: skip
_OBJECTS = ("eagle_config", "transformer_layer_config", "rope_scaling", "rope_parameters", "speculators_config")
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint64,
)  # fmt: skip
_NAMES = (
    "d2t", "t2d", "draft_id_to_target_id", "input_norm.weight", "fc_norm.0.weight", "fc_norm.3.weight",
    "aux_norm_low.weight", "embed_tokens.weight", "lm_head.weight", "fc.bias", "fc.weight", "norm.weight",
    "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "layers.1.self_attn.q_proj.weight", "mask_hidden",
    "midlayer.self_attn.q_norm.weight", "midlayer.self_attn.q_a_proj.weight", "medusa_head.0.weight", "eh_proj.weight",
    "fc.weight_scale", "model.model.model.fc.weight", "", ".", "é", "a" * 5000, "\u202egnp", "verifier_norm.weight",
)  # fmt: skip


def _prepare(models: Callable[[], dict[str, Model]]) -> Callable[[Path], tuple[SmallPair, list[Model]]]:
    def prepare(folder: Path) -> tuple[SmallPair, list[Model]]:
        pair, made = prepare_pair(folder), list(models().values())
        for i, model in enumerate(made):
            place = folder / f"valid-{i}"
            _write(place, as_bytes(model.config), model.weights, model.settings)
            _open((pair, made), place)
        return pair, made

    return prepare


def _make(prepared: tuple[SmallPair, list[Model]], random: Random, folder: Path) -> None:
    """One of the models with its config, its tensors, or both damaged."""
    model = random.choice(prepared[1])
    weights, config, kind = dict(model.weights), as_bytes(model.config), random.randrange(8)
    if kind < 3:
        config = as_bytes(_with_odd_keys(model, random))
    elif kind < 5:
        config = damaged_text(model.config, random)
    if kind in (0, 5, 6, 7):
        for _ in range(random.choice((1, 1, 2))):
            random.choice(_DAMAGES)(weights, random)
    if random.random() < 0.03:
        config = long_text(random)
    _write(folder, config, weights, model.settings)
    if random.random() < 0.15:
        beside = random.choice(({"eos_token_id": [2, 3]}, {"eos_token_id": odd_value(random)}))
        (folder / "generation_config.json").write_bytes(damaged_text(beside, random))
    if random.random() < 0.05:
        quantised = {"quantization": {"quant_algo": odd_value(random)}}
        (folder / "hf_quant_config.json").write_bytes(damaged_text(quantised, random))


def _with_odd_keys(model: Model, random: Random) -> dict[str, object]:
    """The config with values of the wrong type under names that are read, at the top or in an object."""
    config = json.loads(as_bytes(model.config))
    for _ in range(random.choice((1, 1, 1, 2))):
        place = config
        if random.random() < 0.4:
            name = random.choice(_OBJECTS)
            if not isinstance(config.get(name), dict):
                config[name] = {}
            place = config[name]
        key = random.choice((*_KEYS, *place))
        if key in place and random.random() < 0.3:
            place[key] = random.choice(
                ([place[key]], {"a": place[key]}, str(place[key]), place[key] == 0, [place[key]] * 60)
            )
        else:
            place[key] = random.choice((odd_value(random), odd_value(random), [True], [False, None], "True", 1, 0.5))
    return dict(config)


def _make_experts(prepared: tuple[SmallPair, list[Model]], random: Random, folder: Path) -> None:
    """One of the targets with experts, damaged as only those can be, or in its keys, its header or its tensors."""
    model = random.choice(prepared[1])
    config, weights = deepcopy(model.config), dict(model.weights)
    kind = random.randrange(10)
    for _ in range(random.choice((1, 1, 2)) if kind < 6 else 0):
        damage_experts(config, weights, random)
    if kind == 6:
        config[random.choice(EXPERT_KEYS)] = odd_value(random)
    if kind == 7 and weights:
        random.choice(_DAMAGES)(weights, random)
    text = damaged_text(config, random) if kind == 8 else as_bytes(config)
    _write(folder, text, weights, model.settings)
    if kind == 9:
        stored = folder / "model.safetensors"
        stored.write_bytes(damaged_file(stored.read_bytes(), random))


def _write(folder: Path, config: bytes, weights: Weights, settings: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(config)
    (folder / SETTINGS).write_text(json.dumps(settings))
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, folder / "model.safetensors")


def _retype(weights: Weights, random: Random) -> None:
    name = random.choice(list(weights))
    weights[name] = weights[name].to(random.choice(_DTYPES))


def _reshape(weights: Weights, random: Random) -> None:
    name = random.choice(list(weights))
    tensor = weights[name]
    shapes: Sequence[Tensor] = (
        tensor.reshape(-1), tensor[None], tensor[..., None], tensor[:-1], tensor[:0], torch.cat([tensor, tensor]),
        tensor.flatten()[:1].reshape(()) if tensor.numel() else tensor, tensor.mT if tensor.ndim == 2 else tensor[:1],
    )  # fmt: skip
    weights[name] = random.choice(shapes)


def _refill(weights: Weights, random: Random) -> None:
    """Values that are none, or far too large; of integers others."""
    name = random.choice(list(weights))
    if weights[name].is_floating_point():
        fill = random.choice((float("nan"), float("inf"), -float("inf"), 3e38, 1e30, 0.0))
    else:
        fill = random.choice((0, 1, -1, 2**31, 2**62, -(2**63)))
    tensor = weights[name].clone().reshape(-1)
    if tensor.dtype != torch.bool and fill <= 3.4e38 and len(tensor) and tensor.dtype not in (torch.float16,):
        at = slice(None) if random.random() < 0.3 else slice(0, 1)
        info = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        tensor[at] = max(min(fill, info.max), info.min)
    elif tensor.is_floating_point() and len(tensor):
        tensor[random.randrange(len(tensor))] = fill
    else:
        tensor = ~tensor.bool()
    weights[name] = tensor.reshape(weights[name].shape)


def _rename(weights: Weights, random: Random) -> None:
    name = random.choice(list(weights))
    weights[random.choice((*_NAMES, f"model.{name}", f"{name}x", name.upper()))] = weights.pop(name)


def _add(weights: Weights, random: Random) -> None:
    weights[random.choice(_NAMES)] = random.choice(list(weights.values()))


def _drop(weights: Weights, random: Random) -> None:
    del weights[random.choice(list(weights))]


def _remap(weights: Weights, random: Random) -> None:
    """Another table under the map's name or the mask's: ids, rows, zeros, another length, duplicates, or floats."""
    n = random.choice((24, 24, 24, 23, 48, 1, 0))
    rows, drawn = torch.arange(n), torch.tensor([random.randrange(-50, 50) for _ in range(n)], dtype=torch.int64)
    tables = (rows, rows * 2, rows * 0, rows.flip(0), drawn, rows * 0.5, rows.int(), torch.ones(48) > 0)
    weights[random.choice(("d2t", "d2t", "t2d"))] = random.choice(tables)


_DAMAGES = (_retype, _reshape, _refill, _rename, _add, _drop, _remap, _remap)


def _open(prepared: tuple[SmallPair, list[Model]], folder: Path) -> None:
    """Looked at without loading, then loaded, and some tokens on."""
    pair, settings = prepared[0], json.loads((folder / SETTINGS).read_text())
    target, draft = (folder, pair.draft) if _is_target(prepared[1]) else (pair.target, folder)
    errors = preflight(target, draft).errors
    if not all(has_three_parts(str(error)) for error in errors):
        raise AssertionError(f"an objection without three parts: {errors}")
    open_pair(target, draft, **settings)


def _is_target(models: Sequence[Model]) -> bool:
    return "model.norm.weight" in models[0].weights


GROUPS = tuple(
    Group(name, f"{about}, to preflight and the engine", _prepare(models), make, _open)
    for name, about, models, make in (
        ("heads", "keys and tensors of heads of every layout and variant", all_heads, _make),
        ("targets", "keys and tensors of targets of every family and rotation", all_targets, _make),
        ("experts", "keys, headers and tensors of targets with experts, plain, FP8 and MXFP4", all_expert_targets,
         _make_experts),
    )
)  # fmt: skip
