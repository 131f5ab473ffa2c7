"""An EAGLE draft head, from a published directory to checked tensors under SafeAILab names.

A head loads or raises; the engine decides whether a failure ends the run or falls back to plain decoding
(docs/requirements.md R-18, R-22).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor

from eagle3core.arguments import check_placement, check_type
from eagle3core.checkpoint.containers import open_container
from eagle3core.checkpoint.keys import is_speculators
from eagle3core.checkpoint.objections import Objections
from eagle3core.checkpoint.plan import EMBEDDING, HEAD, DraftPlan, Given, draft_shapes, plan_draft, plan_eagle
from eagle3core.checkpoint.target import require_directory
from eagle3core.checkpoint.variants import NORM_OUTPUT
from eagle3core.checks import require_choice
from eagle3core.errors import CheckpointError
from eagle3core.geometry import DraftGeometry, TargetGeometry

log = logging.getLogger("eagle3core")
_ROTATED = tuple(f"midlayer.self_attn.{name}_" for name in "qk")


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft as loaded.

    Attributes:
        geometry: its shapes and taps.
        weights: by SafeAILab name (`fc.weight`, `midlayer.*`, `norm.weight`, own `lm_head.weight` and
            `embed_tokens.weight` where the checkpoint brings them, and what its variant has beside them).
        draft_to_target: `[Vd]` int64 target ids of the draft's logits, each once; None when both vocabularies are one.
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
    norm_output: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    method: str = "eagle3",
) -> DraftCheckpoint:
    """Read, check and cast a draft for a target.

    Args:
        path: directory in one of the layouts of docs/checkpoints.md.
        target: the target it drafts for.
        capture_layers: tap ids that override the checkpoint's, with
        capture_convention: "input" or "output".
        norm_output: what the key of that name means at the top of a file: "feedback" or "head".
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
    if norm_output is not None:
        require_choice("norm_output", norm_output, NORM_OUTPUT)
    layers = tuple(capture_layers) if capture_layers is not None else None
    try:
        directory = require_directory(path, "draft")
        raising = Objections(keeps=False)
        if method == "eagle":
            return _load(directory, plan_eagle(directory, target, raising), dtype, device)
        given = Given(layers, capture_convention, norm_output)
        plan = plan_draft(directory, target, given, raising)
        _require_one_head(directory, plan)
        return _load(directory, plan, dtype, device)
    except CheckpointError as failure:
        log.error("[EAGLE][EagleModule::load] %s", failure)
        raise


def read_refused_draft(
    path: str | Path,
    target: TargetGeometry,
    *,
    norm_output: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[DraftCheckpoint, tuple[CheckpointError, ...]]:
    """An EAGLE-3 draft as far as it can be read, and all that `load_draft` would refuse it for.

    For whoever looks for the reason of a refusal: a key that cannot be used has its default, a map that cannot be is
    None, a tensor of another shape is left out. Nothing may be served from it.

    Args:
        As of `load_draft`.

    Raises:
        CheckpointError: something without which nothing further can be told.
    """
    check_placement(dtype, device)
    objecting = Objections(keeps=True)
    plan = plan_draft(require_directory(path, "draft"), target, Given(norm_output=norm_output), objecting)
    weights: dict[str, Tensor] = {}
    for key, shape in draft_shapes(plan.geometry):
        if key in plan.stored_as:
            read = objecting.of(plan.files.read_weight, plan.stored_as[key], shape, dtype, device, instead=None)
            weights |= {} if read is None else {key: read}
    if plan.is_interleaved:
        weights |= _half_split(weights, plan.geometry)
    mapping = plan.draft_to_target
    draft = DraftCheckpoint(plan.geometry, weights, None if mapping is None else mapping.to(device))
    return draft, tuple(objecting.found)


def _load(directory: Path, plan: DraftPlan, dtype: torch.dtype | None, device: torch.device | str) -> DraftCheckpoint:
    geometry, stored_as = plan.geometry, plan.stored_as
    weights = {
        key: plan.files.read_weight(stored_as[key], shape, dtype, device) for key, shape in draft_shapes(geometry)
    }
    if plan.is_interleaved:
        weights |= _half_split(weights, geometry)
    for decision in geometry.decisions:
        level = logging.WARNING if decision.other else logging.INFO
        log.log(level, "[EAGLE][EagleModule::load] %s: %s", directory, decision.line)
    mapping = plan.draft_to_target
    return DraftCheckpoint(geometry, weights, None if mapping is None else mapping.to(device))


def _require_one_head(directory: Path, plan: DraftPlan) -> None:
    """Refuse two different tensors of which a tied head is one to some readers, the other to the rest.

    A speculators file always brings both, and its readers take the head.
    """
    config, _ = open_container(directory)
    both = HEAD in plan.stored_as and EMBEDDING in plan.stored_as
    geometry = plan.geometry
    if not both or is_speculators(config) or not config.flag("tie_word_embeddings"):
        return
    if geometry.draft_vocab_size == geometry.vocab_size and not torch.equal(
        plan.files.read(plan.stored_as[HEAD]), plan.files.read(plan.stored_as[EMBEDDING])
    ):
        raise CheckpointError(
            f"{plan.files.where(plan.stored_as[HEAD])} differs from {EMBEDDING}, but tie_word_embeddings is true",
            "one shared table, or tie_word_embeddings false",
            f"correct tie_word_embeddings in {config.source}",
        )


def _half_split(weights: dict[str, Tensor], geometry: DraftGeometry) -> dict[str, Tensor]:
    """q and k whose rotary pairs lie half a head apart, of ones whose pairs are neighbours: the same scores."""
    size = geometry.block.head_dim
    changed = {}
    for key, rows in weights.items():
        if key.startswith(_ROTATED):  # gains of heads, and rows of maps and biases
            pairs = rows.view(-1, size // 2, 2, *rows.shape[1:])  # [heads, D / 2, 2, ...]
            changed[key] = pairs.transpose(1, 2).reshape(rows.shape).contiguous()
    return changed
