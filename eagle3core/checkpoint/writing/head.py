"""A head freed of the format it was stored in: shapes, taps, and tensors under SafeAILab names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3core.checkpoint.containers import open_container
from eagle3core.checkpoint.containers.gguf import GgufTensors
from eagle3core.checkpoint.draft import load_draft
from eagle3core.checkpoint.keys import layer_settings
from eagle3core.checkpoint.plan import EMBEDDING, HEAD
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.taps import TAP_KEY
from eagle3core.checkpoint.target import EMBEDDING as TARGET_EMBEDDING
from eagle3core.checkpoint.target import HEAD as TARGET_HEAD
from eagle3core.checkpoint.target import read_block_geometry, read_target_geometry, require_directory
from eagle3core.checkpoint.tensors import TensorFiles
from eagle3core.errors import CheckpointError
from eagle3core.geometry import DraftGeometry, TargetGeometry

_MORE = 7  # layers beyond the highest tap: a depth at which no list of ids is the usual one


@dataclass(frozen=True)
class Head:
    """Attributes:
    geometry: shapes, variant and taps. weights: by SafeAILab name, rotary pairs half a head apart, heads not tied.
    draft_to_target: `[Vd]` int64 ids; None where both vocabularies are one.
    max_position: positions, as the config says. taps_known: False where the files name none and no target tells them.
    """

    geometry: DraftGeometry
    weights: dict[str, Tensor]
    draft_to_target: Tensor | None
    max_position: int
    taps_known: bool


def read_head(
    path: str | Path, target: TargetGeometry, *, taps_known: bool, norm_output: str | None = None,
    dtype: torch.dtype | None = None,
) -> Head:  # fmt: skip
    """The head in a directory, for a target or for a stand-in.

    Raises:
        CheckpointError: as `load_draft`.
    """
    config, files = open_container(require_directory(path, "draft"))
    draft = load_draft(path, target, norm_output=norm_output, dtype=dtype)
    geometry = draft.geometry
    weights = narrowed(draft.weights) if isinstance(files, GgufTensors) else draft.weights
    if geometry.variant.tied_head:
        weights = {**weights, HEAD: weights[EMBEDDING].clone()}
        geometry = replace(geometry, has_head=True, variant=replace(geometry.variant, tied_head=False))
    most = layer_settings(config).count("max_position_embeddings", 2048)
    return Head(geometry, weights, draft.draft_to_target, most, taps_known)


def narrowed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Vectors in the dtype of the matrices, where their values are the same in it: GGUF keeps them in 32 bits."""
    kinds = {tensor.dtype for tensor in weights.values() if tensor.dim() == 2}
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    return {
        name: tensor.to(kind) if tensor.dim() == 1 and torch.equal(tensor.to(kind).to(tensor.dtype), tensor) else tensor
        for name, tensor in weights.items()
    }


def target_of(path: str | Path) -> TargetGeometry:
    """Shapes of a target, by its config alone."""
    directory = require_directory(path, "target")
    return read_target_geometry(Settings.read(directory / "config.json"), directory)


def stand_in(path: str | Path) -> tuple[TargetGeometry, bool]:
    """What a head's own files say of its target, and whether they name the taps.

    Raises:
        CheckpointError: they do not say enough.
    """
    config, _ = open_container(require_directory(path, "draft"))
    layer = layer_settings(config)
    inner = config.nested("eagle_config")
    ids = config.ids(TAP_KEY) or (inner.ids(TAP_KEY) if inner is not None else ())
    wide = config.count("target_hidden_size", layer.count("hidden_size"))
    if "vocab_size" not in layer:
        raise layer.bad(
            "vocab_size", None, "the target's, which is not told otherwise", "give the target, --target DIR"
        )
    block = read_block_geometry(Settings({**layer.values, "hidden_act": None}, layer.source))
    shapes = TargetGeometry(
        block=replace(block, hidden_size=wide),
        n_layers=max(ids, default=1) + _MORE, vocab_size=layer.count("vocab_size"), max_position_embeddings=2048,
    )  # fmt: skip
    return shapes, bool(ids)


def with_tables(head: Head, names: list[str], target: Path | None, dtype: torch.dtype | None) -> Head:
    """The head with tables of the target's in the place of those it shares.

    Args:
        names: `EMBEDDING`, `HEAD`, or both. target: None where there is none to copy from.
        dtype: of the copies; None keeps the target's.

    Raises:
        CheckpointError: no target, or one without the tables.
    """
    missing = [name for name in names if name not in head.weights]
    if not missing:
        return head
    if target is None:
        raise CheckpointError(
            f"the head brings no {' and no '.join(missing)}", "both, or a target whose tables are copied",
            "give the target, --target DIR",
        )  # fmt: skip
    files, vocab, width = TensorFiles(target), head.geometry.vocab_size, head.geometry.block.hidden_size
    weights = dict(head.weights)
    for name in missing:
        theirs = TARGET_HEAD if name == HEAD and TARGET_HEAD in files else TARGET_EMBEDDING
        weights[name] = files.read_weight(theirs, (vocab, width), dtype)
    geometry = replace(head.geometry, has_embedding=EMBEDDING in weights, has_head=HEAD in weights)
    return replace(head, geometry=geometry, weights=weights)


def without_copies(head: Head, target: Path | None) -> tuple[Head, list[str]]:
    """The head without the tables that equal the target's bit by bit, and their names."""
    if target is None:
        return head, []
    files, dropped = TensorFiles(target), []
    for name in (EMBEDDING, HEAD):
        theirs = TARGET_HEAD if name == HEAD and TARGET_HEAD in files else TARGET_EMBEDDING
        own = head.weights.get(name)
        if own is None or theirs not in files or files.shape(theirs) != tuple(own.shape):
            continue
        stored = files.read(theirs)
        if stored.dtype == own.dtype and torch.equal(stored, own) and _shares(head, name):
            dropped.append(name)
    weights = {name: tensor for name, tensor in head.weights.items() if name not in dropped}
    geometry = replace(head.geometry, has_embedding=EMBEDDING in weights, has_head=HEAD in weights)
    return replace(head, geometry=geometry, weights=weights), dropped


def _shares(head: Head, name: str) -> bool:
    """Whether the target's table may stand for one that is left out."""
    return name == EMBEDDING or head.draft_to_target is None
