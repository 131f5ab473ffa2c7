"""The matrices of a layer's experts, as they are kept: one of them at a time, in the dtype that is computed in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

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

    def rolled(self) -> Mxfp4Matrices:
        """The same with every matrix one expert further, the last first."""
        return replace(self, blocks=self.blocks.roll(1, dims=0), scales=self.scales.roll(1, dims=0))


@dataclass(frozen=True)
class Fp8Matrices:
    """One map of every expert in FP8, as `weights.fp8` keeps other maps: a value is stored[r, c] * scale[r].

    Attributes:
        stored: `[X, rows, k]` e4m3. scales: `[X, rows]` fp32. bias: `[X, rows]` or None.
    """

    stored: Tensor
    scales: Tensor
    bias: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.stored, self.scales, *([] if self.bias is None else [self.bias])]

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """`[rows, k]` of one expert, the values that are meant."""
        return self.stored[expert].to(dtype) * self.scales[expert, :, None].to(dtype)

    def rolled(self) -> Fp8Matrices:
        """The same with every matrix one expert further, the last first."""
        return replace(self, stored=self.stored.roll(1, dims=0), scales=self.scales.roll(1, dims=0))


Matrices = PlainMatrices | Mxfp4Matrices | Fp8Matrices
