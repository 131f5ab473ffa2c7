"""An EAGLE-1 head as programs read it: the same parts as an EAGLE-3 head, with gains of one where it has no norm.

Source: EAGLE, arXiv 2401.15077, section 3; docs/requirements.md R-02, R-22, R-23.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3core.geometry import EagleGeometry
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.speculative import WeightFormat
from eagle3core.weights.packed import PackedDraft, PackedLayer, PackedTarget
from eagle3core.weights.packer import Packer, Source


@dataclass(frozen=True)
class PackedEagle(PackedDraft):
    """An EAGLE-1 or EAGLE-2 head.

    Attributes:
        hidden_gain, input_eps: of the target's final norm, which makes the states that are read of those that are
            captured.
        final_gain: ones, and the head scales by no norm: what the layer gives is what the head reads.
        layer: its `attn_gain` is never read, since q, k and v read what fc gives.
    """

    geometry: EagleGeometry

    def own_tensors(self) -> Iterable[Tensor]:
        """As of any draft, but the gain that is the target's."""
        return [tensor for tensor in super().own_tensors() if tensor is not self.hidden_gain]


def pack_eagle(
    geometry: EagleGeometry, source: Source, target: PackedTarget, *, block: int, weights: WeightFormat = "as_stored"
) -> PackedEagle:
    """A head from named tensors (those of `checkpoint.load_draft`), beside the target it belongs to; `weights`: the
    format of its own maps."""
    packer = Packer(source, target.dtype, target.device, block, packs=target.is_packed, weights=weights)
    ones = torch.ones(geometry.block.hidden_size, dtype=target.dtype, device=target.device)
    head = packer.head(packer.get("lm_head.weight"), may_share=False) if geometry.has_head else target.head
    return PackedEagle(
        geometry=geometry,
        fc=packer.linear(Epilogue("store", has_bias=geometry.fc_bias), ["fc"]),
        hidden_gain=target.final_gain,
        layer=_layer(packer, geometry, ones, block),
        final_gain=ones,
        head=replace(head, epilogue=replace(head.epilogue, quads=0)),
        embedding=packer.get("embed_tokens.weight") if geometry.has_embedding else target.embedding,
        draft_to_target=None,
        shares_embedding=not geometry.has_embedding,
        shares_head=not geometry.has_head,
        input_eps=target.geometry.block.rms_norm_eps,
    )


def _layer(packer: Packer, geometry: EagleGeometry, ones: Tensor, block: int) -> PackedLayer:
    qkv = Epilogue("qkv", has_bias=geometry.qkv_bias, head_dim=geometry.block.head_dim, block=block)
    return PackedLayer(
        attn_gain=ones,
        qkv=packer.linear(qkv, [f"midlayer.self_attn.{name}_proj" for name in "qkv"]),
        o=packer.linear(Epilogue("residual"), ["midlayer.self_attn.o_proj"]),
        mlp_gain=packer.get("midlayer.post_attention_layernorm.weight"),
        mlp=packer.mlp("midlayer.mlp.", geometry.block, has_bias=False),
    )
