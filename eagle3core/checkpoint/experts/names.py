"""Names and shapes of a layer's experts, as Hugging Face stores them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from eagle3core.geometry import ExpertsGeometry

PACKED_BYTES = ("_blocks", "_scales")  # how names end of tensors of bytes, which hold two values or a power of two each
Named = Iterator[tuple[str, tuple[int, ...]]]


def expert_shapes(experts: ExpertsGeometry, hidden: int) -> Named:
    """Name in its layer and shape of every tensor of the experts, in the order of the forward pass."""
    inner = experts.intermediate_size
    yield "mlp.gate.weight", (experts.n, hidden)
    for i in range(experts.n):
        yield f"mlp.experts.{i}.gate_proj.weight", (inner, hidden)
        yield f"mlp.experts.{i}.up_proj.weight", (inner, hidden)
        yield f"mlp.experts.{i}.down_proj.weight", (hidden, inner)


def stored_bytes(name: str, shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of a weight as it is kept, of `itemsize` each but for what is kept in the 4 bits that it is stored in."""
    return math.prod(shape) * (1 if name.endswith(PACKED_BYTES) else itemsize)
