"""Weights as programs read them: merged, each matrix once on the device, and packed where kernels run.

Made layer by layer from any source of named tensors (a checkpoint, or a function that makes them), so that besides the
packed model only the tensors of one layer exist (`pack`). q, k and v become one matrix, gate and up another; a head is
padded to whole groups of 64 rows, which the padding's bias of minus infinity keeps from ever being chosen.
Source: docs/requirements.md R-22, R-23, R-104; packing order: `kernels.gemm.pack_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.checkpoint.fp8 import scale_name
from eagle3core.geometry import UNSCALED, Activation, BlockGeometry, CacheScales, DraftGeometry, TargetGeometry
from eagle3core.kernels.card import E4M3
from eagle3core.kernels.gemm.epilogue import Epilogue, quads_of
from eagle3core.kernels.gemm.order.weight import pack_scales, pack_weight
from eagle3core.kernels.layer.rms_norm import accumulation_dtype
from eagle3core.speculative import WeightFormat
from eagle3core.weights.experts import PackedExperts, pack_experts
from eagle3core.weights.fp8 import Fp8Matrix, quantised, stacked

Source = Callable[[str], Tensor]  # a weight by its Hugging Face name, on any device, in any floating dtype
HEAD_STEP = 64  # rows: the second pass of the argmax reads the best of every 16 in groups of 4


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

    def from_row(self, first: int) -> PackedLinear:
        """The map of the rows from `first` on, a multiple of a tile's 16, in the same memory."""
        of_blocks = self.scales is not None and self.scales.ndim > 1
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


class Packer:
    """Takes named tensors to a device and packs them.

    Args:
        source: gives a weight by name; it is asked for each weight once.
        dtype: in which everything is kept.
        device: where to.
        block: tokens of a cache block, which the q, k, v map writes to.
        packs: matrices go into the kernels' order; without kernels they stay row-major.
        weights: the format of the maps; tables, gains and biases keep the dtype.
    """

    def __init__(
        self, source: Source, dtype: torch.dtype, device: torch.device, block: int, *, packs: bool = True,
        weights: WeightFormat = "as_stored",
    ) -> None:  # fmt: skip
        self.source, self.dtype, self.device, self.block, self.packs = source, dtype, device, block, packs
        self.weights = weights

    def get(self, name: str) -> Tensor:
        """The weight on the device, in the dtype, aligned as the kernels read it; of e4m3 the values that it means."""
        return self._in_dtype(self.stored(name))

    def stored(self, name: str) -> Tensor | Fp8Matrix:
        """The weight on the device: in the dtype, or as it is stored in e4m3."""
        tensor = self.source(name)
        if tensor.dtype == E4M3:
            return Fp8Matrix(tensor.to(self.device), self.source(scale_name(name)).to(self.device))
        tensor = tensor.to(device=self.device, dtype=self.dtype).contiguous()
        return tensor.clone() if tensor.data_ptr() % 16 else tensor

    def _in_dtype(self, weight: Tensor | Fp8Matrix) -> Tensor:
        return weight.values(self.dtype) if isinstance(weight, Fp8Matrix) else weight

    def stack(self, names: Sequence[str]) -> Tensor | Fp8Matrix:
        """Weights one after the other; in e4m3 if all of them are and their scales go together."""
        parts = [self.stored(name) for name in names]
        kept = [part for part in parts if isinstance(part, Fp8Matrix)]
        together = stacked(kept) if len(kept) == len(parts) else None
        if together is not None:
            return together
        tensors = [self._in_dtype(part) for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def linear(self, epilogue: Epilogue, names: Sequence[str]) -> PackedLinear:
        """The map whose rows are those of `names` (without ".weight"), one after the other."""
        self._give_back()
        weight = self.stack([f"{name}.weight" for name in names])
        bias = self._in_dtype(self.stack([f"{name}.bias" for name in names])) if epilogue.has_bias else None
        return self._map(weight, epilogue, bias)

    def layer(
        self, prefix: str, block: BlockGeometry, *, normed: bool, bias: tuple[bool, bool, bool] = (False, False, False),
        activation: Activation = "silu",
    ) -> PackedLayer:  # fmt: skip
        """A decoder layer. `normed`: q, k, v read an input whose norm they apply; `bias`: of q, k, v; o; the MLP."""
        quads, (qkv_bias, o_bias, mlp_bias) = quads_of(block.hidden_size), bias
        read = quads if normed else 0
        qkv = Epilogue("qkv", quads=read, has_bias=qkv_bias, head_dim=block.head_dim, block=self.block)
        q_gain = k_gain = None
        if block.has_qk_norm:  # a head's norm needs all its sums, which lie in several tiles of the map
            qkv = Epilogue("store", quads=read, has_bias=qkv_bias)
            q_gain, k_gain = (self.get(f"{prefix}self_attn.{n}_norm.weight") for n in "qk")
        return PackedLayer(
            attn_gain=self.get(f"{prefix}input_layernorm.weight"),
            qkv=self.linear(qkv, [f"{prefix}self_attn.{name}_proj" for name in "qkv"]),
            o=self.linear(Epilogue("residual", has_bias=o_bias), [f"{prefix}self_attn.o_proj"]),
            mlp_gain=self.get(f"{prefix}post_attention_layernorm.weight"),
            mlp=self._experts(f"{prefix}mlp.", block)
            if block.experts is not None
            else self.mlp(f"{prefix}mlp.", block, has_bias=mlp_bias, activation=activation),
            q_gain=q_gain,
            k_gain=k_gain,
            sinks=self.get(f"{prefix}self_attn.sinks").to(accumulation_dtype(self.dtype)) if block.has_sinks else None,
        )

    def mlp(self, prefix: str, block: BlockGeometry, *, has_bias: bool, activation: Activation = "silu") -> PackedMlp:
        """One feed-forward."""
        swiglu = Epilogue("swiglu", quads=quads_of(block.hidden_size), has_bias=has_bias, activation=activation)
        return PackedMlp(
            self.linear(swiglu, [f"{prefix}{n}_proj" for n in ("gate", "up")]),
            self.linear(Epilogue("residual", has_bias=has_bias), [f"{prefix}down_proj"]),
        )

    def _experts(self, prefix: str, block: BlockGeometry) -> PackedExperts:
        self._give_back()
        return pack_experts(self, prefix, block, packs=self.packs, fp8=self.weights == "fp8")

    def head(self, weight: Tensor | Fp8Matrix, *, may_share: bool) -> PackedLinear:
        """The output map of `weight: [V, E]`, padded; read as it lies if `may_share` and no padding is needed."""
        n, k = (weight.stored if isinstance(weight, Fp8Matrix) else weight).shape
        padding = -n % HEAD_STEP
        epilogue = Epilogue("head", quads=quads_of(k), has_bias=padding > 0)
        if isinstance(weight, Tensor) and may_share and not padding:
            return PackedLinear(epilogue, weight, n, k, is_packed=False)
        bias = None
        if padding:
            weight = weight.padded(padding) if isinstance(weight, Fp8Matrix) else F.pad(weight, (0, 0, 0, padding))
            bias = torch.zeros(n + padding, dtype=self.dtype, device=self.device)
            bias[n:] = float("-inf")
        return self._map(weight, epilogue, bias, is_table=may_share)

    def _map(
        self, weight: Tensor | Fp8Matrix, epilogue: Epilogue, bias: Tensor | None, *, is_table: bool = False
    ) -> PackedLinear:
        self._give_back()
        scales = None
        if isinstance(weight, Tensor) and self.weights == "fp8" and not is_table:
            weight = quantised(weight)
        if isinstance(weight, Fp8Matrix):
            weight, scales = weight
        rows, k = weight.shape
        if scales is not None and scales.ndim > 1 and self.packs:
            scales = pack_scales(scales, epilogue)
        packed = pack_weight(weight, epilogue) if self.packs else weight
        return PackedLinear(epilogue, packed, rows, k, self.packs, bias, scales)

    def _give_back(self) -> None:
        """What raw weights needed for a while, before others are made: or packed ones would lie in pieces of it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
