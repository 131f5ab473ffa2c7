"""The matrices of a layer's experts, as they are kept: one of them at a time, in the dtype that is computed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3core.kernels.experts.maps.order import (
    Pairs,
    mxfp4_of,
    ordered_mxfp4,
    ordered_plain,
    plain_of,
    rows_in_order,
)
from eagle3core.kernels.experts.mxfp4 import decoded


@dataclass(frozen=True)
class PlainMatrices:
    """One map of every expert.

    Attributes:
        weight: `[X, rows, k]`. bias: `[X, rows]` or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """`[rows, k]` of one expert."""
        return self.weight[expert].to(dtype)

    def bias_of(self, expert: int) -> Tensor | None:
        """`[rows]` of one expert, or None."""
        return None if self.bias is None else self.bias[expert]

    def rolled(self) -> PlainMatrices:
        """The same with every matrix one expert further, the last first."""
        return replace(self, weight=self.weight.roll(1, dims=0))


@dataclass(frozen=True)
class Mxfp4Matrices:
    """One map of every expert in 4 bits, as stored.

    Attributes:
        blocks: `[X, rows, k / 32, 16]` and scales: `[X, rows, k / 32]`, uint8: see `mxfp4`. bias: `[X, rows]` or None.
    """

    blocks: Tensor
    scales: Tensor
    bias: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.blocks, self.scales, *([] if self.bias is None else [self.bias])]

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """`[rows, k]` of one expert, decoded."""
        return decoded(self.blocks[expert], self.scales[expert], dtype)

    def bias_of(self, expert: int) -> Tensor | None:
        """`[rows]` of one expert, or None."""
        return None if self.bias is None else self.bias[expert]

    def rolled(self) -> Mxfp4Matrices:
        """The same with every matrix one expert further, the last first."""
        return replace(self, blocks=self.blocks.roll(1, dims=0), scales=self.scales.roll(1, dims=0))


@dataclass(frozen=True)
class OrderedMatrices:
    """One map of every expert in the order in which kernels read it: see `maps.order`.

    Attributes:
        data: `[X, tiles, units, ...]`, uint8 of "mxfp4", else the matrices' dtype. form: of `maps.order.UNIT_BYTES`.
        pairs: which rows a tile holds. bias: `[X, rows]` in the tiles' order, or None.
        scales: None; kept for values of eight bits.
    """

    data: Tensor
    form: str
    pairs: Pairs
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.data] if self.bias is None else [self.data, self.bias]

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """`[rows, k]` of one expert, decoded."""
        if self.form == "mxfp4":
            return decoded(*mxfp4_of(self.data[expert], self.pairs), dtype)
        return plain_of(self.data[expert], self.pairs).to(dtype)

    def bias_of(self, expert: int) -> Tensor | None:
        """`[rows]` of one expert, or None."""
        if self.bias is None:
            return None
        made = torch.empty_like(self.bias[expert])
        made[rows_in_order(len(made), self.pairs).flatten().to(made.device)] = self.bias[expert]
        return made

    def rolled(self) -> OrderedMatrices:
        """The same with every matrix one expert further, the last first."""
        return replace(self, data=self.data.roll(1, dims=0))


Matrices = PlainMatrices | Mxfp4Matrices | OrderedMatrices


def in_order(
    n: int, matrix: Callable[[int], Tensor | tuple[Tensor, Tensor]], pairs: Pairs, bias: Tensor | None = None
) -> OrderedMatrices:  # fmt: skip
    """One map of n experts for kernels; beside it only one expert's matrix is there at a time.

    Args:
        matrix: gives `[rows, k]` of an expert, or (blocks, scales) of one in MXFP4, on the device where they are kept.
        bias: `[n, rows]`.

    Raises:
        KernelLimit: rows that do not fill tiles, k that is no multiple of 32, or a scale above 2.
    """
    data, form = None, "plain"
    for i in range(n):
        given = matrix(i)
        if isinstance(given, tuple):
            one, form = ordered_mxfp4(*given, pairs), "mxfp4"
        else:
            one = ordered_plain(given, pairs)
        if data is None:
            data = one.new_empty(n, *one.shape)
        data[i] = one
    assert data is not None, "a layer has at least one expert"
    if bias is not None:
        bias = bias[:, rows_in_order(bias.shape[1], pairs).flatten().to(bias.device)].contiguous()
    return OrderedMatrices(data, form, pairs, bias)
