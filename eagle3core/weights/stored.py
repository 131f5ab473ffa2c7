"""Bytes that weights take where they are kept, from their names and shapes alone."""

from __future__ import annotations

from math import prod

from eagle3core.checkpoint.experts.names import PACKED_BYTES
from eagle3core.checkpoint.fp8 import scale_name
from eagle3core.checkpoint.target import TargetCheckpoint, target_shapes
from eagle3core.speculative import WeightFormat

SINKS = ".sinks"  # how names of attention's end
_TABLES = ("embed_tokens", ".experts.", "mlp.gate.", "mlp.router.")  # what is no linear map of a packed layer


def bytes_on_device(target: TargetCheckpoint, weights: WeightFormat) -> int:
    """Bytes of a target's weights where they are kept: maps stored in FP8 as they are, others in `weights`."""
    total, named = 0, target.weights
    for name, shape in target_shapes(target.geometry):
        scales = named.get(scale_name(name))
        kept = None if scales is None else prod(shape) + 4 * scales.numel()
        total += stored_bytes(name, shape, target.dtype.itemsize, weights) if kept is None else kept
    return total


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
