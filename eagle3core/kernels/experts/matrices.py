"""The matrices of a layer's experts, as they are kept: one of them at a time, in the dtype that is computed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3core.kernels.card import E4M3
from eagle3core.kernels.experts.maps.order import (
    Pairs,
    fp8_of,
    mxfp4_of,
    ordered_fp8,
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
        weight: `[X, rows, k]`. bias: `[X, rows]` or None. scales: `[X, rows]` fp32 of weights in e4m3, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.weight, self.bias, self.scales) if tensor is not None]

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """`[rows, k]` of one expert."""
        values = self.weight[expert].to(dtype)
        return values if self.scales is None else values * self.scales[expert, :, None].to(dtype)

    def bias_of(self, expert: int) -> Tensor | None:
        """`[rows]` of one expert, or None."""
        return None if self.bias is None else self.bias[expert]

    def rolled(self) -> PlainMatrices:
        """The same with every matrix one expert further, the last first."""
        scales = None if self.scales is None else self.scales.roll(1, dims=0)
        return replace(self, weight=self.weight.roll(1, dims=0), scales=scales)


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
        scales: `[X, rows]` fp32 in the tiles' order, of "fp8".
    """

    data: Tensor
    form: str
    pairs: Pairs
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.data, self.bias, self.scales) if tensor is not None]

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """`[rows, k]` of one expert, decoded."""
        if self.form == "mxfp4":
            return decoded(*mxfp4_of(self.data[expert], self.pairs), dtype)
        if self.form == "fp8":
            assert self.scales is not None, "values in e4m3 have a scale a row"
            return fp8_of(self.data[expert], self.pairs).to(dtype) * self._in_rows(self.scales[expert])[:, None].to(
                dtype
            )
        return plain_of(self.data[expert], self.pairs).to(dtype)

    def bias_of(self, expert: int) -> Tensor | None:
        """`[rows]` of one expert, or None."""
        return None if self.bias is None else self._in_rows(self.bias[expert])

    def _in_rows(self, ordered: Tensor) -> Tensor:
        made = torch.empty_like(ordered)
        made[rows_in_order(len(made), self.pairs).flatten().to(made.device)] = ordered
        return made

    def rolled(self) -> OrderedMatrices:
        """The same with every matrix one expert further, the last first."""
        scales = None if self.scales is None else self.scales.roll(1, dims=0)
        return replace(self, data=self.data.roll(1, dims=0), scales=scales)


Matrices = PlainMatrices | Mxfp4Matrices | OrderedMatrices


Stored = Tensor | tuple[Tensor, Tensor]  # `[rows, k]`; e4m3 with scales `[rows]`; or blocks and scales of MXFP4


def in_order(
    n: int, matrix: Callable[[int], Stored], pairs: Pairs, bias: Tensor | None = None
) -> OrderedMatrices:  # fmt: skip
    """One map of n experts for kernels; beside it only one expert's matrix is there at a time.

    Args:
        matrix: gives that of an expert, on the device where they are kept. bias: `[n, rows]`.

    Raises:
        KernelLimit: rows that do not fill tiles, k that is no multiple of 32, or a scale of MXFP4 above 2.
    """
    data, scales, form = None, [], "plain"
    for i in range(n):
        given = matrix(i)
        if not isinstance(given, tuple):
            one = ordered_plain(given, pairs)
        elif given[0].dtype == E4M3:
            one, form = ordered_fp8(given[0], pairs), "fp8"
            scales.append(given[1])
        else:
            one, form = ordered_mxfp4(*given, pairs), "mxfp4"
        if data is None:
            data = one.new_empty(n, *one.shape)
        data[i] = one
        if one.is_meta:  # of shapes without values one expert says all
            scales *= n
            break
    assert data is not None, "a layer has at least one expert"
    of_rows = torch.stack(scales) if scales else None
    return OrderedMatrices(data, form, pairs, _by_tiles(bias, pairs), _by_tiles(of_rows, pairs))


def _by_tiles(values: Tensor | None, pairs: Pairs) -> Tensor | None:
    """`[X, rows]` in the tiles' order."""
    if values is None:
        return None
    return values[:, rows_in_order(values.shape[1], pairs).flatten().to(values.device)].contiguous()
