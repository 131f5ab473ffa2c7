"""What the published EAGLE-3 draft layouts mean: tensor names, tap ids, and the variants that are not built.

Layouts read: SafeAILab (`midlayer.*`, taps implied), SpecForge and ModelOpt (`midlayer.*`, `eagle_config`), speculators
(`layers.0.*`, nested `transformer_layer_config`). Sources: github.com/SafeAILab/EAGLE, sgl-project/SpecForge,
NVIDIA/TensorRT-Model-Optimizer, vllm-project/speculators; arXiv 2503.01840.
"""

from __future__ import annotations

import itertools
import logging

from eagle3core.checkpoint.settings import Settings
from eagle3core.errors import CheckpointError
from eagle3core.geometry import TargetGeometry

log = logging.getLogger("eagle3core")

TAP_KEY = "eagle_aux_hidden_state_layer_ids"
CONVENTION_KEY = "eagle_aux_hidden_state_layer_convention"
CONVENTIONS = ("input", "output")
DROPPED = ("t2d", "verifier_")  # training aids and parts of the target that some exports leave in


def canonical_name(stored: str) -> str | None:
    """The SafeAILab name of a stored draft tensor, or None for one that decoding does not need."""
    name = stored.removeprefix("model.")
    if name.startswith(DROPPED) or name.endswith("rotary_emb.inv_freq"):
        return None
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def is_speculators(config: Settings) -> bool:
    """Whether the config follows vllm-project/speculators."""
    return "speculators_model_type" in config or "transformer_layer_config" in config


def layer_settings(config: Settings) -> Settings:
    """The part of the config that describes the decoder layer: nested in speculators files, the whole otherwise."""
    return config.nested("transformer_layer_config") or config


def refuse_variants(config: Settings) -> None:
    """Refuse a head whose forward pass differs from the one that is built.

    Raises:
        CheckpointError: names the flag.
    """
    inner, layer = config.nested("eagle_config"), layer_settings(config)
    speculators = is_speculators(config)
    if speculators and config.text("speculators_model_type", "eagle3") != "eagle3":
        raise config.bad("speculators_model_type", config.values["speculators_model_type"], "'eagle3'")
    if speculators and "norm_before_residual" not in config:
        raise config.bad(
            "norm_before_residual",
            None,
            "false, written out: readers of speculators files disagree about an absent key",
            "add norm_before_residual to config.json with the value the head was trained with",
        )
    for place in (place for place in (config, inner) if place is not None):
        for flag in (
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "return_hidden_post_norm",
            "eh_proj_before_attn",
        ):
            _require_flag(place, flag, False)
        for flag in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"):
            _require_flag(place, flag, True)
    _refuse_norm_output(config, inner, speculators)
    for flag in ("attention_bias", "qkv_bias", "mlp_bias", "bias"):
        _require_flag(layer, flag, False)
    if layer.count("num_hidden_layers", 1) != 1:
        raise layer.bad("num_hidden_layers", layer.values["num_hidden_layers"], "1: deeper draft heads are not built")
    if "quantization_config" in config:
        raise config.bad("quantization_config", "present", "absent: quantised drafts are not built")


def _refuse_norm_output(config: Settings, inner: Settings | None, speculators: bool) -> None:
    """`norm_output` has two meanings: SpecForge's flat key switches the norm before the head, others the feedback."""
    if inner is not None:
        _require_flag(inner, "norm_output", False)
    if speculators:
        _require_flag(config, "norm_output", False)
    elif "norm_output" in config:
        _require_flag(config, "norm_output", True)
        log.warning(
            "[EAGLE][EagleModule::load] %s: norm_output is read in SpecForge's sense (a norm before the head); "
            "a head that feeds back its normed state would draft badly here",
            config.source,
        )


def _require_flag(place: Settings, flag: str, built: bool) -> None:
    if flag in place and place.flag(flag) != built:
        raise place.bad(
            flag,
            place.values[flag],
            f"{str(built).lower()} or absent: the variant is not built",
            "use a head without it, or correct the key if the exporter wrote it wrongly",
        )


def resolve_taps(
    config: Settings,
    target: TargetGeometry,
    capture_layers: tuple[int, ...] | None = None,
    capture_convention: str | None = None,
) -> tuple[int, ...]:
    """Tap ids in "input" numbering: id i is the residual stream that layer i reads, id n what the last layer writes.

    The engine's own setting wins, then the ids of the draft's config, then (2, n // 2, n - 3).

    Raises:
        CheckpointError: ids outside 0..n, not ascending and distinct, given in only one of two parts, or a target too
            shallow for the defaults.
    """
    n = target.n_layers
    ids, convention, source = _stated_taps(config)
    if capture_layers is not None:
        ids, convention, source = tuple(capture_layers), capture_convention, "SpeculativeConfig.capture_layers"
    if ids is None:
        ids, convention, source = target.default_taps, "input", f"the default taps of {n} layers"
    if convention not in CONVENTIONS:
        raise CheckpointError(
            f"{source} are {list(ids)} with convention {convention!r}",
            "'input' (id i is what layer i reads) or 'output' (what layer i writes)",
            f"state capture_convention, or {CONVENTION_KEY} in the draft's config.json",
        )
    taps = tuple(i + 1 for i in ids) if convention == "output" else tuple(ids)
    if any(not 0 <= i <= n for i in taps) or any(a >= b for a, b in itertools.pairwise(taps)):
        low, high = (-1, n - 1) if convention == "output" else (0, n)
        raise CheckpointError(
            f"{source} are {list(ids)} ({convention!r} numbering) on a target of {n} layers",
            f"distinct ascending ids from {low} to {high}; the defaults need at least 7 layers",
            "give SpeculativeConfig(capture_layers=..., capture_convention=...) the taps the head was trained with",
        )
    return taps


def _stated_taps(config: Settings) -> tuple[tuple[int, ...] | None, str | None, str]:
    """Ids, convention and origin of the taps a draft's config names; ids None when it names none."""
    inner = config.nested("eagle_config")
    written = config.text(CONVENTION_KEY) or (inner.text(CONVENTION_KEY) if inner is not None else "")
    found: list[tuple[tuple[int, ...], str, str]] = []
    if TAP_KEY in config:
        found.append((config.ids(TAP_KEY), written or "input", f"{config.source}: {TAP_KEY}"))
    if inner is not None and TAP_KEY in inner:
        found.append((inner.ids(TAP_KEY), written or "output", f"{inner.source}: {TAP_KEY}"))
    meanings = {tuple(i + (convention == "output") for i in ids) for ids, convention, _ in found}
    if len(meanings) > 1:
        raise CheckpointError(
            f"{config.source}: tap ids {list(found[0][0])} ({found[0][1]!r} numbering) and, in eagle_config, "
            f"{list(found[1][0])} ({found[1][1]!r} numbering) name different layers",
            "one list, or two that mean the same layers",
            f"remove the wrong one, or add {CONVENTION_KEY}",
        )
    return found[0] if found else (None, None, "")
