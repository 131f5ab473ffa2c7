"""Families of targets: what a `model_type` means beyond the keys that all of them share.

All are Llama's layer with small differences; where one departs further, it is refused by name. Source: the
configuration classes of transformers 5.17, whose defaults hold where a config.json is silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3core.checkpoint.fp8 import BESIDE, KEYS, find_fp8
from eagle3core.checkpoint.settings import Settings


@dataclass(frozen=True)
class Family:
    """What a `model_type` says by itself.

    Attributes:
        max_position: `max_position_embeddings` where the file has none.
        head_dim: `head_dim` where the file has none; None: hidden_size / num_attention_heads.
        has_qk_norm: heads of q and k are normed before rotation.
        qkv_bias: q, k and v have biases, which no key mentions.
        reads_attention_bias, reads_mlp_bias: whether those keys count.
        window: where a window of attention is written: nowhere, in `sliding_window`, or there if
            `use_sliding_window` says so.
    """

    max_position: int
    head_dim: int | None = None
    has_qk_norm: bool = False
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    window: str = "nowhere"


FAMILIES = {
    "llama": Family(2048, reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": Family(131072, window="always"),
    "qwen2": Family(32768, qkv_bias=True, window="if used"),
    "qwen3": Family(32768, head_dim=128, has_qk_norm=True, reads_attention_bias=True, window="if used"),
}
_DEFAULT_WINDOW = 4096  # of all three families that have one


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
        "'llama' (Llama 1 to 3.3 and others of that architecture), 'mistral', 'qwen2' or 'qwen3'",
        "use a target of one of these; other architectures are not built",
    )


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
        windowed = sum(kind == "sliding_attention" for kind in kinds)
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
