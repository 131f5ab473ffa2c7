"""An EAGLE-1 head (EAGLE-2 drafts trees with the same), from SafeAILab's files to checked shapes.

Its layer has no norm before attention and nothing follows it; embedding and output head are the target's unless the
file brings copies of its own. Source: EAGLE, arXiv 2401.15077; SafeAILab/EAGLE, eagle/model/cnets1.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eagle3core.checkpoint.objections import Objections
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.target import layer_shapes, read_block_geometry
from eagle3core.checkpoint.window import read_window
from eagle3core.errors import CheckpointError
from eagle3core.geometry import EagleGeometry, TargetGeometry

FUSION, FUSION_BIAS = "fc.weight", "fc.bias"
OF_EAGLE3 = ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight")  # none in EAGLE-1
_QKV_BIAS = "midlayer.self_attn.q_proj.bias"
_PLAIN: dict[str, object] = {  # keys of variants, with the value that is no variant
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_qk_norm", "norm_before_residual", "norm_before_fc"), False),
    **dict.fromkeys(("fc_norm", "use_aux_norm", "norm_output", "return_hidden_post_norm"), False),
    "rope_is_neox_style": True,
    "logit_scale": 1.0,
}


def require_method(directory: object, stored_as: Mapping[str, str], method: str) -> None:
    """Refuse a head that is opened as one of the other kind.

    Raises:
        CheckpointError: names the method that the head is for.
    """
    has = [stored_as[name] for name in OF_EAGLE3 if name in stored_as]
    if method == "eagle3" and FUSION in stored_as and not {OF_EAGLE3[0], OF_EAGLE3[2]} & stored_as.keys():
        raise CheckpointError(
            f"{directory} has fc.weight but neither hidden_norm nor norm, like an EAGLE-1 or EAGLE-2 head",
            "an EAGLE-3 head with method 'eagle3'",
            "set method='eagle', or use an EAGLE-3 checkpoint",
        )
    if method == "eagle" and has:
        raise CheckpointError(
            f"{directory} has {' and '.join(has)}, like an EAGLE-3 head",
            "an EAGLE-1 or EAGLE-2 head with method 'eagle': fc, and a layer without those norms",
            "set method='eagle3', or use an EAGLE-1 or EAGLE-2 checkpoint",
        )


def read_eagle_geometry(
    config: Settings, target: TargetGeometry, stored_as: Mapping[str, str], objecting: Objections
) -> EagleGeometry:
    """Shapes of a head for its target, from its config and, for its biases, from what is stored.

    Objections: another width or vocabulary than the target's, several layers, a variant of EAGLE-3, and a bias that
    the config has and the file lacks, or the other way round.

    Raises:
        CheckpointError: a layer whose widths cannot be told, or any objection if none are kept.
    """
    block, vocab, wide = read_block_geometry(config), target.vocab_size, target.block.hidden_size
    for objection in _objections(config, vocab, wide, stored_as):
        objecting.add(objection)
    return EagleGeometry(
        block=block,
        target_hidden_size=wide,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        taps=(target.n_layers,),
        has_embedding="embed_tokens.weight" in stored_as,
        has_head="lm_head.weight" in stored_as,
        window=objecting.of(read_window, config, instead=0),
        fc_bias=FUSION_BIAS in stored_as,
        qkv_bias=_QKV_BIAS in stored_as,
    )


def _objections(config: Settings, vocab: int, wide: int, stored_as: Mapping[str, str]) -> Iterator[CheckpointError]:
    """What is said against the keys of a head for a target of that vocabulary and width."""
    own = "pair the draft with its own target"
    if config.values.get("hidden_size") != wide:
        stated = config.values.get("hidden_size")
        yield config.bad("hidden_size", stated, f"{wide}, the target's: its head reads the draft's states", own)
    for key in ("vocab_size", "draft_vocab_size"):
        if config.values.get(key) not in (None, vocab):
            yield config.bad(key, config.values[key], f"{vocab}, the target's vocabulary", own)
    if config.values.get("num_hidden_layers") not in (None, 1):
        yield config.bad("num_hidden_layers", config.values["num_hidden_layers"], "1: deeper heads are not built")
    for key, plain in _PLAIN.items():
        stated = config.values.get(key)
        if stated not in (None, plain):
            shown = f"{str(plain).lower()} or absent: no such variant of an EAGLE-1 head is built"
            yield config.bad(key, stated, shown, "use a head without it")
    for key, name in (("bias", FUSION_BIAS), ("qkv_bias", _QKV_BIAS)):
        if key in config and config.values[key] is not (name in stored_as):
            state = "stored" if name in stored_as else "not stored"
            yield config.bad(key, config.values[key], f"what the file holds: {name} is {state}", "correct config.json")


def eagle_shapes(geometry: EagleGeometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that an EAGLE-1 head must bring, in the order of the forward pass."""
    hidden = geometry.block.hidden_size
    if geometry.has_embedding:
        yield "embed_tokens.weight", (geometry.vocab_size, hidden)
    yield FUSION, (hidden, 2 * hidden)
    if geometry.fc_bias:
        yield FUSION_BIAS, (hidden,)
    for name, shape in layer_shapes(geometry.block, hidden):
        if name == "input_layernorm":
            continue
        yield f"midlayer.{name}.weight", shape
        if geometry.qkv_bias and name in [f"self_attn.{part}_proj" for part in "qkv"]:
            yield f"midlayer.{name}.bias", shape[:1]
    if geometry.has_head:
        yield "lm_head.weight", (geometry.vocab_size, hidden)
