"""How many experts a config names, how they are chosen, and which layers have them.

Source: the keys of transformers 5.17's configurations, whose defaults hold where a config.json is silent.
"""

from __future__ import annotations

from eagle3core.checkpoint.settings import Settings
from eagle3core.geometry import ExpertsGeometry
from eagle3core.kernels.experts.mxfp4 import GROUP


def read_qwen3_experts(config: Settings, n_layers: int) -> tuple[ExpertsGeometry | None, tuple[int, ...]]:
    """Experts of a Qwen3-MoE, None where no layer has any; and the layers that have one feed-forward instead.

    Raises:
        CheckpointError: a key whose value cannot be meant.
    """
    dense = _dense_layers(config, n_layers)
    if len(dense) == n_layers:
        return None, ()
    n = _n_experts(config, default=128)
    return ExpertsGeometry(
        n=n,
        n_chosen=_n_chosen(config, n, default=8),
        intermediate_size=config.count("moe_intermediate_size", 768),
        is_normalised=config.flag("norm_topk_prob"),
    ), dense


def read_gpt_oss_experts(config: Settings, n_layers: int) -> tuple[ExpertsGeometry, tuple[int, ...]]:
    """Experts of a gpt-oss, which every layer has.

    Raises:
        CheckpointError: a key whose value cannot be meant, or a gate with other constants than transformers computes.
    """
    for key, constant in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.number(key, constant) != constant:
            raise config.bad(key, config.values[key], f"{constant}: what transformers computes whatever it says")
    n, inner, mxfp4 = _n_experts(config, default=128), config.count("intermediate_size"), is_mxfp4(config)
    for key in ("hidden_size", "intermediate_size") if mxfp4 else ():
        if config.count(key) % GROUP:
            raise config.bad(key, config.values[key], f"a multiple of {GROUP}, of which values in MXFP4 share a scale")
    chosen = _n_chosen(config, n, default=4)
    return ExpertsGeometry(n, chosen, inner, is_normalised=True, gate="clamped", is_mxfp4=mxfp4), ()


def is_mxfp4(config: Settings) -> bool:
    """Whether a config says that its experts are stored in MXFP4."""
    method = config.nested("quantization_config")
    return method is not None and method.text("quant_method") == "mxfp4"


def _dense_layers(config: Settings, n_layers: int) -> tuple[int, ...]:
    """Those that `mlp_only_layers` lists, and those between every `decoder_sparse_step`-th."""
    listed, step = config.ids("mlp_only_layers"), config.count("decoder_sparse_step", 1)
    if any(not 0 <= layer < n_layers for layer in listed):
        raise config.bad("mlp_only_layers", list(listed), f"layers of 0 to {n_layers - 1}")
    return tuple(i for i in range(n_layers) if i in listed or (i + 1) % step)


def _n_experts(config: Settings, default: int) -> int:
    """`num_experts`, or `num_local_experts` as transformers 5 has it; both may be written if they agree."""
    older, newer = "num_experts", "num_local_experts"
    n = config.count(older, config.count(newer, default))
    if newer in config and config.count(newer) != n:
        raise config.bad(newer, config.values[newer], f"{n}, as {older} says", "remove the wrong one")
    return n


def _n_chosen(config: Settings, n: int, default: int) -> int:
    chosen = config.count("num_experts_per_tok", default)
    if chosen > n:
        raise config.bad("num_experts_per_tok", chosen, f"at most {n}, the experts there are")
    return chosen
