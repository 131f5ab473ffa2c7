"""Models from named tensors: a target, and an EAGLE-3 head with what its variant has beside the plain one.

A tensor is asked for once, so that a source may drop what it has given. Source: docs/requirements.md R-22, R-23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.checkpoint.target import EMBEDDING, HEAD, biased_maps
from eagle3core.geometry import CacheScales, DraftGeometry, TargetGeometry
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.speculative import WeightFormat
from eagle3core.weights.packed import PackedDraft, PackedTarget
from eagle3core.weights.packer import Packer, Source


def pack_target(
    geometry: TargetGeometry,
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block: int,
    taps: tuple[int, ...] = (),
    packs: bool = True,
    weights: WeightFormat = "as_stored",
    cache_scales: Sequence[CacheScales] = (),
) -> PackedTarget:
    """A target from named tensors, merged and, if `packs`, packed layer by layer on `device`.

    `weights`: the format of its maps. `cache_scales`: of each layer; none: 1.
    """
    packer = Packer(source, dtype, device, block, packs=packs, weights=weights)
    embedding = packer.get(EMBEDDING)
    bias = biased_maps(geometry)
    layers = tuple(
        packer.layer(f"model.layers.{i}.", geometry.block_of(i), normed=True, bias=bias)
        for i in range(geometry.n_layers)
    )
    if cache_scales:
        layers = tuple(replace(one, cache_scales=own) for one, own in zip(layers, cache_scales, strict=True))
    if geometry.tie_word_embeddings:
        head = packer.head(embedding, may_share=True)
    else:
        head = packer.head(packer.stored(HEAD), may_share=False)
    return PackedTarget(geometry, taps, embedding, layers, packer.get("model.norm.weight"), head)


def pack_draft(
    geometry: DraftGeometry, source: Source, draft_to_target: Tensor | None, target: PackedTarget, *, block: int,
    weights: WeightFormat = "as_stored",
) -> PackedDraft:  # fmt: skip
    """A draft from named tensors (those of `checkpoint.load_draft`), beside the target it belongs to; `weights`: the
    format of its own maps."""
    variant = geometry.variant
    packer = Packer(source, target.dtype, target.device, block, packs=target.is_packed, weights=weights)
    bias = (variant.qkv_bias, variant.output_bias, variant.mlp_bias)
    layer = packer.layer("midlayer.", geometry.block, normed=False, bias=bias, activation=variant.activation)
    embedding = packer.get("embed_tokens.weight") if geometry.has_embedding else target.embedding
    if variant.tied_head:
        head = packer.head(embedding, may_share=True)
    else:
        head = packer.head(packer.get("lm_head.weight"), may_share=False) if geometry.has_head else target.head
    map_ = None if draft_to_target is None else draft_to_target.to(device=target.device, dtype=torch.int32)
    norm, input_gain = packer.get("norm.weight"), _input_gain(packer, geometry, target)
    return PackedDraft(
        geometry=geometry,
        fc=None if variant.reads_last else packer.linear(Epilogue("store", has_bias=variant.fc_bias), ["fc"]),
        hidden_gain=packer.get("midlayer.hidden_norm.weight") if variant.has_hidden_norm else None,
        layer=layer,
        final_gain=norm if variant.logit_scale == 1.0 else norm * variant.logit_scale,
        head=head,
        embedding=embedding,
        draft_to_target=_padded_map(map_, head.rows),
        shares_embedding=not geometry.has_embedding,
        shares_head=not geometry.has_head and not variant.tied_head,
        input_gain=input_gain,
        input_eps=(target.geometry if variant.reads_last else geometry).block.rms_norm_eps,
        feedback_gain=norm if variant.feeds_normed else None,
    )


def _input_gain(packer: Packer, geometry: DraftGeometry, target: PackedTarget) -> Tensor | None:
    """The gain of the norm before `fc`. Gains of single taps go into the columns of `fc` instead, so that one launch
    norms all of them: fc(g x) = (fc g) x."""
    variant, width = geometry.variant, geometry.target_hidden_size
    if variant.reads_last:
        return target.final_gain
    if variant.fusion_norm == "all":
        return packer.get("input_norm.weight")
    if variant.fusion_norm == "none":
        return None
    fc, take = packer.get("fc.weight"), packer.source
    gains = torch.cat([packer.get(f"fc_norm.{i}.weight") for i in range(len(geometry.taps))])
    folded = (fc.float() * gains.float() if fc.dtype != torch.float64 else fc * gains).to(fc.dtype)
    packer.source = lambda name: folded if name == "fc.weight" else take(name)
    return torch.ones(width, dtype=packer.dtype, device=packer.device)


def _padded_map(draft_to_target: Tensor | None, rows: int) -> Tensor | None:
    if draft_to_target is None:
        return None
    return F.pad(draft_to_target, (0, rows - len(draft_to_target))).contiguous()
