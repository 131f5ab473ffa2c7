"""The experts of a layer as the step reads them: the router, and both maps of all of them in one tensor each.

Matrices are taken one at a time into the tensor that they stay in, so packing needs one expert's memory beside it. In
FP8 each is quantised as it is taken; what is stored in 4 bits stays so.
Source: names as Hugging Face stores Qwen3-MoE and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.geometry import BlockGeometry, ExpertsGeometry
from eagle3core.kernels.experts.matrices import Fp8Matrices, Matrices, Mxfp4Matrices, PlainMatrices
from eagle3core.speculative import WeightFormat
from eagle3core.weights.fp8 import quantised

Get = Callable[[str], Tensor]  # a weight by its Hugging Face name, on its device, in its dtype


@dataclass(frozen=True)
class PackedExperts:
    """A layer's experts.

    Attributes:
        router: `[X, E]`. router_bias: `[X]` or None.
        gate_up: `[X, 2 F, E]`, as the gate of the geometry wants its rows. down: `[X, E, F]`.
    """

    geometry: ExpertsGeometry
    router: Tensor
    gate_up: Matrices
    down: Matrices
    router_bias: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        bias = [] if self.router_bias is None else [self.router_bias]
        return [self.router, *bias, *self.gate_up.tensors, *self.down.tensors]


def pack_experts(
    get: Get, stored: Get, prefix: str, block: BlockGeometry, weights: WeightFormat = "as_stored"
) -> PackedExperts:
    """The experts of the layer whose names begin with `prefix`, e.g. "model.layers.0.mlp.".

    `stored`: as `get`, in the dtype that it is stored in. `weights`: of both maps where the family stores them plain.
    """
    geometry = block.experts
    assert geometry is not None, "a layer without experts has one feed-forward"
    if geometry.gate == "clamped":
        router, bias = (get(f"{prefix}router.{part}") for part in ("weight", "bias"))
        gate_up, down = (_gpt_oss_map(get, stored, f"{prefix}experts.{n}_proj", geometry) for n in ("gate_up", "down"))
        return PackedExperts(geometry, router, gate_up, down, bias)
    return _qwen3_experts(get, prefix, geometry, block.hidden_size, weights)


def _qwen3_experts(
    get: Get, prefix: str, geometry: ExpertsGeometry, hidden: int, weights: WeightFormat
) -> PackedExperts:
    """Every map of every expert is a tensor of its own."""
    router, inner = get(f"{prefix}gate.weight"), geometry.intermediate_size
    gate_up, down = (_room(router, (geometry.n, *shape), weights) for shape in ((2 * inner, hidden), (hidden, inner)))
    for i in range(geometry.n):
        for part, maps, rows in (
            ("gate", gate_up, slice(0, inner)), ("up", gate_up, slice(inner, None)), ("down", down, slice(None)),
        ):  # fmt: skip
            matrix = get(f"{prefix}experts.{i}.{part}_proj.weight")
            if isinstance(maps, Fp8Matrices):
                maps.stored[i, rows], maps.scales[i, rows] = quantised(matrix)
            else:
                maps.weight[i, rows] = matrix
    return PackedExperts(geometry, router, gate_up, down)


def _room(like: Tensor, shape: tuple[int, int, int], weights: WeightFormat) -> PlainMatrices | Fp8Matrices:
    """Where matrices of `shape: [X, rows, k]` are kept."""
    if weights == "fp8":
        stored = torch.empty(shape, dtype=torch.float8_e4m3fn, device=like.device)
        return Fp8Matrices(stored, torch.empty(shape[:2], dtype=torch.float32, device=like.device))
    return PlainMatrices(like.new_empty(shape))


def _gpt_oss_map(get: Get, stored: Get, name: str, geometry: ExpertsGeometry) -> Matrices:
    """One map of all experts, as it lies in 4 bits, or turned where it is plain: rows are outputs."""
    bias = get(f"{name}_bias")
    if geometry.is_mxfp4:
        return Mxfp4Matrices(stored(f"{name}_blocks"), stored(f"{name}_scales"), bias)
    plain = stored(name)  # [X, reads, writes]
    made = bias.new_empty(plain.shape[0], plain.shape[2], plain.shape[1])
    for matrix, source in zip(made, plain, strict=True):
        matrix.copy_(source.T)
    return PlainMatrices(made, bias)
