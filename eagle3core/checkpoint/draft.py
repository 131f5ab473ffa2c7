"""An EAGLE draft head, from a published directory to checked tensors under SafeAILab names.

A head loads or raises; the engine decides whether a failure ends the run or falls back to plain decoding
(docs/requirements.md R-18, R-22).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor

from eagle3core.arguments import check_placement, check_type
from eagle3core.checkpoint.eagle import eagle_shapes, read_eagle_geometry, require_method
from eagle3core.checkpoint.layouts import canonical_name, layer_settings, refuse_variants, resolve_taps
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.target import layer_shapes, read_block_geometry, require_directory
from eagle3core.checkpoint.tensors import TensorFiles, require_names
from eagle3core.checkpoint.window import read_window
from eagle3core.errors import CheckpointError
from eagle3core.geometry import DraftGeometry, EagleGeometry, TargetGeometry

log = logging.getLogger("eagle3core")

EMBEDDING, HEAD, FUSION, MAP = "embed_tokens.weight", "lm_head.weight", "fc.weight", "d2t"


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft as loaded.

    Attributes:
        geometry: its shapes and taps.
        weights: by SafeAILab name (`fc.weight`, `midlayer.*`, `norm.weight`, own `lm_head.weight` and
            `embed_tokens.weight` where the checkpoint brings them).
        draft_to_target: `[Vd]` int64 target ids of the draft's logits, ascending; None when both vocabularies are one.
    """

    geometry: DraftGeometry
    weights: dict[str, Tensor]
    draft_to_target: Tensor | None


def load_draft(
    path: str | Path,
    target: TargetGeometry,
    *,
    capture_layers: tuple[int, ...] | None = None,
    capture_convention: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    method: str = "eagle3",
) -> DraftCheckpoint:
    """Read, check and cast a draft for a target.

    Args:
        path: directory in SafeAILab, SpecForge, ModelOpt or speculators layout.
        target: the target it drafts for.
        capture_layers: tap ids that override the checkpoint's, with
        capture_convention: "input" or "output".
        dtype: compute dtype; None keeps the stored one.
        device: where the weights go.
        method: of the head, "eagle3" or "eagle"; one for the latter is in SafeAILab's layout, and its tap is known.

    Raises:
        ConfigError, BackendUnavailable: an argument that cannot be used; nothing was read.
        CheckpointError: names the file, the key or tensor, and the value; also logged at ERROR.
    """
    check_placement(dtype, device)
    check_type("target", target, TargetGeometry)
    check_type("capture_layers", capture_layers, tuple, list, NoneType)
    check_type("capture_convention", capture_convention, str, NoneType)
    for layer in capture_layers or ():
        check_type("a layer of capture_layers", layer, int)
    try:
        directory = require_directory(path, "draft")
        config, files = Settings.read(directory / "config.json"), TensorFiles(directory)
        stored_as = _stored_names(files)
        require_method(directory, stored_as, method)
        if method == "eagle":
            return _load_eagle(config, files, stored_as, target, dtype, device)
        taps = (capture_layers, capture_convention)
        return _load(config, files, stored_as, target, taps, dtype, device)
    except CheckpointError as failure:
        log.error("[EAGLE][EagleModule::load] %s", failure)
        raise


def _load_eagle(
    config: Settings,
    files: TensorFiles,
    stored_as: dict[str, str],
    target: TargetGeometry,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> DraftCheckpoint:
    geometry = read_eagle_geometry(config, target, stored_as)
    shapes = dict(eagle_shapes(geometry))
    require_names(files, shapes, {name: key for key, name in stored_as.items()}, [])
    weights = {key: files.read_weight(stored_as[key], shape, dtype, device) for key, shape in shapes.items()}
    return DraftCheckpoint(geometry, weights, None)


def _load(
    config: Settings,
    files: TensorFiles,
    stored_as: dict[str, str],
    target: TargetGeometry,
    given_taps: tuple[tuple[int, ...] | None, str | None],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> DraftCheckpoint:
    refuse_variants(config)
    taps = resolve_taps(config, target, *given_taps)
    geometry = _read_geometry(config, target, taps, stored_as)
    shapes = dict(draft_shapes(geometry))
    _require_fusion(files, stored_as, geometry)
    optional = [MAP] if geometry.draft_vocab_size == geometry.vocab_size else []
    wanted = list(shapes) if optional else [*shapes, MAP]
    require_names(files, wanted, {name: key for key, name in stored_as.items()}, optional)
    mapping = _read_map(files, stored_as[MAP], geometry) if MAP in stored_as else None
    weights = {key: files.read_weight(stored_as[key], shape, dtype, device) for key, shape in shapes.items()}
    if mapping is None or geometry.draft_vocab_size == geometry.vocab_size:
        return DraftCheckpoint(geometry, weights, None)
    return DraftCheckpoint(geometry, weights, mapping.to(device))


def draft_shapes(geometry: DraftGeometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every floating-point tensor a draft must bring, in the order of the forward pass."""
    hidden = geometry.block.hidden_size
    if isinstance(geometry, EagleGeometry):
        yield from eagle_shapes(geometry)
        return
    if geometry.has_embedding:
        yield EMBEDDING, (geometry.vocab_size, hidden)
    yield FUSION, (hidden, len(geometry.taps) * geometry.target_hidden_size)
    yield "midlayer.hidden_norm.weight", (hidden,)
    for name, shape in layer_shapes(geometry.block, 2 * hidden):
        yield f"midlayer.{name}.weight", shape
    yield "norm.weight", (hidden,)
    if geometry.has_head:
        yield HEAD, (geometry.draft_vocab_size, hidden)


def _stored_names(files: TensorFiles) -> dict[str, str]:
    """Stored name of every canonical tensor.

    Raises:
        CheckpointError: two stored tensors mean the same one.
    """
    stored_as: dict[str, str] = {}
    for name in files.names:
        canonical = canonical_name(name)
        if canonical is None:
            continue
        if canonical in stored_as:
            raise CheckpointError(
                f"{files.directory}: tensors {stored_as[canonical]} and {name} are both {canonical}",
                "each tensor once",
                "export the head again in one layout",
            )
        stored_as[canonical] = name
    return stored_as


def _read_geometry(
    config: Settings, target: TargetGeometry, taps: tuple[int, ...], stored_as: dict[str, str]
) -> DraftGeometry:
    layer = layer_settings(config)
    vocab = layer.count("vocab_size", target.vocab_size)
    if vocab != target.vocab_size:
        raise layer.bad(
            "vocab_size", vocab, f"{target.vocab_size}, the target's vocabulary", "pair the draft with its own target"
        )
    width = config.count("target_hidden_size", target.block.hidden_size)
    if width != target.block.hidden_size:
        raise config.bad(
            "target_hidden_size",
            width,
            f"{target.block.hidden_size}, the target's hidden_size",
            "pair the draft with its own target",
        )
    geometry = DraftGeometry(
        block=read_block_geometry(layer),
        target_hidden_size=width,
        vocab_size=vocab,
        draft_vocab_size=config.count("draft_vocab_size", vocab),
        taps=taps,
        has_embedding=EMBEDDING in stored_as,
        has_head=HEAD in stored_as,
        window=read_window(layer),
    )
    _require_sharable(config, geometry)
    return geometry


def _require_sharable(config: Settings, geometry: DraftGeometry) -> None:
    """A table that the draft does not bring must fit when taken from the target."""
    hidden, vocab = geometry.block.hidden_size, geometry.draft_vocab_size
    if vocab > geometry.vocab_size:
        raise config.bad("draft_vocab_size", vocab, f"at most {geometry.vocab_size}, the target's vocabulary")
    if not geometry.has_embedding and hidden != geometry.target_hidden_size:
        raise CheckpointError(
            f"{config.source}: hidden_size is {hidden}, the target's is {geometry.target_hidden_size}, and the draft "
            f"brings no {EMBEDDING}",
            "an own embedding, or the target's width (then the target's table is shared)",
            "use a complete export of the head",
        )
    if not geometry.has_head and (hidden, vocab) != (geometry.target_hidden_size, geometry.vocab_size):
        raise CheckpointError(
            f"{config.source}: hidden_size {hidden} and draft_vocab_size {vocab} differ from the target's "
            f"{geometry.target_hidden_size} and {geometry.vocab_size}, and the draft brings no {HEAD}",
            "an own head, or the target's shapes (then the target's head is shared)",
            "use a complete export of the head",
        )


def _require_fusion(files: TensorFiles, stored_as: dict[str, str], geometry: DraftGeometry) -> None:
    """The width of `fc` says how many taps the head was trained with; a wrong count gets its own message."""
    if FUSION not in stored_as:
        return
    shape = tuple(files.read(stored_as[FUSION]).shape)
    width, n_taps = geometry.target_hidden_size, len(geometry.taps)
    if len(shape) == 2 and shape[1] != n_taps * width:
        trained = f"{shape[1] // width} taps" if shape[1] % width == 0 else "no whole number of taps"
        raise CheckpointError(
            f"{files.where(stored_as[FUSION])} reads {shape[1]} values, {trained} of {width}, "
            f"but {n_taps} taps {list(geometry.taps)} are captured",
            f"{n_taps * width} = {n_taps} x {width} columns",
            "give as many capture_layers as the head was trained with, or pair it with its own target",
        )


def _read_map(files: TensorFiles, name: str, geometry: DraftGeometry) -> Tensor:
    """Absolute target ids `[Vd]` int64 from the stored offsets: id = row + d2t[row].

    Raises:
        CheckpointError: wrong shape or dtype, an id outside the target's vocabulary, ids that do not ascend.
    """
    offsets, n, vocab = files.read(name), geometry.draft_vocab_size, geometry.vocab_size
    where = files.where(name)
    if tuple(offsets.shape) != (n,) or offsets.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(
            f"{where} has shape {list(offsets.shape)} and dtype {str(offsets.dtype).removeprefix('torch.')}",
            f"[{n}] (draft_vocab_size) of int64 or int32",
            "pair the map with its own config.json",
        )
    ids = torch.arange(n) + offsets.to(torch.int64)
    outside = ((ids < 0) | (ids >= vocab)).nonzero().flatten()
    if len(outside):
        row = int(outside[0])
        raise CheckpointError(
            f"{where} maps {len(outside)} draft ids outside the target's vocabulary, first {row} -> {int(ids[row])} "
            f"(offset {int(offsets[row])})",
            f"target ids from 0 to {vocab - 1}",
            "pair the draft with its own target; d2t holds offsets, target_id = draft_id + d2t[draft_id]",
        )
    unordered = (ids[1:] <= ids[:-1]).nonzero().flatten()
    if len(unordered):
        row = int(unordered[0])
        raise CheckpointError(
            f"{where} maps draft ids {row} and {row + 1} to {int(ids[row])} and {int(ids[row + 1])}",
            "strictly ascending target ids",
            "store offsets, not absolute ids: target_id = draft_id + d2t[draft_id]",
        )
    return ids
