"""PTX instructions of a warpgroup, four warps that multiply together; only sm_90a has them. `ptx` passes them on.

The product is asynchronous: its sums and its register operands belong to the tensor cores from `group_fence` until a
wait says otherwise, and the shared operand until the wait too.

Source: PTX ISA 9.0, asynchronous warpgroup-level matrix instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.cuda.extending import intrinsic

from eagle3core.kernels.isa.instruction import instruction

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


def _over_sums(n: int, asm: str, n_registers: int, n_descriptors: int, *, fresh: bool = False) -> Callable[..., Any]:
    """Code of a statement that reads and writes the first `n` f32 of a register array; other operands follow them.

    With `fresh` it writes them alone."""
    struct = ir.LiteralStructType([_F32] * n)
    others = [_I32] * n_registers + [_I64] * n_descriptors
    n_read = 0 if fresh else n
    constraint = ",".join(
        ["=f"] * n + [str(i) for i in range(n_read)] + ["r"] * n_registers + ["l"] * n_descriptors + ["~{memory}"]
    )

    def emit(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, operands[0]).data
        places = [builder.gep(data, [ir.Constant(_I64, i)]) for i in range(n)]
        code = ir.InlineAsm(ir.FunctionType(struct, [_F32] * n_read + others), asm, constraint, side_effect=True)
        given = [*(builder.load(place) for place in places[:n_read]), *operands[1:]]
        result = builder.call(code, given, attrs=("convergent",))
        for i, place in enumerate(places):
            builder.store(builder.extract_value(result, i), place)
        return context.get_dummy_value()

    return emit


def _numbered(first: int, count: int) -> str:
    return ",".join(f"${i}" for i in range(first, first + count))


@cache
def group_mma(kind: str, n: int, fresh: bool = False, transposed: bool = False, asks: bool = False) -> Any:
    """d += a b, by the warpgroup: `f(sums, a0, a1, a2, a3, descriptor)`; d [64, n], a [64, 16], b [16, n].

    Warp w of the group holds rows 16 w.. of a and d, as the fragments of mma.m16n8k16: `sums` is a register array of
    n / 2 f32. `descriptor` names b in shared memory, n-major rows of 16 k; see `gemm.group`.

    Args:
        fresh: d = a b, whatever `sums` held. transposed: b lies in k-major rows of n; see
            `attention.warpgroup.stages`.
        asks: `f(sums, a0, a1, a2, a3, goes_on, descriptor)`, where 0 says that d = a b; the same for all lanes.
    """
    half = n // 2
    others = half if fresh else 2 * half
    goes_on = f"${others + 4}" if asks else str(int(not fresh))
    asm = (
        f"{{ .reg .pred p; setp.ne.b32 p, {goes_on}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{_numbered(0, half)}}}, "
        f"{{{_numbered(others, 4)}}}, ${others + 4 + asks}, p, 1, 1, {int(transposed)}; }}"
    )
    emit = _over_sums(half, asm, 4 + asks, 1, fresh=fresh)

    @intrinsic
    def product(typing_context: Any, sums: Any, a0: Any, a1: Any, a2: Any, a3: Any, descriptor: Any) -> Any:
        i32 = types.int32
        return types.void(sums, i32, i32, i32, i32, types.int64), emit

    @intrinsic
    def asked(typing_context: Any, sums: Any, a0: Any, a1: Any, a2: Any, a3: Any, goes_on: Any, descriptor: Any) -> Any:
        i32 = types.int32
        return types.void(sums, i32, i32, i32, i32, i32, types.int64), emit

    return asked if asks else product


@cache
def group_settle(n: int, under_way: int = 0) -> Any:
    """Waits for products of the warpgroup: `f(sums)`; afterwards the n / 2 sums may be used.

    Args:
        under_way: the newest batches that are not waited for; the sums are none of theirs.
    """
    emit = _over_sums(n // 2, f"wgmma.wait_group.sync.aligned {under_way};", 0, 0)

    @intrinsic
    def settle(typing_context: Any, sums: Any) -> Any:
        return types.void(sums), emit

    return settle


@cache
def group_forget(n: int) -> Any:
    """`f(sums)`: the n / 2 sums hold nothing any more, without an instruction: registers are free until the next write.

    Else sums whose first product asks whether to go on would live on from what they held before.
    """
    emit = _over_sums(n // 2, "// free", 0, 0, fresh=True)

    @intrinsic
    def forget(typing_context: Any, sums: Any) -> Any:
        return types.void(sums), emit

    return forget


@cache
def fewer_registers(n: int) -> Any:
    """The warpgroup gives registers back until a lane has `n`, a multiple of 8."""
    return instruction(f"fewer_registers_{n}", f"setmaxnreg.dec.sync.aligned.u32 {n};", memory=True, convergent=True)


@cache
def more_registers(n: int) -> Any:
    """The warpgroup waits until a lane can have `n` registers, a multiple of 8."""
    return instruction(f"more_registers_{n}", f"setmaxnreg.inc.sync.aligned.u32 {n};", memory=True, convergent=True)
