"""The experts of a layer as the step reads them: the router, and both maps of all of them in one tensor each.

Matrices are taken one at a time into the tensor that they stay in, so packing needs one expert's memory beside it. In
FP8 each is quantised as it is taken; what is stored in 4 bits, or in e4m3, stays so.
Source: names as Hugging Face stores Qwen3-MoE and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle3core.errors import CheckpointError
from eagle3core.geometry import BlockGeometry, ExpertsGeometry
from eagle3core.kernels.experts.maps.order import ALTERNATE, COLUMNS, HALVES, Pairs
from eagle3core.kernels.experts.matrices import Matrices, Mxfp4Matrices, PlainMatrices, in_order
from eagle3core.weights.fp8 import Fp8Matrix, quantised

Matrix = Tensor | Fp8Matrix  # `[rows, k]`


class Named(Protocol):
    """Weights by their Hugging Face names."""

    source: Callable[[str], Tensor]  # as it lies in its file

    def get(self, name: str) -> Tensor:
        """On the device, in the dtype."""

    def stack(self, names: Sequence[str]) -> Matrix:
        """Several on the device, one below the other, in the dtype or in e4m3."""


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
    named: Named, prefix: str, block: BlockGeometry, *, packs: bool = False, fp8: bool = False
) -> PackedExperts:  # fmt: skip
    """The experts of the layer whose names begin with `prefix`, e.g. "model.layers.0.mlp.".

    `packs`: in the kernels' order. `fp8`: matrices of more than 8 bits become e4m3.

    Raises:
        CheckpointError: some experts of a map are in e4m3 and others are not, or with scales of another form.
        KernelLimit: with `packs`, matrices that the kernels have no order for.
    """
    geometry = block.experts
    assert geometry is not None, "a layer without experts has one feed-forward"
    if geometry.gate == "clamped":
        router, bias = (named.get(f"{prefix}router.{part}") for part in ("weight", "bias"))
        gate_up, down = (
            _gpt_oss_map(named, f"{prefix}experts.{n}_proj", geometry, pairs if packs else None, fp8)
            for n, pairs in (("gate_up", ALTERNATE), ("down", COLUMNS))
        )
        return PackedExperts(geometry, router, gate_up, down, bias)
    gate_up, down = (
        _kept(geometry.n, _of_each(named, f"{prefix}experts.", parts), pairs if packs else None, fp8)
        for parts, pairs in ((("gate", "up"), HALVES), (("down",), COLUMNS))
    )
    return PackedExperts(geometry, named.get(f"{prefix}gate.weight"), gate_up, down)


def _of_each(named: Named, prefix: str, parts: Sequence[str]) -> Callable[[int], Matrix]:
    """The matrix of an expert by its number, in the format of the first that is asked for."""
    formats: list[tuple[object, ...]] = []

    def matrix(i: int) -> Matrix:
        names = [f"{prefix}{i}.{part}_proj.weight" for part in parts]
        made = named.stack(names)
        formats.append((type(made), made.scales.ndim) if isinstance(made, Fp8Matrix) else (type(made),))
        if formats[0] != formats[-1]:
            raise CheckpointError(
                f"{names[0]} is not stored as those of the experts before it",
                "one format in a map of all experts: plain, or FP8 with scales of rows or of blocks",
                'pass target_weights="dequantised"',
            )
        return made

    return matrix


def _kept(
    n: int, matrix: Callable[[int], Matrix], pairs: Pairs | None, fp8: bool, bias: Tensor | None = None
) -> Matrices:  # fmt: skip
    """One map of n experts, in the kernels' order if `pairs` are given; `matrix` gives `[rows, k]` of one."""

    def of_format(i: int) -> Matrix:
        one = matrix(i)
        return quantised(one) if fp8 and isinstance(one, Tensor) else one

    if pairs is not None:
        return in_order(n, of_format, pairs, bias)
    weight, scales = None, []
    for i in range(n):
        one = of_format(i)
        if isinstance(one, Fp8Matrix):
            one, own = one
            scales.append(own)
        if weight is None:
            weight = one.new_empty(n, *one.shape)
        weight[i] = one
    assert weight is not None, "a layer has at least one expert"
    return PlainMatrices(weight, bias, torch.stack(scales) if scales else None)


def _gpt_oss_map(
    named: Named, name: str, geometry: ExpertsGeometry, pairs: Pairs | None, fp8: bool
) -> Matrices:  # fmt: skip
    """One map of all experts, as it lies in 4 bits, or turned where it is plain: rows are outputs.

    `pairs`: of the kernels' order, which each matrix is brought into; None: as it is.
    """
    bias = named.get(f"{name}_bias")
    device, dtype = bias.device, bias.dtype
    if not geometry.is_mxfp4:
        plain = named.source(name)  # [X, reads, writes]
        return _kept(geometry.n, lambda i: plain[i].T.to(device, dtype), pairs, fp8, bias)
    blocks, scales = (named.source(f"{name}_{part}") for part in ("blocks", "scales"))
    if pairs is None:
        return Mxfp4Matrices(blocks.to(device), scales.to(device), bias)
    return in_order(geometry.n, lambda i: (blocks[i].to(device), scales[i].to(device)), pairs, bias)
