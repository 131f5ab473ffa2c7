"""Bytes that weights take where they are kept, from their names and shapes alone."""

from __future__ import annotations

from math import prod

import torch

from eagle3core.checkpoint.experts.names import PACKED_BYTES
from eagle3core.checkpoint.fp8 import scale_name
from eagle3core.checkpoint.target import TargetCheckpoint, target_shapes
from eagle3core.kernels.layer.rms_norm import accumulation_dtype
from eagle3core.speculative import WeightFormat

_TABLES = ("embed_tokens", "mlp.gate.", "mlp.router.")  # what is no linear map of a packed layer
SINKS = ".sinks"  # how names of attention's end


def bytes_on_device(target: TargetCheckpoint, weights: WeightFormat) -> int:
    """Bytes of a target's weights where they are kept: maps stored in FP8 as they are, others in `weights`."""
    total, named = 0, target.weights
    for name, shape in target_shapes(target.geometry):
        scales = named.get(scale_name(name))
        kept = None if scales is None else prod(shape) + 4 * scales.numel()
        total += stored_bytes(name, shape, target.dtype.itemsize, weights) if kept is None else kept
    return total


def kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """In which a weight of a checkpoint is kept by models in `dtype`: bytes of 4 bits as they are, sinks as attention
    sums."""
    if name.endswith(PACKED_BYTES):
        return torch.uint8
    return accumulation_dtype(dtype) if name.endswith(SINKS) else dtype


def stored_bytes(name: str, shape: tuple[int, ...], itemsize: int, weights: WeightFormat = "as_stored") -> int:
    """Bytes of a weight of a checkpoint on the device, by its name there, of `itemsize` a value.

    What a file holds in 4 bits is kept so; maps in FP8 take a byte a value and a scale a row; sinks, which attention
    sums with, are fp32 where values have 16 bits.
    """
    if name.endswith(PACKED_BYTES):
        return prod(shape)
    if weights == "fp8" and (n_rows := _rows_of_map(name, shape)):
        return prod(shape) + 4 * n_rows
    return (max(itemsize, 4) if name.endswith(SINKS) else itemsize) * prod(shape)


def _rows_of_map(name: str, shape: tuple[int, ...]) -> int:
    """Outputs of a linear map, over all experts that one tensor holds; 0 of anything else."""
    if any(part in name for part in _TABLES):
        return 0
    if len(shape) == 3:  # plain experts of gpt-oss: [X, reads, writes]
        return shape[0] * shape[2]
    return shape[0] if len(shape) == 2 and name.endswith(".weight") else 0
