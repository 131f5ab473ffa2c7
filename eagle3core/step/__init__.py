"""The decode step: its state, its program, and the ways to run it.

Imports kernels, weights and geometry; knows no request and no engine. `build` reads as the table of contents of a step.
"""

from eagle3core.step.admission import SlotRequest
from eagle3core.step.build import step_program
from eagle3core.step.gemm_audit import Product, products_of, read_shapes, write_shapes
from eagle3core.step.program import Program, Stage, Tap, after_all, calls_of, launches_of, variants_of
from eagle3core.step.replay import EagerReplayer, Enqueue, GraphReplayer, Replayer, Staged
from eagle3core.step.run import DeviceRunner
from eagle3core.step.sizes import blocks_for
from eagle3core.step.state import DeviceState

__all__ = [
    "DeviceRunner",
    "DeviceState",
    "EagerReplayer",
    "Enqueue",
    "GraphReplayer",
    "Product",
    "Program",
    "Replayer",
    "SlotRequest",
    "Stage",
    "Staged",
    "Tap",
    "after_all",
    "blocks_for",
    "calls_of",
    "launches_of",
    "products_of",
    "read_shapes",
    "step_program",
    "variants_of",
    "write_shapes",
]
