"""Device functions that are merged into their caller by LLVM, compiled with no GPU at hand.

Numba itself can merge them while it types the caller, which copies and analyses the caller's code again for every call:
the larger kernels then take four to six times as long to compile, to the same machine code (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda.compiler import compile_cuda
from numba.cuda.dispatcher import CUDADispatcher

CAPABILITY = (9, 0)  # functions are typed and lowered for it; PTX of any target is made from the whole kernel
_OPTIONS = {
    "device": True, "forceinline": True, "inline": "never", "debug": False, "lineinfo": False, "fastmath": False,
    "opt": True,
}  # fmt: skip


class _DeviceFunction(CUDADispatcher):
    """A device function that does not ask the present GPU for its capability, as the base class does."""

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        if args not in self.overloads:
            with self._compiling_counter:
                result = compile_cuda(
                    self.py_func, return_type, args, debug=False, lineinfo=False, forceinline=True, inline="never",
                    fastmath=False, nvvm_options={"opt": 3, "fastmath": False}, cc=CAPABILITY,
                )  # fmt: skip
            self.overloads[args] = result
            result.target_context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return self.overloads[args]


def inlined(function: Callable[..., Any], *, early: bool = False) -> Any:
    """`function` as a device function that is always merged into its caller.

    Args:
        early: by Numba, while it types the caller; for the few functions with which the caller then needs fewer
            registers.
    """
    if early:
        return cuda.jit(device=True, inline="always")(function)  # type: ignore[no-untyped-call]
    return _DeviceFunction(function, targetoptions=dict(_OPTIONS))  # type: ignore[no-untyped-call]
