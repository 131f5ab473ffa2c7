"""Names and shapes of a layer's experts, as Hugging Face stores them."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3core.geometry import ExpertsGeometry
from eagle3core.kernels.experts.mxfp4 import GROUP

PACKED_BYTES = ("_blocks", "_scales")  # how names end of tensors of bytes, which hold two values or a power of two each
Named = Iterator[tuple[str, tuple[int, ...]]]


def has_own_tensors(experts: ExpertsGeometry) -> bool:
    """Whether every expert has tensors of its own; else all experts of a layer are in the same ones."""
    return experts.gate != "clamped"


def expert_shapes(experts: ExpertsGeometry, hidden: int) -> Named:
    """Name in its layer and shape of every tensor of the experts, in the order of the forward pass."""
    inner = experts.intermediate_size
    if not has_own_tensors(experts):
        yield from _gpt_oss_shapes(experts, hidden)
        return
    yield "mlp.gate.weight", (experts.n, hidden)
    for i in range(experts.n):
        yield f"mlp.experts.{i}.gate_proj.weight", (inner, hidden)
        yield f"mlp.experts.{i}.up_proj.weight", (inner, hidden)
        yield f"mlp.experts.{i}.down_proj.weight", (hidden, inner)


def _gpt_oss_shapes(experts: ExpertsGeometry, hidden: int) -> Named:
    """All experts of a map in one tensor: input first where plain, output first in MXFP4."""
    n, inner = experts.n, experts.intermediate_size
    yield "mlp.router.weight", (n, hidden)
    yield "mlp.router.bias", (n,)
    for name, reads, writes in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
        if experts.is_mxfp4:
            yield f"mlp.experts.{name}_blocks", (n, writes, reads // GROUP, GROUP // 2)
            yield f"mlp.experts.{name}_scales", (n, writes, reads // GROUP)
        else:
            yield f"mlp.experts.{name}", (n, reads, writes)
        yield f"mlp.experts.{name}_bias", (n, writes)
