"""Who runs in the emulator: the machine of this moment, its lane, and how a lane waits for its warp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle3core.kernels.emulator.block import Lane
from eagle3core.kernels.emulator.machine import Machine
from eagle3core.kernels.emulator.machine_memory import EmulationError

Warp = Sequence[Lane]
_running: list[Machine] = []


def run(machine: Machine, grid: tuple[int, int, int]) -> None:
    """Run one launch on `machine`; its lanes call the instructions."""
    _running.append(machine)
    try:
        machine.run(grid)
    finally:
        _running.pop()


def now() -> Machine:
    """The machine that runs."""
    if not _running:
        raise EmulationError("an emulated instruction was called outside emulator.execute")
    return _running[-1]


def lane() -> Lane:
    """The lane that runs."""
    if not _running:
        now()
    return _running[-1].current


def collective(act: Callable[[Sequence[Any], Warp], Sequence[Any]]) -> Callable[..., Any]:
    """An instruction of the whole warp: `act` maps 32 operand tuples to 32 results."""
    return lambda *operands: lane().wait("warp", act, operands)
