"""The experts of a layer as the step reads them: the router, and both maps of all of them in one tensor each.

Matrices are taken one at a time into the tensor that they stay in, so packing needs one expert's memory beside it.
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


def pack_experts(get: Get, stored: Get, prefix: str, block: BlockGeometry, *, packs: bool = False) -> PackedExperts:
    """The experts of the layer whose names begin with `prefix`, e.g. "model.layers.0.mlp.".

    `stored`: as `get`, in the dtype and at the place that it is stored in. `packs`: in the kernels' order.

    Raises:
        KernelLimit: with `packs`, matrices that the kernels have no order for.
    """
    geometry = block.experts
    assert geometry is not None, "a layer without experts has one feed-forward"
    if geometry.gate == "clamped":
        router, bias = (get(f"{prefix}router.{part}") for part in ("weight", "bias"))
        gate_up, down = (
            _gpt_oss_map(get, stored, f"{prefix}experts.{n}_proj", geometry, pairs if packs else None)
            for n, pairs in (("gate_up", ALTERNATE), ("down", COLUMNS))
        )
        return PackedExperts(geometry, router, gate_up, down, bias)
    return (_ordered_qwen3_experts if packs else _qwen3_experts)(get, prefix, geometry, block.hidden_size)


def _qwen3_experts(get: Get, prefix: str, geometry: ExpertsGeometry, hidden: int) -> PackedExperts:
    """Every map of every expert is a tensor of its own."""
    router, inner = get(f"{prefix}gate.weight"), geometry.intermediate_size
    gate_up = router.new_empty(geometry.n, 2 * inner, hidden)
    down = router.new_empty(geometry.n, hidden, inner)
    for i in range(geometry.n):
        for part, matrix in (("gate", gate_up[i, :inner]), ("up", gate_up[i, inner:]), ("down", down[i])):
            matrix.copy_(get(f"{prefix}experts.{i}.{part}_proj.weight"))
    return PackedExperts(geometry, router, PlainMatrices(gate_up), PlainMatrices(down))


def _ordered_qwen3_experts(get: Get, prefix: str, geometry: ExpertsGeometry, hidden: int) -> PackedExperts:
    router = get(f"{prefix}gate.weight")

    def part(i: int, name: str) -> Tensor:
        return get(f"{prefix}experts.{i}.{name}_proj.weight")

    gate_up = in_order(geometry.n, lambda i: torch.cat([part(i, "gate"), part(i, "up")]), HALVES)
    return PackedExperts(geometry, router, gate_up, in_order(geometry.n, lambda i: part(i, "down"), COLUMNS))


def _gpt_oss_map(get: Get, stored: Get, name: str, geometry: ExpertsGeometry, pairs: Pairs | None) -> Matrices:
    """One map of all experts, as it lies in 4 bits, or turned where it is plain: rows are outputs.

    `pairs`: of the kernels' order, which each matrix is brought into; None: as it is.
    """
    bias = get(f"{name}_bias")
    device, dtype = bias.device, bias.dtype
    if geometry.is_mxfp4:
        blocks, scales = stored(f"{name}_blocks"), stored(f"{name}_scales")
        if pairs is None:
            return Mxfp4Matrices(blocks.to(device), scales.to(device), bias)
        return in_order(geometry.n, lambda i: (blocks[i].to(device), scales[i].to(device)), pairs, bias)
    plain = stored(name)  # [X, reads, writes]
    if pairs is not None:
        return in_order(geometry.n, lambda i: plain[i].T.to(device, dtype), pairs, bias)
    made = bias.new_empty(plain.shape[0], plain.shape[2], plain.shape[1])
    for matrix, source in zip(made, plain, strict=True):
        matrix.copy_(source.T)
    return PlainMatrices(made, bias)
