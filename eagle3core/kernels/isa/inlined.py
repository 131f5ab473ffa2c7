"""Device functions that are merged into their caller by LLVM, compiled with no GPU at hand.

Numba itself can merge them while it types the caller, which copies and analyses the caller's code again for every call:
the larger kernels then take four to six times as long to compile, to the same machine code (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from numba import cuda, types
from numba.cuda.compiler import compile_cuda
from numba.cuda.dispatcher import CUDADispatcher

CAPABILITY = (9, 0)  # functions are typed and lowered for it; PTX of any target is made from the whole kernel
_OPTIONS = {
    "device": True, "forceinline": True, "inline": "never", "debug": False, "lineinfo": False, "fastmath": False,
    "opt": True,
}  # fmt: skip


# By `_identity` and argument types.
_COMPILED: dict[Any, Any] = {}
# What identities name by its address, held so that no other object gets that address.
_HELD: dict[int, Any] = {}


class _DeviceFunction(CUDADispatcher):
    """A device function that does not ask the present GPU for its capability, as the base class does.

    Kernels come from factories, so each variant has functions of its own. Those that do the same, with the same
    constants, are compiled once a process.
    """

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        # For a number's type, not for the number: Numba would compile the function again for each one it is called
        # with, where LLVM puts the number in once the function is merged, to the same instructions (docs/log.md).
        args = tuple(types.unliteral(each) for each in args)  # type: ignore[no-untyped-call]
        if args not in self.overloads:
            # Read now and not when the function was made: a factory may put device functions into its names later.
            key = (_identity(self), args)
            if key not in _COMPILED:
                with self._compiling_counter:
                    _COMPILED[key] = self._compiled(args, return_type)
            self.overloads[args] = _COMPILED[key]
        return self.overloads[args]

    def _make_finalizer(self) -> Callable[[], None]:
        """Nothing ends with this function: others call what was compiled for it, which the base class would remove."""
        return lambda: None

    def _compiled(self, args: Any, return_type: Any) -> Any:
        result = compile_cuda(
            self.py_func, return_type, args, debug=False, lineinfo=False, forceinline=True, inline="never",
            fastmath=False, nvvm_options={"opt": 3, "fastmath": False}, cc=CAPABILITY,
        )  # fmt: skip
        result.target_context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result


def _identity(value: Any) -> Any:
    """Equal for what compiles to the same: a function is its code and what its names hold, a number its type and text.

    Anything else is equal to itself alone.
    """
    if isinstance(value, CUDADispatcher):
        return type(value), _identity(value.py_func)
    if isinstance(value, FunctionType):
        code, known = value.__code__, value.__globals__
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        names = [known[name] for name in code.co_names if name in known]
        held = (*cells, *names, value.__defaults__, value.__kwdefaults__)
        return FunctionType, id(_held(code)), tuple(_identity(each) for each in held)
    if isinstance(value, tuple):
        return type(value), tuple(_identity(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return type(value), repr(value)
    return object, id(_held(value))


def _held(value: Any) -> Any:
    return _HELD.setdefault(id(value), value)


def inlined(function: Callable[..., Any], *, early: bool = False) -> Any:
    """`function` as a device function that is always merged into its caller.

    Args:
        early: by Numba, while it types the caller; for the few functions with which the caller then needs fewer
            registers.
    """
    if early:
        return cuda.jit(device=True, inline="always")(function)  # type: ignore[no-untyped-call]
    return _DeviceFunction(function, targetoptions=dict(_OPTIONS))  # type: ignore[no-untyped-call]
