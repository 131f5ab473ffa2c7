"""Small valid targets with experts, and the damage that only they can have: Qwen3-MoE and gpt-oss, FP8 and MXFP4."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from lab.probes.fuzz.damage import odd_value
from lab.probes.fuzz.heads import HEAD_DIM, LAYERS, WIDTH, Config, Model, Weights, in_fp8, noise, target_model
from lab.probes.fuzz.pairs import SHAPE

N, CHOSEN, INNER = 4, 2, 32
_GROUP = 32  # values of MXFP4 that share a scale
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
         "beta_slow": 1.0, "truncate": False}  # fmt: skip
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_KINDS = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(LAYERS)]


def all_expert_targets() -> dict[str, Model]:
    """Targets with experts, by family and how these are stored."""
    return {
        "qwen3_moe": qwen3_moe(),
        "qwen3_moe, some layers dense": qwen3_moe(dense=(0,)),
        "qwen3_moe, FP8": in_fp8(qwen3_moe()),
        "qwen3_moe, FP8 by block": in_blocks(qwen3_moe(), (16, 16)),
        "gpt_oss": gpt_oss(),
        "gpt_oss, MXFP4": gpt_oss(is_mxfp4=True),
    }


def qwen3_moe(dense: tuple[int, ...] = (), inner: int = INNER) -> Model:
    """A target whose layers but the `dense` ones have experts of width `inner`."""
    keys: Config = {"num_experts": N, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": inner,
                    "norm_topk_prob": True, "head_dim": HEAD_DIM, "mlp_only_layers": list(dense),
                    "decoder_sparse_step": 1}  # fmt: skip
    model = target_model("qwen3_moe", keys)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        model.weights |= {f"{layer}.self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
        if i in dense:
            continue
        _without_mlp(model.weights, layer)
        model.weights[f"{layer}.mlp.gate.weight"] = noise(N, WIDTH)
        for n in range(N):
            for part, shape in (("gate", (inner, WIDTH)), ("up", (inner, WIDTH)), ("down", (WIDTH, inner))):
                model.weights[f"{layer}.mlp.experts.{n}.{part}_proj.weight"] = noise(*shape)
    return model


def gpt_oss(*, is_mxfp4: bool = False) -> Model:
    """A target with experts in every layer, sinks and windows."""
    keys: Config = {"num_local_experts": N, "num_experts_per_tok": CHOSEN, "intermediate_size": INNER,
                    "head_dim": HEAD_DIM, "attention_bias": True, "sliding_window": 8, "layer_types": _KINDS,
                    "rope_theta": 150000.0, "rope_scaling": _YARN, "swiglu_limit": 7.0}  # fmt: skip
    model = target_model("gpt_oss", keys | ({"quantization_config": _MXFP4} if is_mxfp4 else {}))
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        _without_mlp(model.weights, layer)
        model.weights |= {
            f"{layer}.self_attn.sinks": noise(SHAPE.heads),
            f"{layer}.mlp.router.weight": noise(N, WIDTH),
            f"{layer}.mlp.router.bias": noise(N),
        }
        for name, reads, writes in (("gate_up_proj", WIDTH, 2 * INNER), ("down_proj", INNER, WIDTH)):
            model.weights |= _experts_of(f"{layer}.mlp.experts.{name}", reads, writes, is_mxfp4)
    return model


def _experts_of(name: str, reads: int, writes: int, is_mxfp4: bool) -> Weights:
    """A map of all experts of gpt-oss, with its bias."""
    bias = {f"{name}_bias": noise(N, writes)}
    if not is_mxfp4:
        return {name: noise(N, reads, writes), **bias}
    groups = (N, writes, reads // _GROUP)
    drawn = torch.randint(256, (*groups, _GROUP // 2), generator=torch.Generator().manual_seed(4))
    return {f"{name}_blocks": drawn.to(torch.uint8), f"{name}_scales": torch.full(groups, 122).byte(), **bias}


def _without_mlp(weights: Weights, layer: str) -> None:
    """The layer's one feed-forward is taken away, biases with it."""
    for name in [name for name in weights if name.startswith(f"{layer}.mlp.")]:
        del weights[name]


def in_blocks(model: Model, block: tuple[int, int]) -> Model:
    """The model with its projections in e4m3, a scale for `block` values, as the block format describes it."""
    weights = dict(model.weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        shape = [-(-n // size) for n, size in zip(weights[name].shape, block, strict=True)]
        weights[f"{name}_scale_inv"] = torch.full(shape, 0.5)
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Model({**model.config, "quantization_config": method}, weights, model.settings)


EXPERT_KEYS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "mlp_only_layers", "decoder_sparse_step", "swiglu_limit", "swiglu_alpha", "sliding_window", "layer_types",
    "quantization_config", "intermediate_size", "hidden_size", "router_aux_loss_coef", "output_router_logits",
    "num_hidden_layers", "head_dim", "attention_bias", "use_sliding_window", "experts_per_token",
)  # fmt: skip


def damage_experts(config: Config, weights: Weights, random: Random) -> None:
    """One thing wrong with counts and kinds, or with the experts' tensors."""
    random.choice((_miscount, _miscount, _rekind, _requantise, _break_experts, _break_experts))(config, weights, random)


def _miscount(config: Config, weights: Weights, random: Random) -> None:
    """Another number of experts, or chosen ones, or widths, near and far."""
    key = random.choice(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
                         "intermediate_size", "decoder_sparse_step", "num_hidden_layers", "hidden_size"))  # fmt: skip
    near, far = (0, 1, -1, N + 1, N - 1, 2 * N, 33), (10**4, 10**6, 10**7, 2**31 - 1, 10**12, 2**63)
    config[key] = random.choice((*near, *far, 2.0, 1.5, "4", None, True, [N]))


def _rekind(config: Config, weights: Weights, random: Random) -> None:
    """Windows and layers that there are not."""
    window = ("sliding_window", (-1, 0, 1, 10**9, 2**40, 2**70, None, "8", 8.0, [8], True))
    kinds: tuple[Any, ...] = (
        _KINDS[:-1], [*_KINDS, "full_attention"], ["chunked_attention"] * LAYERS, ["linear_attention", *_KINDS[1:]],
        [], None, "full_attention", [None] * LAYERS, [[]] * LAYERS, dict(enumerate(_KINDS)), [1, 2, 3],
    )  # fmt: skip
    layers = ("mlp_only_layers", ([LAYERS], [-1], [0, 0], list(range(LAYERS)), [1.5], "0", [None], {"0": 1}, [2**70]))
    name, values = random.choice((window, ("layer_types", kinds), layers))
    config[name] = random.choice(values)


def _requantise(config: Config, weights: Weights, random: Random) -> None:
    """Another description of how weights are stored, or none."""
    how: tuple[Any, ...] = (
        _MXFP4, {}, None, "mxfp4", {"quant_method": "MXFP4"}, {"quant_method": None}, {"quant_method": ["mxfp4"]},
        {"quant_method": "mxfp4", "modules_to_not_convert": 3}, {"quant_method": "fp8", "weight_block_size": [0, 16]},
        {"quant_method": "fp8", "weight_block_size": [2**40, 1]}, {"quant_method": "fp8", "weight_block_size": [16]},
        {"quant_method": "fp8", "weight_block_size": [1, 2**20]}, {"quant_method": "gptq", "bits": 4}, [_MXFP4],
        odd_value(random),
    )  # fmt: skip
    config["quantization_config"] = random.choice(how)


def _break_experts(config: Config, weights: Weights, random: Random) -> None:
    """A tensor of the experts with other values, another shape or dtype, another name, or gone."""
    names = [name for name in weights if ".mlp." in name or "sinks" in name or name.endswith(("_scale", "_scale_inv"))]
    if not names:
        return
    name = random.choice(names)
    tensor = weights[name]
    kind = random.randrange(6)
    if kind == 0 and tensor.dtype == torch.uint8:
        weights[name] = torch.full_like(tensor, random.choice((0, 1, 127, 250, 254, 255)))
    elif kind == 0:
        fills = (float("nan"), float("inf"), 0.0, -1.0, 448.0)
        weights[name] = torch.full(tensor.shape, random.choice(fills)).to(tensor.dtype)
    elif kind == 1:
        twice = torch.cat([tensor, tensor]) if tensor.dim() else tensor
        shapes = (tensor[:-1], tensor[:0], tensor[None], tensor[..., None], tensor.flatten(), twice)
        weights[name] = random.choice(shapes)
    elif kind == 2:
        weights[name] = tensor.to(random.choice((torch.int8, torch.int64, torch.float32, torch.bfloat16, torch.uint8)))
    elif kind == 3 and tensor.dim() > 1:
        weights[name] = tensor.transpose(-1, -2)
    elif kind == 4:
        other = random.choice((name.replace(".0.", f".{N}."), name + "_x", name.replace("_blocks", "_scales"), "mlp"))
        weights[other] = weights.pop(name)
    else:
        del weights[name]
