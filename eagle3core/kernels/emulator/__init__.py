"""The kernels' CPU twin: the same source, run lane by lane, every memory access checked.

`instructions` has the names of `isa.ptx`, `group` those of `isa.group`. Kernels never import this room;
proofs and tests do.
"""

from eagle3core.kernels.emulator.instructions import execute
from eagle3core.kernels.emulator.machine_memory import EmulationError

__all__ = [
    "EmulationError",
    "execute",
]
