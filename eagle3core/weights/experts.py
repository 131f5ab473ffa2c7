"""The experts of a layer as the step reads them: the router, and both maps of all of them in one tensor each.

Matrices are taken one at a time into the tensor that they stay in, so packing needs one expert's memory beside it.
Source: names as Hugging Face stores Qwen3-MoE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from eagle3core.geometry import BlockGeometry, ExpertsGeometry
from eagle3core.kernels.experts.matrices import Matrices, PlainMatrices

Get = Callable[[str], Tensor]  # a weight by its Hugging Face name, on its device, in its dtype


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


def pack_experts(get: Get, prefix: str, block: BlockGeometry) -> PackedExperts:
    """The experts of the layer whose names begin with `prefix`, e.g. "model.layers.0.mlp."."""
    geometry = block.experts
    assert geometry is not None, "a layer without experts has one feed-forward"
    router, inner = get(f"{prefix}gate.weight"), geometry.intermediate_size
    gate_up = router.new_empty(geometry.n, 2 * inner, block.hidden_size)
    down = router.new_empty(geometry.n, block.hidden_size, inner)
    for i in range(geometry.n):
        for part, matrix in (("gate", gate_up[i, :inner]), ("up", gate_up[i, inner:]), ("down", down[i])):
            matrix.copy_(get(f"{prefix}experts.{i}.{part}_proj.weight"))
    return PackedExperts(geometry, router, PlainMatrices(gate_up), PlainMatrices(down))
