"""Where a head's forward pass departs from plain EAGLE-3, by its config and by the tensors it brings.

A tensor that only one variant has is evidence of it, also where the key is left out; a key that contradicts the tensors
is found when their names are compared. What no file settles needs a setting. Formulas: docs/checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from eagle3core.checkpoint.keys import INNER, is_speculators, layer_settings
from eagle3core.checkpoint.settings import Settings
from eagle3core.errors import CheckpointError
from eagle3core.geometry import Activation, Decision, FusionNorm, HeadVariant

INPUT_NORM, HIDDEN_NORM, ONE_FC_NORM = "input_norm.weight", "midlayer.hidden_norm.weight", "fc_norm.0.weight"
HEAD_NORMS = tuple(f"midlayer.self_attn.{name}_norm.weight" for name in "qk")
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
NORM_OUTPUT = ("feedback", "head")  # what norm_output may mean
_CORRECT = "correct config.json to what the head was trained with"


def read_variant(
    config: Settings, stored: Collection[str], *, norm_output: str | None = None
) -> tuple[HeadVariant, list[Decision]]:
    """The variant, and what was decided on evidence.

    Args:
        config: the draft's.
        stored: canonical names of its tensors.
        norm_output: which of `NORM_OUTPUT` a key of that name means at the top of a file; None: not told.

    Raises:
        CheckpointError: keys that contradict each other, a meaning that the files leave open, an activation that is not
            built.
    """
    layer, flags, said = layer_settings(config), _Flags(config), list[Decision]()
    reads_last = not flags.get("use_aux_hidden_state", True)
    variant = HeadVariant(
        fusion_norm=_fusion_norm(flags, stored, said),
        normed_residual=_normed_residual(config, flags, said),
        feeds_normed=_feeds_normed(config, flags, norm_output, said),
        reads_last=reads_last,
        has_hidden_norm=not reads_last or HIDDEN_NORM in stored,
        activation=_activation(layer),
        logit_scale=config.number("logit_scale", layer.number("logit_scale", 1.0)),
    )
    if reads_last and variant.fusion_norm != "none":
        raise config.bad(
            "use_aux_hidden_state", False, "true beside a norm before fc, which has no taps to read", _CORRECT
        )
    if variant.normed_residual and not variant.has_hidden_norm:
        raise config.bad("norm_before_residual", True, "false: the file brings no hidden_norm", _CORRECT)
    return _with_biases(variant, config, layer, stored), said


class _Flags:
    """Flags that stand at the top or in `eagle_config`."""

    def __init__(self, config: Settings) -> None:
        self.config, self.inner = config, config.nested(INNER)

    def get(self, name: str, default: bool = False, *, inner_wins: bool = False) -> bool:
        """The flag, wherever it is written.

        Raises:
            CheckpointError: no flag, or two that contradict each other without a rule.
        """
        places = [place for place in (self.inner, self.config) if place is not None and name in place]
        values = [place.flag(name) for place in places]
        if len(set(values)) > 1 and not inner_wins:
            raise places[0].bad(name, values[0], f"{str(values[1]).lower()}, as at the top", "remove the wrong one")
        return values[0] if values else default

    def has(self, name: str) -> bool:
        """Whether it is written anywhere."""
        return name in self.config or (self.inner is not None and name in self.inner)


def _fusion_norm(flags: _Flags, stored: Collection[str], said: list[Decision]) -> FusionNorm:
    over_all = flags.get("norm_before_fc", inner_wins=True)
    over_each = flags.get("fc_norm") or flags.get("use_aux_norm")
    if not flags.has("norm_before_fc") and INPUT_NORM in stored:
        over_all = True
        said.append(Decision("norm before fc", "one over all taps", f"{INPUT_NORM} is stored and no key denies it"))
    if not flags.has("fc_norm") and not flags.has("use_aux_norm") and ONE_FC_NORM in stored:
        over_each = True
        said.append(Decision("norm before fc", "one for each tap", "fc_norm tensors are stored and no key denies it"))
    if over_all and over_each:
        raise flags.config.bad(
            "norm_before_fc", True, "false beside fc_norm: one norm before fc excludes the other", _CORRECT
        )
    return "all" if over_all else "each" if over_each else "none"


def _normed_residual(config: Settings, flags: _Flags, said: list[Decision]) -> bool:
    if is_speculators(config) and "norm_before_residual" not in config:
        raise config.bad(
            "norm_before_residual",
            None,
            "true or false, written out: readers of speculators files disagree about an absent key",
            "add norm_before_residual to config.json with the value the head was trained with",
        )
    is_normed = flags.get("norm_before_residual")
    if is_normed and flags.inner is not None:
        other = "the plain residual, since an export template of ModelOpt writes the key for heads without it"
        said.append(Decision("residual", "normed", "norm_before_residual is true", other))
    return is_normed


def _feeds_normed(config: Settings, flags: _Flags, norm_output: str | None, said: list[Decision]) -> bool:
    """Whether the normed output is fed back; the key's other meaning, the norm before the head, is always applied."""
    inner, name = flags.inner, "norm_output"
    told = flags.get("return_hidden_post_norm") or (inner is not None and inner.flag(name))
    if name not in config:
        return told
    value = config.flag(name)
    if is_speculators(config):
        return told or value
    if norm_output == "feedback":
        said.append(Decision("feedback", "normed" if value else "plain", "the setting norm_output is 'feedback'"))
        return told or value
    if norm_output == "head":
        if not value:
            raise config.bad(name, value, "true with norm_output='head': a head without its norm is not built")
        said.append(Decision("feedback", "normed" if told else "plain", "the setting norm_output is 'head'"))
        return told
    raise config.bad(
        name, value,
        "a setting that tells its meaning: at the top of a file without transformer_layer_config it is the normed "
        "feedback to SGLang, vLLM and TensorRT-LLM, and was the norm before the head to SpecForge; not built untold",
        "set SpeculativeConfig(norm_output='feedback') or 'head', as the head was trained",
    )  # fmt: skip


def is_qwen3(config: Settings) -> bool:
    """Whether a speculators file describes Qwen3's layer; a flat file's `model_type` is often another model's."""
    return is_speculators(config) and layer_settings(config).text("model_type") == "qwen3"


def is_interleaved(config: Settings) -> bool:
    """Whether rotary pairs are neighbours in the stored q and k."""
    key = "rope_is_neox_style"
    return not (config.flag(key, True) and layer_settings(config).flag(key, True))


def has_head_norms(config: Settings, stored: Collection[str]) -> bool:
    """Whether heads of q and k are normed: as the key says, else as the layer's family does, else as the tensors do."""
    layer, key = layer_settings(config), "use_qk_norm"
    if key in layer:
        return layer.flag(key)
    return is_qwen3(config) or any(name in stored for name in HEAD_NORMS)


def _activation(layer: Settings) -> Activation:
    name = layer.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise layer.bad("hidden_act", name, f"one of {', '.join(ACTIVATIONS)}: others are not built")
    return ACTIVATIONS[name]


def _with_biases(variant: HeadVariant, config: Settings, layer: Settings, stored: Collection[str]) -> HeadVariant:
    """The variant with the maps that have biases: as the keys say, and where there is none as the tensors do.

    Some layers have biases of q, k and v without any key (Qwen2), and of o not all that have the others do.
    """

    def of(place: Settings, names: tuple[str, ...], maps: tuple[str, ...]) -> bool:
        keys = [place.flag(name) for name in names if name in place]
        return any(keys) if keys else any(f"{name}.bias" in stored for name in maps)

    qkv = of(layer, ("attention_bias", "qkv_bias"), tuple(f"midlayer.self_attn.{name}_proj" for name in "qkv"))
    return replace(
        variant,
        qkv_bias=qkv,
        output_bias=qkv and "midlayer.self_attn.o_proj.bias" in stored,
        mlp_bias=of(layer, ("mlp_bias",), tuple(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down"))),
        fc_bias=of(config, ("bias",), ("fc",)),
    )


def tied_head(config: Settings, stored: Collection[str], *, is_full: bool, target_is_tied: bool) -> bool:
    """Whether the head is the head's own embedding.

    Args:
        config, stored: as `read_variant`.
        is_full: the draft has the target's vocabulary. target_is_tied: the target's head is its embedding.

    Raises:
        CheckpointError: readers take different tensors, and which one was trained the files do not say.
    """
    key, head, embedding = "tie_word_embeddings", "lm_head.weight" in stored, "embed_tokens.weight" in stored
    if not (config.flag(key) or layer_settings(config).flag(key)) or head:
        return False  # a stored head was trained; where it may be another reader's copy, `draft` compares
    if embedding and is_full:
        return True
    if target_is_tied and is_full and not embedding:
        return False  # the target's head is the target's embedding, which the draft shares: both readings are one
    raise CheckpointError(
        f"{config.source}: {key} is true, and the file brings no lm_head.weight",
        "an own head, or an own embedding of the target's whole vocabulary: readers take different tensors else",
        "use a complete export of the head",
    )
