"""A draft head as its config, its files' headers and its vocabulary map describe it: all but the weights.

What loading reads is planned here, in a fraction of a second; `preflight` asks for every objection, loading stops at
the first. Source: docs/requirements.md R-18, R-22.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from eagle3core.checkpoint.containers import open_container
from eagle3core.checkpoint.eagle import eagle_shapes, read_eagle_geometry, require_method
from eagle3core.checkpoint.families import FAMILIES
from eagle3core.checkpoint.keys import layer_settings, objections
from eagle3core.checkpoint.layouts import refuse_kinds, stored_names
from eagle3core.checkpoint.objections import Objections, name_objections
from eagle3core.checkpoint.rope import require_stored_frequencies
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.taps import resolve_taps
from eagle3core.checkpoint.target import layer_shapes, read_block_geometry
from eagle3core.checkpoint.tensors import NamedTensors
from eagle3core.checkpoint.variants import (
    HIDDEN_NORM,
    INPUT_NORM,
    has_head_norms,
    is_interleaved,
    is_qwen3,
    read_variant,
    tied_head,
)
from eagle3core.checkpoint.vocabulary import MAP, MASK, read_map
from eagle3core.checkpoint.window import read_window
from eagle3core.errors import CheckpointError
from eagle3core.geometry import PLAIN, Decision, DraftGeometry, EagleGeometry, HeadVariant, TargetGeometry

EMBEDDING, HEAD, FUSION = "embed_tokens.weight", "lm_head.weight", "fc.weight"
METHODS = ("eagle3", "eagle")  # of heads


@dataclass(frozen=True)
class Given:
    """What the engine's settings say of a head, in the place of its files or beside them; see `load_draft`."""

    capture_layers: tuple[int, ...] | None = None
    capture_convention: str | None = None
    norm_output: str | None = None


@dataclass(frozen=True)
class DraftPlan:
    """What there is to load.

    Attributes:
        files: where the tensors are. stored_as: stored name by canonical name.
        draft_to_target: as of `DraftCheckpoint`, on the CPU.
        is_interleaved: rotary pairs are neighbours in the stored q and k.
    """

    geometry: DraftGeometry
    files: NamedTensors
    stored_as: dict[str, str]
    draft_to_target: Tensor | None
    is_interleaved: bool


def plan_draft(directory: Path, target: TargetGeometry, given: Given, objecting: Objections) -> DraftPlan:
    """What a directory holds for a target; no weight is touched.

    Raises:
        CheckpointError: something without which nothing further can be told, or any objection if none are kept.
    """
    config, files = open_container(directory)
    stored_as = stored_names(files.names, directory)
    refuse_kinds(config, stored_as)
    require_method(directory, stored_as, "eagle3")
    for objection in objections(config):
        objecting.add(objection)
    nothing: tuple[HeadVariant, list[Decision]] = (PLAIN, [])
    variant, said = objecting.of(read_variant, config, stored_as, norm_output=given.norm_output, instead=nothing)
    taps, decision = _taps(config, files, target, given, variant, objecting)
    geometry = _geometry(config, target, taps, stored_as, variant, objecting)
    _compare(files, stored_as, geometry, objecting)
    objecting.of(require_stored_frequencies, files, geometry.block, instead=None)
    unmapped: tuple[Tensor | None, list[Decision]] = (None, [])
    mapping, of_map = objecting.of(read_map, files, stored_as, geometry, target.eos_token_ids, instead=unmapped)
    geometry = replace(geometry, decisions=(*decision, *said, *of_map, *files.decisions))
    return DraftPlan(geometry, files, stored_as, mapping, is_interleaved(config))


def plan_eagle(directory: Path, target: TargetGeometry, objecting: Objections) -> DraftPlan:
    """As `plan_draft`, of an EAGLE-1 or EAGLE-2 head.

    Raises:
        CheckpointError: as `plan_draft`.
    """
    config, files = open_container(directory)
    stored_as = stored_names(files.names, directory)
    require_method(directory, stored_as, "eagle")
    for objection in objections(config):
        objecting.add(objection)
    geometry = read_eagle_geometry(config, target, stored_as, objecting)
    _require_tensors(files, stored_as, dict(eagle_shapes(geometry)), objecting)
    return DraftPlan(geometry, files, stored_as, None, False)


def draft_shapes(geometry: DraftGeometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every floating-point tensor a draft must bring, in the order of the forward pass."""
    if isinstance(geometry, EagleGeometry):
        yield from eagle_shapes(geometry)
        return
    hidden, variant = geometry.block.hidden_size, geometry.variant
    taps, width = len(geometry.taps), geometry.target_hidden_size
    if geometry.has_embedding:
        yield EMBEDDING, (geometry.vocab_size, hidden)
    if variant.fusion_norm == "all":
        yield INPUT_NORM, (taps * width,)
    for i in range(taps if variant.fusion_norm == "each" else 0):
        yield f"fc_norm.{i}.weight", (width,)
    if not variant.reads_last:
        yield FUSION, (hidden, taps * width)
    if variant.fc_bias:
        yield "fc.bias", (hidden,)
    if variant.has_hidden_norm:
        yield HIDDEN_NORM, (hidden,)
    for name, shape in layer_shapes(geometry.block, 2 * hidden):
        yield f"midlayer.{name}.weight", shape
        if has_bias(variant, name):
            yield f"midlayer.{name}.bias", shape[:1]
    yield "norm.weight", (hidden,)
    if geometry.has_head:
        yield HEAD, (geometry.draft_vocab_size, hidden)


def has_bias(variant: HeadVariant, name: str) -> bool:
    """Whether a map of the layer, e.g. "mlp.up_proj", has a bias."""
    if name.startswith("self_attn.") and name.endswith("_proj"):
        return variant.output_bias if name == "self_attn.o_proj" else variant.qkv_bias
    return variant.mlp_bias and name.startswith("mlp.")


def _taps(
    config: Settings,
    files: NamedTensors,
    target: TargetGeometry,
    given: Given,
    variant: HeadVariant,
    objecting: Objections,
) -> tuple[tuple[int, ...], tuple[Decision, ...]]:
    """Taps and why; none where they cannot be told."""
    if variant.reads_last:
        said = Decision("taps", "the target's last state, after its final norm", "use_aux_hidden_state is false")
        return (target.n_layers,), (said,)
    told: tuple[tuple[int, ...], Decision | None] = ((), None)
    taps, decision = objecting.of(
        resolve_taps, config, target, given.capture_layers, given.capture_convention, instead=told
    )
    if decision is not None and files.of_taps[0] and given.capture_layers is None:
        doubt = files.of_taps[1] if taps == target.default_taps else ""
        decision = replace(decision, evidence=files.of_taps[0], other=doubt)
    return taps, (decision,) if decision is not None else ()


def _geometry(
    config: Settings, target: TargetGeometry, taps: tuple[int, ...], stored_as: dict[str, str], variant: HeadVariant,
    objecting: Objections,
) -> DraftGeometry:  # fmt: skip
    """Shapes of the head.

    Raises:
        CheckpointError: a layer whose widths cannot be told.
    """
    layer, own = layer_settings(config), "pair the draft with its own target"
    vocab, width = target.vocab_size, target.block.hidden_size
    if layer.count("vocab_size", vocab) != vocab:
        objecting.add(layer.bad("vocab_size", layer.values["vocab_size"], f"{vocab}, the target's vocabulary", own))
    if config.count("target_hidden_size", width) != width:
        stated = config.values["target_hidden_size"]
        objecting.add(config.bad("target_hidden_size", stated, f"{width}, the target's hidden_size", own))
    drafted = objecting.of(_draft_vocab, config, vocab, instead=vocab)
    full = {"is_full": drafted == vocab, "target_is_tied": target.tie_word_embeddings}
    tied = objecting.of(tied_head, config, stored_as, **full, instead=False)
    geometry = DraftGeometry(
        block=read_block_geometry(
            _plain_layer(layer),
            head_dim=FAMILIES["qwen3"].head_dim if is_qwen3(config) else None,
            has_qk_norm=objecting.of(has_head_norms, config, stored_as, instead=False),
        ),
        target_hidden_size=width,
        vocab_size=vocab,
        draft_vocab_size=drafted,
        taps=taps,
        has_embedding=EMBEDDING in stored_as,
        has_head=HEAD in stored_as,
        window=objecting.of(read_window, layer, instead=0),
        variant=replace(variant, tied_head=tied),
    )
    objecting.of(_require_sharable, config, geometry, instead=None)
    return geometry


def _draft_vocab(config: Settings, vocab: int) -> int:
    """Width of the logits, under its name or its older one."""
    older = config.count("truncated_vocab_size", vocab)
    drafted = config.count("draft_vocab_size", older)
    if "truncated_vocab_size" in config and drafted != older:
        raise config.bad("truncated_vocab_size", older, f"draft_vocab_size, {drafted}", "remove the wrong one")
    if drafted > vocab:
        raise config.bad("draft_vocab_size", drafted, f"at most {vocab}, the target's vocabulary")
    return drafted


def _plain_layer(layer: Settings) -> Settings:
    """The layer's settings as those of a Llama layer: what `variants` has read is left out.

    Raises:
        CheckpointError: two widths of the feed-forward of which none is known to be meant.
    """
    values, wide = {**layer.values, "hidden_act": None}, "intermediate_size_mlp"
    if wide in layer:
        if layer.values.get("model_type") == "llama4_text":
            values["intermediate_size"] = layer.count(wide)
        elif layer.values[wide] != layer.values.get("intermediate_size"):
            raise layer.bad(wide, layer.values[wide], "intermediate_size, or model_type 'llama4_text', which reads it")
    return Settings(values, layer.source)


def _require_sharable(config: Settings, geometry: DraftGeometry) -> None:
    """A table that the draft does not bring must fit when taken from the target, and so must a state without `fc`."""
    hidden, vocab = geometry.block.hidden_size, geometry.draft_vocab_size
    if not geometry.has_embedding and hidden != geometry.target_hidden_size:
        raise CheckpointError(
            f"{config.source}: hidden_size is {hidden}, the target's is {geometry.target_hidden_size}, and the draft "
            f"brings no {EMBEDDING}",
            "an own embedding, or the target's width (then the target's table is shared)",
            "use a complete export of the head",
        )
    if geometry.variant.reads_last and hidden != geometry.target_hidden_size:
        raise config.bad(
            "use_aux_hidden_state", False, f"true, or hidden_size {geometry.target_hidden_size}, the target's"
        )
    shared = not geometry.has_head and not geometry.variant.tied_head
    if shared and (hidden, vocab) != (geometry.target_hidden_size, geometry.vocab_size):
        raise CheckpointError(
            f"{config.source}: hidden_size {hidden} and draft_vocab_size {vocab} differ from the target's "
            f"{geometry.target_hidden_size} and {geometry.vocab_size}, and the draft brings no {HEAD}",
            "an own head, or the target's shapes (then the target's head is shared)",
            "use a complete export of the head",
        )


def _compare(files: NamedTensors, stored_as: dict[str, str], geometry: DraftGeometry, objecting: Objections) -> None:
    """The tensors there are against those that the config describes: every one needed, none left over, all of their
    shapes."""
    if not geometry.taps:
        return  # what fc reads is not known
    shapes = dict(draft_shapes(geometry))
    is_full = geometry.draft_vocab_size == geometry.vocab_size
    objecting.of(_require_fusion, files, stored_as, geometry, instead=None)
    more, ignorable = ((), (MAP, MASK)) if is_full else ((MAP,), (MASK,))
    _require_tensors(files, stored_as, shapes, objecting, more=more, ignorable=ignorable, told=FUSION)


def _require_tensors(
    files: NamedTensors, stored_as: dict[str, str], shapes: dict[str, tuple[int, ...]], objecting: Objections, *,
    more: tuple[str, ...] = (), ignorable: tuple[str, ...] = (), told: str = "",
) -> None:  # fmt: skip
    """Objections to tensors that are missing, have no place, or have another shape.

    Args:
        files: the directory. stored_as: stored name by canonical name. shapes: by canonical name.
        more, ignorable: names that must, and that may, be there too. told: of which the shape was looked at already.
    """
    given = {name: key for key, name in stored_as.items()}
    for objection in name_objections(files, [*shapes, *more], given, ignorable):
        objecting.add(objection)
    for key, shape in shapes.items():
        if key in stored_as and key != told:
            objecting.of(files.check_shape, stored_as[key], shape, instead=None)


def _require_fusion(files: NamedTensors, stored_as: dict[str, str], geometry: DraftGeometry) -> None:
    """The width of `fc` says how many taps the head was trained with; a wrong count gets its own message."""
    if FUSION not in stored_as or geometry.variant.reads_last:
        return
    shape = files.shape(stored_as[FUSION])
    width, n_taps = geometry.target_hidden_size, len(geometry.taps)
    if len(shape) == 2 and shape[1] != n_taps * width:
        trained = f"{shape[1] // width} taps" if shape[1] % width == 0 else "no whole number of taps"
        raise CheckpointError(
            f"{files.where(stored_as[FUSION])} reads {shape[1]} values, {trained} of {width}, "
            f"but {n_taps} taps {list(geometry.taps)} are captured",
            f"{n_taps * width} = {n_taps} x {width} columns",
            "give as many capture_layers as the head was trained with, or pair it with its own target",
        )
    files.check_shape(stored_as[FUSION], (geometry.block.hidden_size, n_taps * width))
