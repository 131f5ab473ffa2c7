"""Families of targets: what a `model_type` means beyond the keys that all of them share.

All are Llama's layer with small differences; where one departs further, it is refused by name. Source: the
configuration classes of transformers 5.17, whose defaults hold where a config.json is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3core.checkpoint.experts.choice import read_gpt_oss_experts, read_qwen3_experts
from eagle3core.checkpoint.fp8 import BESIDE, KEYS, find_fp8
from eagle3core.checkpoint.settings import Settings
from eagle3core.checks import MOST_WINDOW
from eagle3core.geometry import ExpertsGeometry

ReadExperts = Callable[[Settings, int], tuple[ExpertsGeometry | None, tuple[int, ...]]]


@dataclass(frozen=True)
class Family:
    """What a `model_type` says by itself.

    Attributes:
        max_position: `max_position_embeddings` where the file has none.
        head_dim: `head_dim` where the file has none; None: hidden_size / num_attention_heads.
        has_qk_norm: heads of q and k are normed before rotation.
        qkv_bias: q, k and v have biases, which no key mentions.
        reads_attention_bias, reads_mlp_bias: whether those keys count.
        window: where a window of attention is written: nowhere, in `sliding_window`, there if
            `use_sliding_window` says so, or there for the layers that `layer_types` names.
        read_experts: what a config says of experts, and which layers have none; None: there are none.
        has_sinks: every head of attention has a logit beside its keys'.
        silent: keys and what they mean where a file has none of them.
    """

    max_position: int
    head_dim: int | None = None
    has_qk_norm: bool = False
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    window: str = "nowhere"
    read_experts: ReadExperts | None = None
    has_sinks: bool = False
    silent: Mapping[str, Any] = field(default_factory=dict)


_GPT_OSS = {
    "attention_bias": True, "rms_norm_eps": 1e-5, "num_attention_heads": 64, "num_key_value_heads": 8,
    "sliding_window": 128, "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
FAMILIES = {
    "llama": Family(2048, reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": Family(131072, window="always"),
    "qwen2": Family(32768, qkv_bias=True, window="if used"),
    "qwen3": Family(32768, head_dim=128, has_qk_norm=True, reads_attention_bias=True, window="if used"),
    "qwen3_moe": Family(
        32768, has_qk_norm=True, reads_attention_bias=True, window="if used", read_experts=read_qwen3_experts
    ),
    "gpt_oss": Family(
        131072, head_dim=64, reads_attention_bias=True, window="by layer", read_experts=read_gpt_oss_experts,
        has_sinks=True, silent=_GPT_OSS,
    ),
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULT_WINDOW = 4096  # of all families that have one


def read_family(config: Settings) -> Family:
    """The family that `model_type` names.

    Raises:
        CheckpointError: another architecture.
    """
    name = config.values.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    raise config.bad(
        "model_type",
        name,
        "'llama' (Llama 1 to 3.3 and others of that architecture), 'mistral', 'qwen2', 'qwen3', 'qwen3_moe', 'gpt_oss'",
        "use a target of one of these; other architectures are not built",
    )


def completed(config: Settings, family: Family) -> Settings:
    """The settings with what the family means where they are silent."""
    values = dict(config.values)
    rotary = [place for key in ("rope_parameters", "rope_scaling") if (place := config.nested(key)) is not None]
    for key, meant in family.silent.items():
        is_said = key in config
        is_said |= key == "rope_parameters" and bool(rotary)
        is_said |= key == "rope_theta" and any(key in place for place in rotary)
        if not is_said:
            values[key] = meant
    return Settings(values, config.source)


def refuse_quantised(config: Settings, directory: Path) -> None:
    """Refuse quantised weights by the name of their method, all but those in FP8 that `fp8` reads.

    Raises:
        CheckpointError: config.json or hf_quant_config.json names another method.
    """
    if find_fp8(config, directory) is not None:
        return
    beside = directory / BESIDE
    nested = Settings.read(beside).nested("quantization") if beside.is_file() else None
    if nested is not None and "quant_algo" in nested:
        raise nested.bad("quant_algo", nested.values["quant_algo"], _UNQUANTISED, _EXPORT)
    for key in KEYS:
        method = config.nested(key)
        if method is None:
            continue
        name = method.text("quant_method") or method.text("quant_algo") or "a method without a name"
        bits = f", {method.values['bits']} bits" if "bits" in method else ""
        raise config.bad(key, name + bits, _UNQUANTISED, _EXPORT)


_UNQUANTISED = "absent, or FP8 (e4m3) by tensor, row or block: other quantised weights are not built"
_EXPORT = "use the bf16 or fp16 weights of the same model"


def read_windows(config: Settings, family: Family, n_layers: int, max_position: int) -> tuple[int, ...]:
    """Positions back that each layer sees, 0 for all, of families that say it by layer; empty where all see all.

    Raises:
        CheckpointError: layers of another kind or number; of other families, some layer with a window.
    """
    if family.window != "by layer":
        refuse_window(config, family, n_layers, max_position)
        return ()
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = [_FULL if i % 2 else _SLIDING for i in range(n_layers)]
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise config.bad("layer_types", kinds, f"a list of {n_layers}, {_SLIDING!r} or {_FULL!r}")
    window = config.count("sliding_window")
    if window > MOST_WINDOW:
        raise config.bad("sliding_window", window, f"at most {MOST_WINDOW}")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def refuse_window(config: Settings, family: Family, n_layers: int, max_position: int) -> None:
    """Refuse attention that sees only the newest tokens; a window that no position can leave is none.

    Raises:
        CheckpointError: some layer has a shorter window than there are positions.
    """
    if family.window == "nowhere" or (family.window == "if used" and not config.flag("use_sliding_window")):
        return
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return
    window = config.count("sliding_window", _DEFAULT_WINDOW)
    kinds = config.values.get("layer_types")
    if isinstance(kinds, list):
        windowed = sum(kind == _SLIDING for kind in kinds)
    else:
        first = config.values.get("max_window_layers", 28) if family.window == "if used" else 0
        windowed = max(0, n_layers - first) if isinstance(first, int) else n_layers
    if windowed and window < max_position:
        raise config.bad(
            "sliding_window",
            f"{window} on {windowed} of {n_layers} layers",
            f"null, or at least the {max_position} positions: windows of attention are not built for targets",
            "use a target without a window (Mistral from v0.2 on has none)",
        )
