"""Both models of loaded checkpoints, packed; the draft by its kind."""

from __future__ import annotations

import torch

from eagle3core.checkpoint.draft import DraftCheckpoint
from eagle3core.checkpoint.target import HEAD, TargetCheckpoint
from eagle3core.geometry import EagleGeometry
from eagle3core.speculative import WeightFormat
from eagle3core.weights.eagle import pack_eagle
from eagle3core.weights.pack import pack_draft, pack_target
from eagle3core.weights.packed import PackedDraft, PackedTarget


def pack_checkpoints(
    target: TargetCheckpoint, draft: DraftCheckpoint | None, *, device: torch.device, block: int, packs: bool = True,
    weights: WeightFormat = "as_stored", draft_weights: WeightFormat = "as_stored",
) -> tuple[PackedTarget, PackedDraft | None]:  # fmt: skip
    """Both models of loaded checkpoints, their maps in `weights` and `draft_weights`; every raw tensor is dropped from
    its checkpoint once it has been read."""
    if target.geometry.tie_word_embeddings:
        target.weights.pop(HEAD, None)  # a second name of the embedding, which nobody asks for
    packed = pack_target(
        target.geometry,
        target.weights.pop,
        dtype=target.dtype,
        device=device,
        block=block,
        taps=draft.geometry.taps if draft else (),
        packs=packs,
        weights=weights,
        cache_scales=target.cache_scales,
    )
    if draft is None:
        return packed, None
    named = draft.weights.pop
    if isinstance(draft.geometry, EagleGeometry):
        return packed, pack_eagle(draft.geometry, named, packed, block=block, weights=draft_weights)
    return packed, pack_draft(draft.geometry, named, draft.draft_to_target, packed, block=block, weights=draft_weights)
