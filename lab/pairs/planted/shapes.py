"""A geometry's pair without weights: what its kernels follow from."""

from __future__ import annotations

import torch

from eagle3core.checkpoint import draft_shapes, target_shapes
from eagle3core.config import EngineConfig
from eagle3core.speculative import WeightFormat
from eagle3core.weights import PackedDraft, PackedTarget, Source, kept_dtype, pack_draft, pack_target
from lab.pairs.planted.geometries import PlantedGeometry

_META = torch.device("meta")


def empty_models(
    geometry: PlantedGeometry, draft_weights: WeightFormat = "as_stored", target_weights: WeightFormat = "as_stored"
) -> tuple[PackedTarget, PackedDraft]:
    """Both models as `PlantedPair.models` gives them in bf16 on a GPU, on the meta device."""

    def empty(shapes: dict[str, tuple[int, ...]]) -> Source:
        return lambda name: torch.empty(shapes[name], dtype=kept_dtype(name, torch.bfloat16), device=_META)

    target, draft, block = geometry.target, geometry.draft, EngineConfig().block_size
    packed = pack_target(
        target, empty(dict(target_shapes(target))), dtype=torch.bfloat16, device=_META, taps=draft.taps, block=block,
        weights=target_weights,
    )  # fmt: skip
    mapping = torch.empty(draft.draft_vocab_size, dtype=torch.int32, device=_META)
    head = pack_draft(draft, empty(dict(draft_shapes(draft))), mapping, packed, weights=draft_weights, block=block)
    return packed, head
