"""Makes packed layers of named tensors: merged, in the dtype or format asked for, in the kernels' order.

Layer by layer from any source (a checkpoint, or a function that makes them), so that besides the packed model only the
tensors of one layer exist (`pack`).
Source: docs/requirements.md R-22, R-23, R-104; packing order: `kernels.gemm.pack_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.checkpoint.fp8 import scale_name
from eagle3core.geometry import Activation, BlockGeometry
from eagle3core.kernels.card import E4M3
from eagle3core.kernels.gemm.epilogue import Epilogue, quads_of
from eagle3core.kernels.gemm.order.weight import pack_scales, pack_weight
from eagle3core.kernels.layer.rms_norm import accumulation_dtype
from eagle3core.speculative import WeightFormat
from eagle3core.weights.experts import PackedExperts, pack_experts
from eagle3core.weights.fp8 import Fp8Matrix, quantised, stacked
from eagle3core.weights.packed import PackedLayer, PackedLinear, PackedMlp

Source = Callable[[str], Tensor]  # a weight by its Hugging Face name, on any device, in any floating dtype
HEAD_STEP = 64  # rows: the second pass of the argmax reads the best of every 16 in groups of 4


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
