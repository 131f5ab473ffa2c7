"""Bytes that weights take where they are kept, from their names and shapes alone."""

from __future__ import annotations

from math import prod

import torch

from eagle3core.checkpoint.experts.names import PACKED_BYTES
from eagle3core.kernels.layer.rms_norm import accumulation_dtype
from eagle3core.speculative import WeightFormat

_TABLES = ("embed_tokens", "mlp.gate.", "mlp.router.")  # what is no linear map of a packed layer
SINKS = ".sinks"  # how names of attention's end


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
    is_map = len(shape) == 2 and not any(part in name for part in _TABLES)
    if weights == "fp8" and is_map:
        return prod(shape) + 4 * shape[0]
    return (max(itemsize, 4) if name.endswith(SINKS) else itemsize) * prod(shape)
