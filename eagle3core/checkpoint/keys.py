"""The keys of a draft's `config.json`: what each means, which are built, which are refused, which change nothing.

Keys are allow-listed. A key in no row passes only where its value switches nothing on (null, false, 0 or empty), and is
refused by name otherwise: what it means is not known, and a head read without it might draft worse in silence.
Readers that obey each key: docs/checkpoints.md. Sources: SafeAILab/EAGLE, sgl-project/SpecForge,
vllm-project/speculators, NVIDIA/TensorRT-Model-Optimizer, huggingface/transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from eagle3core.checkpoint.settings import Settings
from eagle3core.errors import CheckpointError, shown

Place = Literal["head", "eagle_config", "layer", "rope"]
NESTED_LAYER, INNER = "transformer_layer_config", "eagle_config"
ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})  # values that switch nothing on

_ON_WHERE_FALSE = {"rope_is_neox_style": (False,)}


@dataclass(frozen=True)
class Key:
    """One row.

    Attributes:
        name: of the key.
        places: where it is read: `head` the top of the file, `eagle_config` the object of that name, `layer` what
            describes the decoder layer (nested in speculators files, the top in others), `rope` an object of rotary
            settings.
        meaning: what it says.
        neutral: where it is not built: the values that change nothing, all others are refused. None: it is built.
    """

    name: str
    places: tuple[Place, ...]
    meaning: str
    neutral: tuple[Any, ...] | None = None


_HEAD: tuple[Place, ...] = ("head", "eagle_config")
_LAYER: tuple[Place, ...] = ("layer",)
_BOTH: tuple[Place, ...] = ("head", "eagle_config", "layer")

BUILT = (
    Key("norm_before_residual", _HEAD, "the layer's residual is the normed input"),
    Key("norm_before_fc", _HEAD, "one norm over all taps before fc"),
    Key("fc_norm", _HEAD, "a norm of each tap before fc"),
    Key("use_aux_norm", _HEAD, "older name of fc_norm"),
    Key("norm_output", _HEAD, "the normed output is fed back; in older SpecForge the norm before the head"),
    Key("return_hidden_post_norm", _HEAD, "the normed output is fed back"),
    Key("use_aux_hidden_state", _HEAD, "false: the target's last normed state takes the place of the taps"),
    Key("eagle_aux_hidden_state_layer_ids", _HEAD, "the taps"),
    Key("eagle_aux_hidden_state_layer_convention", _HEAD, "whether tap ids number inputs or outputs of layers"),
    Key("num_aux_hidden_states", _HEAD, "number of taps"),
    Key("target_hidden_size", _HEAD, "width of a tap"),
    Key("draft_vocab_size", _HEAD, "width of the logits; absent: the target's vocabulary"),
    Key("truncated_vocab_size", _HEAD, "older name of draft_vocab_size"),
    Key("bias", ("head",), "fc has a bias"),
    Key("logit_scale", ("head", "layer"), "factor of the logits"),
    Key("rope_is_neox_style", ("head", "layer"), "false: rotary pairs are neighbours, not half a head apart"),
    Key("tie_word_embeddings", ("head", "layer"), "the head is the head's own embedding"),
    Key("num_hidden_layers", _LAYER, "layers of the head: 1"),
    Key("intermediate_size_mlp", _LAYER, "width of the feed-forward where model_type is llama4_text"),
    Key("attention_bias", _LAYER, "q, k, v and o have biases"),
    Key("qkv_bias", _LAYER, "q, k and v have biases"),
    Key("mlp_bias", _LAYER, "the feed-forward has biases"),
    Key("use_qk_norm", _LAYER, "heads of q and k are normed, as in Qwen3"),
    Key("hidden_act", _LAYER, "activation of the feed-forward"),
    Key("partial_rotary_factor", ("layer", "rope"), "share of a head that is rotated: 1"),
    *(Key(name, _LAYER, "width, count or constant of the decoder layer") for name in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "vocab_size", "max_position_embeddings")),
    *(Key(name, _LAYER, "rotary embedding") for name in (
        "rope_theta", "original_max_position_embeddings", *ROPE_OBJECTS)),
    *(Key(name, _LAYER, "window of the draft's attention") for name in (
        "sliding_window", "layer_types", "use_sliding_window")),
    *(Key(name, ("rope",), "rotary embedding") for name in (
        "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor",
        "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "short_factor", "long_factor", "mrope_section", "mrope_interleaved")),
    *(Key(name, ("head", "layer"), "says what kind of head it is") for name in (
        "architectures", "model_type", "speculators_model_type", "speculators_config")),
    Key(INNER, ("head",), "settings of SpecForge and ModelOpt"),
    Key(NESTED_LAYER, ("head",), "the decoder layer of a speculators file"),
)  # fmt: skip

REFUSED = (
    Key("eh_proj_before_attn", _HEAD, "a projection of both inputs before attention", OFF),
    Key("use_input_layernorm_in_first_layer", _HEAD, "the embedding's norm", (None, True)),
    Key("use_last_layernorm", _HEAD, "the norm before the head", (None, True)),
    Key("use_mtp_layernorm", _HEAD, "norms of a multi-token prediction layer", OFF),
    Key("parallel_draft_step", _HEAD, "tokens drafted in one pass", (*OFF, 1)),
    Key("parallel_draft_heads_num_layers", _HEAD, "layers of parallel heads", (*OFF, 1)),
    Key("eagle_decoder_type", _HEAD, "the decoder layer's architecture", (None, "llama")),
    Key("quantization_config", ("head", "layer"), "quantised weights", OFF),
    Key("num_key_value_groups", _LAYER, "a layout of heads", OFF),
    Key("attention_multiplier", _LAYER, "scale of scores", OFF),
    Key("residual_multiplier", _LAYER, "scale of what a layer adds", (*OFF, 1)),
    Key("embedding_multiplier", _LAYER, "scale of the embedding", (*OFF, 1)),
    Key("logits_scaling", _LAYER, "divisor of the logits", (*OFF, 1)),
    Key("attn_logit_softcapping", _LAYER, "a cap of scores", OFF),
    Key("final_logit_softcapping", _LAYER, "a cap of logits", OFF),
    Key("query_pre_attn_scalar", _LAYER, "scale of scores", OFF),
    Key("attention_chunk_size", _LAYER, "attention in chunks", OFF),
    Key("attention_out_bias", _LAYER, "a bias of o alone", OFF),
    Key("kv_lora_rank", _LAYER, "latent attention", OFF),
    Key("num_local_experts", _LAYER, "experts", OFF),
    Key("num_experts", _LAYER, "experts", OFF),
    Key("n_routed_experts", _LAYER, "experts", OFF),
    Key("mask_token_id", ("head", "layer"), "parallel drafting", OFF),
    Key("block_size", ("head", "layer"), "drafting of whole blocks", OFF),
    Key("finetuned", ("rope",), "how YaRN's factor was found", (*OFF, True)),
)

_ANYTHING_GOES: dict[str, str] = {
    "book-keeping": "auto_map transformers_version torch_dtype dtype name_or_path speculators_version license "
    "description name base_model target_model_name_or_path target_model_type draft_model_name_or_path "
    "has_no_defaults_at_init max_window_layers tokenizer_class attn_implementation next_layer_regular has_lm_head",
    "tokens": "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id "
    "forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids",
    "training": "initializer_range pretraining_tp use_cache gradient_checkpointing attention_dropout hidden_dropout "
    "dropout embd_pdrop resid_pdrop embed_requires_grad ttt_length ttt_steps ttt_step_loss_decay length "
    "router_aux_loss_coef output_router_logits rope_init training_config loss_type",
    "generation": "do_sample early_stopping max_length min_length max_new_tokens num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate "
    "remove_invalid_values exponential_decay_length_penalty",
    "any model": "is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder "
    "chunk_size_feed_forward pruned_heads torchscript tf_legacy_loss use_bfloat16 id2label label2id num_labels "
    "problem_type finetuning_task task_specific_params prefix return_dict output_hidden_states output_attentions",
}
HARMLESS = {group: tuple(names.split()) for group, names in _ANYTHING_GOES.items()}
_HARMLESS = frozenset(name for names in HARMLESS.values() for name in names)
TABLE = {(place, key.name): key for key in (*BUILT, *REFUSED) for place in key.places}


def layer_settings(config: Settings) -> Settings:
    """The part of the config that describes the decoder layer: nested in speculators files, the whole otherwise."""
    return config.nested(NESTED_LAYER) or config


def is_speculators(config: Settings) -> bool:
    """Whether the config follows vllm-project/speculators."""
    return "speculators_model_type" in config or NESTED_LAYER in config


def objections(config: Settings) -> Iterator[CheckpointError]:
    """What is said against the keys of a draft's config, all of it.

    Raises:
        CheckpointError: a place that holds no object; nothing else can then be read.
    """
    layer, inner = config.nested(NESTED_LAYER), config.nested(INNER)
    yield from _judged(config, ("head",) if layer is not None else ("head", "layer"))
    if layer is not None:
        yield from _judged(layer, ("layer",))
        yield from _twice(config, ("head",), layer)
    if inner is not None:
        yield from _judged(inner, ("eagle_config",))
        yield from _twice(inner, ("eagle_config",), layer or config)
    for name in ROPE_OBJECTS:
        rope = (layer or config).nested(name)
        if rope is not None:
            yield from _judged(rope, ("rope",))
            yield from _twice(rope, ("rope",), layer or config)


def _judged(settings: Settings, places: tuple[Place, ...]) -> Iterator[CheckpointError]:
    """Objections to the keys of one object. Layer keys in an object that is no layer's are left to `_twice`."""
    for name, value in settings.values.items():
        row = next((TABLE[place, name] for place in places if (place, name) in TABLE), None)
        if value is None or name.startswith("_") or name in _HARMLESS or (row and row.neutral is None):
            continue
        if row is not None:
            if value not in (row.neutral or ()):
                remedy = "use a head without it, or correct the key if the exporter wrote it wrongly"
                yield settings.bad(name, value, f"{_shown(row)}: {row.meaning}, not built", remedy)
        elif ("layer" in places or ("layer", name) not in TABLE) and value not in OFF:
            yield settings.bad(
                name, value, "a key of docs/checkpoints.md, or one that is null, false, 0 or empty",
                "remove it if it changes nothing; what it means is not known here, and ignoring it might be wrong",
            )  # fmt: skip


def _twice(settings: Settings, places: tuple[Place, ...], layer: Settings) -> Iterator[CheckpointError]:
    """Layer keys where nobody reads them (at the top of a speculators file, in `eagle_config`, among rotary settings)
    that say something else than the layer."""
    for name, value in settings.values.items():
        is_layer_key = ("layer", name) in TABLE and not any((place, name) in TABLE for place in places)
        is_off = value not in _ON_WHERE_FALSE.get(name, ()) and value in OFF
        if is_layer_key and not is_off and value != layer.values.get(name):
            yield settings.bad(
                name, value, f"the value of the layer, {shown(layer.values.get(name))}", "remove the wrong one"
            )


def _shown(row: Key) -> str:
    """The values that pass, for people."""
    neutral = row.neutral or ()
    off = ["absent", *(["false"] if any(value is False for value in neutral) else [])]
    return " or ".join([*off, *(repr(value).lower() for value in neutral if value not in OFF)])
