"""Thread indices, arrays and barriers of the emulator: what kernels use of `numba.cuda`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from eagle3core.kernels.emulator.machine_memory import reader, writer
from eagle3core.kernels.emulator.memory import read_shared, write_shared
from eagle3core.kernels.emulator.now import Warp, lane, now
from eagle3core.kernels.emulator.numbers import f32


class _Index:
    def __init__(self, read: Callable[[], tuple[int, int, int]]) -> None:
        self._read = read

    x = property(lambda self: self._read()[0])
    y = property(lambda self: self._read()[1])
    z = property(lambda self: self._read()[2])


_READ = {code: reader(code, 1) for code in "if"}
_WRITE = {code: writer(code) for code in "if"}


class SharedArray:
    """4-byte elements of a block's shared memory from `offset` on, indexed as `cuda.shared.array` is."""

    def __init__(self, offset: int, code: str) -> None:
        self.offset = offset
        self._read, self._write = _READ[code], _WRITE[code]

    def __getitem__(self, index: int) -> Any:
        return self._read(read_shared(self.offset + 4 * index, 4))[0]

    def __setitem__(self, index: int, value: Any) -> None:
        write_shared(self.offset + 4 * index, self._write((value,)))


class _Shared:
    @staticmethod
    def array(n: int, dtype: Any, alignment: int = 4) -> SharedArray:
        code = "f" if dtype is f32 else "i"
        if n == 0:
            return SharedArray(0, code)  # dynamic shared memory comes first
        frame = sys._getframe(1)
        return SharedArray(lane().block.shared.array((frame.f_code, frame.f_lasti), 4 * n), code)


class _Local:
    @staticmethod
    def array(n: int, dtype: Any) -> list[Any]:
        return [None] * n  # arithmetic on an element that was never written raises


class cuda:
    """Stand-in for the parts of `numba.cuda` that kernels use."""

    threadIdx = _Index(lambda: (lane().index, 0, 0))
    blockIdx = _Index(lambda: lane().block.index)
    gridDim = _Index(lambda: now().grid)
    blockDim = _Index(lambda: (now().n_threads, 1, 1))
    shared = _Shared
    local = _Local

    @staticmethod
    def syncthreads() -> None:
        lane().wait("block")

    @staticmethod
    def syncwarp() -> None:
        lane().wait("warp", _meet, ())


def _meet(operands: Sequence[Any], warp: Warp) -> list[None]:
    warp[0].block.synchronise(warp)
    return [None] * 32
