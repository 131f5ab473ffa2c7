"""The matrices of a layer's experts, as they are kept: one of them at a time, in the dtype that is computed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3core.kernels.card import E4M3
from eagle3core.kernels.experts.maps.order import (
    FP8,
    FP8_BLOCKS,
    Pairs,
    block_scales_of,
    fp8_of,
    mxfp4_of,
    ordered_block_scales,
    ordered_fp8,
    ordered_mxfp4,
    ordered_plain,
    plain_of,
    rows_in_order,
)
from eagle3core.kernels.experts.mxfp4 import decoded
from eagle3core.kernels.gemm.fp8.operands import by_element


@dataclass(frozen=True)
class PlainMatrices:
    """One map of every expert.

    Attributes:
        weight: `[X, rows, k]`. bias: `[X, rows]` or None. scales: fp32 of weights in e4m3, `[X, rows]`, or
            `[X, rows / 8, blocks]` of 8 rows by 128 k each; else None.
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
        if self.scales is None:
            return values
        return values * by_element(self.scales[expert], values.shape[1]).to(dtype)

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
        scales: fp32, of "fp8" `[X, rows]` in the tiles' order, of "fp8_blocks" `[X, tiles, blocks, 2]`.
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
        if self.form in (FP8, FP8_BLOCKS):
            assert self.scales is not None, "values in e4m3 have scales"
            values, own = fp8_of(self.data[expert], self.pairs).to(dtype), self.scales[expert]
            scales = self._in_rows(own) if self.form == FP8 else block_scales_of(own, self.pairs)
            return values * by_element(scales, values.shape[1]).to(dtype)
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


# `[rows, k]`; e4m3 with scales `[rows]` or `[rows / 8, blocks]`; or blocks and scales of MXFP4
Stored = Tensor | tuple[Tensor, Tensor]


def in_order(
    n: int, matrix: Callable[[int], Stored], pairs: Pairs, bias: Tensor | None = None
) -> OrderedMatrices:  # fmt: skip
    """One map of n experts for kernels; beside it only one expert's matrix is there at a time.

    Args:
        matrix: gives that of an expert, on the device where they are kept. bias: `[n, rows]`.

    Raises:
        KernelLimit: rows that do not fill tiles, k that is no multiple of 32, or a scale of MXFP4 above 2.
    """
    data, scales, form = None, [], ""
    for i in range(n):
        one, form, own = _ordered(matrix(i), pairs)
        scales += [] if own is None else [own]
        if data is None:
            data = one.new_empty(n, *one.shape)
        data[i] = one
        if one.is_meta:  # of shapes without values one expert says all
            scales *= n
            break
    assert data is not None, "a layer has at least one expert"
    of_rows = None if bias is None else torch.stack([_by_tiles(row, pairs) for row in bias])
    return OrderedMatrices(data, form, pairs, of_rows, torch.stack(scales) if scales else None)


def _ordered(given: Stored, pairs: Pairs) -> tuple[Tensor, str, Tensor | None]:
    """One expert's matrix in the kernels' order, its form, and scales that lie beside it."""
    if not isinstance(given, tuple):
        return ordered_plain(given, pairs), "plain", None
    values, scales = given
    if values.dtype != E4M3:
        return ordered_mxfp4(values, scales, pairs), "mxfp4", None
    if scales.ndim == 1:
        return ordered_fp8(values, pairs), FP8, _by_tiles(scales, pairs)
    return ordered_fp8(values, pairs), FP8_BLOCKS, ordered_block_scales(scales, pairs)


def _by_tiles(values: Tensor, pairs: Pairs) -> Tensor:
    """`[rows]` in the tiles' order."""
    return values[rows_in_order(len(values), pairs).flatten().to(values.device)]
