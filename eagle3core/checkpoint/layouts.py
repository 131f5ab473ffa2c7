"""What the published draft layouts call their tensors, and the kinds of head that are not EAGLE-3 of one layer.

Layouts read: SafeAILab (`midlayer.*`, taps implied), SpecForge and ModelOpt (`midlayer.*` or `layers.0.*`, with
`eagle_config`), NeMo (as SpecForge, behind `model.`), speculators (`layers.0.*`, nested `transformer_layer_config`).
Sources: github.com/SafeAILab/EAGLE, sgl-project/SpecForge, NVIDIA/TensorRT-Model-Optimizer, vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eagle3core.checkpoint.keys import layer_settings
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.tensors import BUFFERS
from eagle3core.errors import CheckpointError

PREFIXES = ("model.", "draft_model.", "module.")
LAYERS = ("midlayer.0.", "layers.0.")  # of the one layer, as ModelOpt and others number it
RENAMED = {
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
DROPPED = ("verifier_",)  # parts of the target that some exports leave in


def canonical_name(stored: str) -> str | None:
    """The SafeAILab name of a stored draft tensor, or None for one that decoding does not need."""
    name = stored
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    if name.startswith(DROPPED) or name.endswith(BUFFERS):
        return None
    for numbered in LAYERS:
        if name.startswith(numbered):
            name = f"midlayer.{name.removeprefix(numbered)}"
    return RENAMED.get(name, name)


def stored_names(names: Iterable[str], where: object) -> dict[str, str]:
    """Stored name of every canonical tensor.

    Raises:
        CheckpointError: two stored tensors mean the same one.
    """
    stored_as: dict[str, str] = {}
    for name in names:
        canonical = canonical_name(name)
        if canonical is None:
            continue
        if canonical in stored_as:
            raise CheckpointError(
                f"{where}: tensors {stored_as[canonical]} and {name} are both {canonical}",
                "each tensor once",
                "export the head again in one layout",
            )
        stored_as[canonical] = name
    return stored_as


@dataclass(frozen=True)
class Kind:
    """A kind of head that is known and not built.

    Attributes:
        name: what people call it.
        tensor: whether a canonical name is one that only such heads have.
        words: in `architectures`, `speculators_model_type` or `algorithm`, in small letters.
        instead: what to do about it.
    """

    name: str
    tensor: Callable[[str], bool]
    words: tuple[str, ...]
    instead: str = "use a head of one Llama or Qwen3 layer for this target"


def _has(*parts: str) -> Callable[[str], bool]:
    return lambda name: any(part in name for part in parts)


KINDS = (
    Kind("a head with latent attention (MLA)", _has("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj"),
         ("deepseekv2", "deepseekv3", "kimik2")),
    Kind("a P-EAGLE head, which drafts all tokens in one pass", _has("mask_hidden"), ("peagle",)),
    Kind("a DFlash head, which drafts blocks", _has("dflash"), ("dflash",)),
    Kind("a DSpark head", _has("dspark"), ("dspark",)),
    Kind("a multi-token prediction layer (MTP)", _has("eh_proj.", "enorm.", "hnorm.", "mtp."), ("mtp",)),
    Kind("a head with parallel draft heads", _has("parallel_draft_heads."), ()),
    Kind("Medusa heads", _has("medusa_head"), ("medusa",)),
    Kind("a quantised head", lambda name: name.endswith(("weight_scale", "input_scale", "weight_scale_inv")), (),
         "use the head as it was before it was quantised"),
    Kind("a head of several layers", lambda name: name.startswith(("layers.", "midlayer.1.")), ()),
)  # fmt: skip


def refuse_kinds(config: Settings, stored_as: dict[str, str]) -> None:
    """Refuse, by its name, a head of another kind than those that are built.

    Raises:
        CheckpointError: what it is and how that shows.
    """
    for kind in KINDS:
        shown = next((name for canonical, name in stored_as.items() if kind.tensor(canonical)), None)
        if shown is not None:
            raise _not_built(config, kind, f"its tensor {shown} shows it")
        said = next((text for text in _labels(config) if any(word in text.lower() for word in kind.words)), None)
        if said is not None:
            raise _not_built(config, kind, f"its config says {said}")
    named = config.text("speculators_model_type", "eagle3")
    if named != "eagle3":
        raise _not_built(config, Kind("another kind of speculator", lambda name: False, ()),
                         f"speculators_model_type is {named!r}")  # fmt: skip
    layer = layer_settings(config)
    if layer.count("num_hidden_layers", 1) != 1:
        kind = KINDS[-1]
        raise _not_built(layer, kind, f"num_hidden_layers is {layer.values['num_hidden_layers']}")


def _labels(config: Settings) -> list[str]:
    """How a config names its own kind."""
    labels = [config.text("speculators_model_type"), layer_settings(config).text("model_type")]
    architectures = config.values.get("architectures")
    labels += [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    nested = config.nested("speculators_config")
    return [label for label in (*labels, nested.text("algorithm") if nested else "") if label]


def _not_built(config: Settings, kind: Kind, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"{config.source}: this is {kind.name}: {evidence}",
        "an EAGLE-3 head of one Llama or Qwen3 layer; this is no defect of the file, such heads are not built",
        kind.instead,
    )
