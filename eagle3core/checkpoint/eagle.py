"""An EAGLE-1 head (EAGLE-2 drafts trees with the same), from SafeAILab's files to checked shapes.

Its layer has no norm before attention and nothing follows it; embedding and output head are the target's unless the
file brings copies of its own. Source: EAGLE, arXiv 2401.15077; SafeAILab/EAGLE, eagle/model/cnets1.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.target import layer_shapes, read_block_geometry
from eagle3core.checkpoint.window import read_window
from eagle3core.errors import CheckpointError
from eagle3core.geometry import EagleGeometry, TargetGeometry

FUSION, FUSION_BIAS = "fc.weight", "fc.bias"
OF_EAGLE3 = ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight")  # none in EAGLE-1
_QKV_BIAS = "midlayer.self_attn.q_proj.bias"


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


def read_eagle_geometry(config: Settings, target: TargetGeometry, stored_as: Mapping[str, str]) -> EagleGeometry:
    """Shapes of a head for its target, from its config and, for its biases, from what is stored.

    Raises:
        CheckpointError: another width or vocabulary than the target's, more than one layer, quantised weights, or a
            bias that the config has and the file lacks, or the other way round.
    """
    block, vocab, wide = read_block_geometry(config), target.vocab_size, target.block.hidden_size
    if block.hidden_size != wide:
        raise config.bad(
            "hidden_size", block.hidden_size, f"{wide}, the target's: its head reads the draft's states",
            "pair the draft with its own target",
        )  # fmt: skip
    for key in ("vocab_size", "draft_vocab_size"):
        if config.count(key, vocab) != vocab:
            raise config.bad(
                key, config.values[key], f"{vocab}, the target's vocabulary", "pair the draft with its own target"
            )
    if config.count("num_hidden_layers", 1) != 1:
        raise config.bad("num_hidden_layers", config.values["num_hidden_layers"], "1: deeper heads are not built")
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key):
            raise config.bad(key, True, "false or absent: the variant is not built", "use a head without it")
    if "quantization_config" in config:
        raise config.bad("quantization_config", "present", "absent: quantised drafts are not built")
    for key, name in (("bias", FUSION_BIAS), ("qkv_bias", _QKV_BIAS)):
        if key in config and config.flag(key) != (name in stored_as):
            state = "stored" if name in stored_as else "not stored"
            raise config.bad(key, config.values[key], f"what the file holds: {name} is {state}", "correct config.json")
    return EagleGeometry(
        block=block,
        target_hidden_size=wide,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        taps=(target.n_layers,),
        has_embedding="embed_tokens.weight" in stored_as,
        has_head="lm_head.weight" in stored_as,
        window=read_window(config),
        fc_bias=FUSION_BIAS in stored_as,
        qkv_bias=_QKV_BIAS in stored_as,
    )


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
