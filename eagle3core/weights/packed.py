"""Weights as programs read them: merged, each matrix once on the device, and packed where kernels run (`packer`).

q, k and v are one matrix, gate and up another; a head is padded to whole groups of 64 rows, which the padding's bias of
minus infinity keeps from ever being chosen.
Source: docs/requirements.md R-22, R-23, R-104; packing order: `kernels.gemm.pack_weight`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3core.geometry import UNSCALED, CacheScales, DraftGeometry, TargetGeometry
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.speculative import WeightFormat
from eagle3core.weights.experts import PackedExperts


@dataclass(frozen=True)
class PackedLinear:
    """One linear map.

    Attributes:
        epilogue: what the GEMM does with its sums.
        weight: packed, or row-major as it came (a head tied to the embedding).
        rows, k: of the matrix, padding rows included.
        bias: `[rows]` or None.
        scales: fp32 of a matrix in e4m3 (`fp8`), `[rows]`, or of blocks `[rows / 8, blocks]`, packed by `pack_scales`;
            None: `weight` holds the values themselves.
    """

    epilogue: Epilogue
    weight: Tensor
    rows: int
    k: int
    is_packed: bool = True
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.weight, self.bias, self.scales) if tensor is not None]

    @property
    def fp8(self) -> bool | str:
        """Whether W is in e4m3; "blocks": with scales of blocks."""
        if self.scales is None:
            return False
        return "blocks" if self.scales.ndim > 1 else True

    def from_row(self, first: int) -> PackedLinear:
        """The map of the rows from `first` on, a multiple of a tile's 16, in the same memory."""
        of_blocks = self.fp8 == "blocks"
        return replace(
            self, weight=self.weight[first:], rows=self.rows - first,
            bias=None if self.bias is None else self.bias[first:],
            scales=None if self.scales is None else self.scales[first // 16 if of_blocks else first :],
        )  # fmt: skip


@dataclass(frozen=True)
class PackedMlp:
    """The feed-forward of a layer: gate and up as one map, and down."""

    gate_up: PackedLinear
    down: PackedLinear

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.gate_up.tensors, *self.down.tensors]


@dataclass(frozen=True)
class PackedLayer:
    """A decoder layer: the gain before attention belongs to whoever makes its input.

    Attributes:
        qkv: rotates and writes the cache itself, unless
        q_gain, k_gain: `[D]`, of the norms of every head of q and k, which have to come before that; None: no norm.
        mlp: the feed-forward, or experts in its place.
        sinks: `[H]` logits beside those of attention's keys, fp32 (fp64 for fp64); None: there are none.
        cache_scales: for a cache of FP8.
    """

    attn_gain: Tensor
    mlp_gain: Tensor
    qkv: PackedLinear
    o: PackedLinear
    mlp: PackedMlp | PackedExperts
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    sinks: Tensor | None = None
    cache_scales: CacheScales = UNSCALED

    @property
    def weights(self) -> WeightFormat:
        """The format of its maps."""
        return "as_stored" if self.qkv.scales is None else "fp8"

    @property
    def tensors(self) -> list[Tensor]:
        of_heads = [tensor for tensor in (self.q_gain, self.k_gain, self.sinks) if tensor is not None]
        return [self.attn_gain, self.mlp_gain, *of_heads, *self.qkv.tensors, *self.o.tensors, *self.mlp.tensors]


@dataclass(frozen=True)
class PackedTarget:
    """A target on one device, its matrices merged; in the kernels' order if `is_packed`.

    Attributes:
        taps: ids of the layers whose **input** is captured, ascending; id n is the last layer's output before the
            final norm.
    """

    geometry: TargetGeometry
    taps: tuple[int, ...]
    embedding: Tensor
    layers: tuple[PackedLayer, ...]
    final_gain: Tensor
    head: PackedLinear

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def is_packed(self) -> bool:
        """Whether its matrices are in the kernels' order."""
        return all(layer.qkv.is_packed for layer in self.layers)

    @property
    def weights(self) -> WeightFormat:
        """The format of its maps."""
        return self.layers[0].weights

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def own_tensors(self) -> Iterable[Tensor]:
        """Every weight, shared ones once."""
        tensors = [self.embedding, self.final_gain, *self.head.tensors]
        tensors += [tensor for layer in self.layers for tensor in layer.tensors]
        return {tensor.data_ptr(): tensor for tensor in tensors}.values()


@dataclass(frozen=True)
class PackedDraft:
    """An EAGLE-3 head; shares the target's table or head where it has none of its own.

    Attributes:
        fc: None where the input is the target's last state.
        input_gain, input_eps: of the norm before `fc`, `[taps * H]`, or of the one that makes that state; None without
            one. Where each tap is normed alone, `[H]` ones, and `fc` has the gains in its columns.
        hidden_gain: of the state that enters the layer, None where attention reads it as it is.
        layer: its `attn_gain` is that of the embedding.
        final_gain: of the norm before the head, times the factor of its logits. feedback_gain: of the same norm, where
            the normed output is fed back.
        draft_to_target: `[Vd]` int32, or None when both vocabularies are one.
        shares_embedding, shares_head: whether those are the target's.
    """

    geometry: DraftGeometry
    fc: PackedLinear | None
    hidden_gain: Tensor | None
    layer: PackedLayer
    final_gain: Tensor
    head: PackedLinear
    embedding: Tensor
    draft_to_target: Tensor | None
    shares_embedding: bool
    shares_head: bool
    input_gain: Tensor | None = None
    input_eps: float = 0.0
    feedback_gain: Tensor | None = None

    @property
    def weights(self) -> WeightFormat:
        """The format of its own maps; what it shares with the target has the target's."""
        return self.layer.weights

    def own_tensors(self) -> Iterable[Tensor]:
        """Every weight the draft does not share with the target."""
        gains = (self.hidden_gain, self.input_gain, self.feedback_gain)
        tensors = [*(self.fc.tensors if self.fc is not None else []), self.final_gain, *self.layer.tensors]
        tensors += [gain for gain in gains if gain is not None]
        tensors += [] if self.shares_head else self.head.tensors
        tensors += [] if self.shares_embedding else [self.embedding]
        return tensors + ([] if self.draft_to_target is None else [self.draft_to_target])


Drafter = PackedDraft | PackedTarget  # a head, or a small model of the same vocabulary
