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
from eagle3core.kernels.experts.maps.order import ALTERNATE, COLUMNS, HALVES, Pairs
from eagle3core.kernels.experts.matrices import Matrices, Mxfp4Matrices, PlainMatrices, in_order
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
    get: Get, stored: Get, prefix: str, block: BlockGeometry, *, packs: bool = False, fp8: bool = False
) -> PackedExperts:  # fmt: skip
    """The experts of the layer whose names begin with `prefix`, e.g. "model.layers.0.mlp.".

    `stored`: as `get`, in the dtype and at the place that it is stored in. `packs`: in the kernels' order. `fp8`:
    matrices of more than 8 bits become e4m3.

    Raises:
        KernelLimit: with `packs`, matrices that the kernels have no order for.
    """
    geometry = block.experts
    assert geometry is not None, "a layer without experts has one feed-forward"
    if geometry.gate == "clamped":
        router, bias = (get(f"{prefix}router.{part}") for part in ("weight", "bias"))
        gate_up, down = (
            _gpt_oss_map(get, stored, f"{prefix}experts.{n}_proj", geometry, pairs if packs else None, fp8)
            for n, pairs in (("gate_up", ALTERNATE), ("down", COLUMNS))
        )
        return PackedExperts(geometry, router, gate_up, down, bias)
    router = get(f"{prefix}gate.weight")

    def part(i: int, name: str) -> Tensor:
        return get(f"{prefix}experts.{i}.{name}_proj.weight")

    def gate_up_of(i: int) -> Tensor:
        return torch.cat([part(i, "gate"), part(i, "up")])

    gate_up = _kept(geometry.n, gate_up_of, HALVES if packs else None, fp8)
    down = _kept(geometry.n, lambda i: part(i, "down"), COLUMNS if packs else None, fp8)
    return PackedExperts(geometry, router, gate_up, down)


def _kept(
    n: int, matrix: Callable[[int], Tensor], pairs: Pairs | None, fp8: bool, bias: Tensor | None = None
) -> Matrices:  # fmt: skip
    """One map of n experts, in the kernels' order if `pairs` are given; `matrix` gives `[rows, k]` of one."""
    if pairs is not None:
        return in_order(n, lambda i: quantised(matrix(i)) if fp8 else matrix(i), pairs, bias)
    weight, scales = None, []
    for i in range(n):
        one = matrix(i)
        if fp8:
            one, scale = quantised(one)
            scales.append(scale)
        if weight is None:
            weight = one.new_empty(n, *one.shape)
        weight[i] = one
    assert weight is not None, "a layer has at least one expert"
    return PlainMatrices(weight, bias, torch.stack(scales) if fp8 else None)


def _gpt_oss_map(
    get: Get, stored: Get, name: str, geometry: ExpertsGeometry, pairs: Pairs | None, fp8: bool
) -> Matrices:  # fmt: skip
    """One map of all experts, as it lies in 4 bits, or turned where it is plain: rows are outputs.

    `pairs`: of the kernels' order, which each matrix is brought into; None: as it is.
    """
    bias = get(f"{name}_bias")
    device, dtype = bias.device, bias.dtype
    if not geometry.is_mxfp4:
        plain = stored(name)  # [X, reads, writes]
        return _kept(geometry.n, lambda i: plain[i].T.to(device, dtype), pairs, fp8, bias)
    blocks, scales = stored(f"{name}_blocks"), stored(f"{name}_scales")
    if pairs is None:
        return Mxfp4Matrices(blocks.to(device), scales.to(device), bias)
    return in_order(geometry.n, lambda i: (blocks[i].to(device), scales[i].to(device)), pairs, bias)
