"""A PTX statement as a function that Numba kernels can call. `ptx` is made of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# numpy 2.5 dropped a name that numba-cuda 0.30 still reads when it compiles its first kernel.
if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.cuda.extending import intrinsic

i32, i64, f32 = types.int32, types.int64, types.float32

_LLVM = {i32: ir.IntType(32), i64: ir.IntType(64), f32: ir.FloatType()}
_CONSTRAINT = {i32: "r", i64: "l", f32: "f"}


def instruction(
    name: str,
    asm: str,
    returns: Sequence[Any] = (),
    takes: Sequence[Any] = (),
    *,
    memory: bool = False,
    volatile: bool = False,
    convergent: bool = False,
) -> Any:
    """A Numba function of one PTX statement.

    Args:
        name: what Numba's messages call it.
        asm: the statement; `$0..` are the results, then the operands.
        returns: result types: none, one (a scalar) or several equal ones (a tuple).
        takes: operand types; operands are cast to them.
        memory: reads or writes memory that others write: not moved across other memory operations.
        volatile: not removed or merged, but free to move across unrelated memory operations.
        convergent: all lanes of the warp execute it together.
    """
    result, llvm_result = _result_types(tuple(returns))
    constraint = ",".join([f"={_CONSTRAINT[t]}" for t in returns] + [_CONSTRAINT[t] for t in takes])
    if memory:
        constraint += ",~{memory}" if constraint else "~{memory}"
    llvm_type = ir.FunctionType(llvm_result, [_LLVM[t] for t in takes])

    def emit(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        given = zip(operands, signature.args, takes, strict=True)
        cast = [value if have == want else context.cast(builder, value, have, want) for value, have, want in given]
        code = ir.InlineAsm(llvm_type, asm, constraint, side_effect=volatile or memory)
        value = builder.call(code, cast, attrs=("convergent",) if convergent else ())
        if not returns:
            return context.get_dummy_value()
        if len(returns) == 1:
            return value
        parts = [builder.extract_value(value, k) for k in range(len(returns))]
        return context.make_tuple(builder, result, parts)

    def build(typing_context: Any, *_: Any) -> Any:
        return result(*takes), emit

    return intrinsic(_with_arity(name, build, len(takes)))


def _result_types(returns: tuple[Any, ...]) -> tuple[Any, Any]:
    if not returns:
        return types.void, ir.VoidType()
    if len(returns) == 1:
        return returns[0], _LLVM[returns[0]]
    result = types.UniTuple(returns[0], len(returns))  # type: ignore[no-untyped-call]
    return result, ir.LiteralStructType([_LLVM[t] for t in returns])


def _with_arity(name: str, build: Callable[..., Any], n_operands: int) -> Callable[..., Any]:
    """`build` behind a signature with exactly `n_operands` names, which Numba inspects to check calls."""
    operands = "".join(f", a{k}" for k in range(n_operands))
    scope: dict[str, Any] = {"build": build}
    exec(f"def {name}(typing_context{operands}):\n    return build(typing_context{operands})\n", scope)
    made: Callable[..., Any] = scope[name]
    return made
