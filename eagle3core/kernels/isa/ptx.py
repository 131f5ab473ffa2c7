"""PTX instructions as Numba functions: with `memory`, `copies` and the others beside it, what a port
to another front end would rewrite.

Kernel factories receive this module, or its CPU twin `emulator`, as their first argument `isa` and use nothing else:
`isa.cuda` (thread indices, shared and register arrays, barriers), `isa.i32 / i64 / f32` (casts and element types),
`isa.inlined` (a device function merged into its caller), and the instructions below.

Addresses are integers: int64 for global memory, int32 for the shared-memory window. Kernel parameters are therefore
plain integers, any element type fits, and launches stay cheap. Sixteen-bit pairs travel in one int32, the element of
the lower address in the lower half. Warp-wide instructions are marked convergent (LLVM would otherwise sink them into a
branch), memory instructions clobber memory.

Source: PTX ISA 9.0, the instruction named in each text.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import cuda as cuda
from numba.cuda.extending import intrinsic

from eagle3core.kernels.isa import cluster as cluster
from eagle3core.kernels.isa.copies import (  # noqa: F401  part of the instruction set
    ARRIVING_LANES,
    COPY_WAIT,
    bulk_copy,
    copies_arrive,
    copy16,
    copy16_cached,
    copy16_cached_fill,
    copy16_fill,
    copy_commit,
    fence_async_shared,
    mbarrier_arrive,
    mbarrier_arrive_below,
    mbarrier_expect,
    mbarrier_fence_init,
    mbarrier_init,
    mbarrier_is_over,
    mbarrier_poll,
    mbarrier_wait,
    tensor_copy,
    tensor_map_acquire,
    warp_bulk_copy,
    warp_bulk_fill,
)
from eagle3core.kernels.isa.e2m1 import WIDEN_E2M1_BF16 as WIDEN_E2M1_BF16
from eagle3core.kernels.isa.e2m1 import powers_bf16 as powers_bf16
from eagle3core.kernels.isa.e4m3 import F16_OF_E4M3 as F16_OF_E4M3
from eagle3core.kernels.isa.e4m3 import F16_OF_E4M3_APART as F16_OF_E4M3_APART
from eagle3core.kernels.isa.e4m3 import WIDEN_E4M3 as WIDEN_E4M3
from eagle3core.kernels.isa.group import fewer_registers as fewer_registers
from eagle3core.kernels.isa.group import group_forget as group_forget
from eagle3core.kernels.isa.group import group_mma as group_mma
from eagle3core.kernels.isa.group import group_settle as group_settle
from eagle3core.kernels.isa.group import more_registers as more_registers
from eagle3core.kernels.isa.inlined import inlined as inlined
from eagle3core.kernels.isa.instruction import f32, i32, i64, instruction
from eagle3core.kernels.isa.memory import (  # noqa: F401  part of the instruction set
    address_after,
    load_f32,
    load_f32_l2,
    load_f32x2,
    load_f32x4,
    load_f32x4_l2,
    load_u16,
    load_u32,
    load_u32x2,
    load_u32x4,
    load_u32x4_const,
    load_u32x4_l2,
    load_u32x4_stream,
    load_u64,
    shared_load_f32,
    shared_load_f32x4,
    shared_load_u32,
    shared_load_u32x2,
    shared_load_u32x4,
    shared_store_f32,
    shared_store_f32x2,
    shared_store_f32x4,
    shared_store_u32,
    shared_store_u32x4,
    store_f32,
    store_f32x2,
    store_f32x4,
    store_u8,
    store_u16,
    store_u32,
    store_u32_below,
    store_u32_twice_below,
    store_u32x2,
    store_u32x2_below,
    store_u32x4,
    store_u64,
)


def _mma(kind: str) -> Any:
    return instruction(
        f"mma_{kind}",
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        [f32] * 4,
        [i32] * 6 + [f32] * 4,
        convergent=True,
    )


def _ldmatrix(name: str, option: str) -> Any:
    asm = f"ldmatrix.sync.aligned.m8n8.x4{option}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
    return instruction(name, asm, [i32] * 4, [i32], memory=True, convergent=True)


# ---- tensor cores: d = a b + c; a [16, 16], b [16, 8] sixteen-bit, c and d [16, 8] f32, fragments as PTX lays them out
mma_bf16 = _mma("bf16")
mma_f16 = _mma("f16")
ldmatrix_x4 = _ldmatrix("ldmatrix_x4", "")  # four 8x8 blocks of 16-bit elements, lane l names row l % 8 of block l / 8
ldmatrix_x4_trans = _ldmatrix("ldmatrix_x4_trans", ".trans")

# ---- tensor cores of a warpgroup (sm_90a only): products under way between a fence and a wait; see `isa.group`
group_fence = instruction("group_fence", "wgmma.fence.sync.aligned;", memory=True, convergent=True)
group_commit = instruction("group_commit", "wgmma.commit_group.sync.aligned;", memory=True, convergent=True)
# GROUP_WAIT[n]() waits until at most the n newest committed groups of products are still under way.
GROUP_WAIT = tuple(
    instruction(f"group_wait_{n}", f"wgmma.wait_group.sync.aligned {n};", memory=True, convergent=True)
    for n in range(4)
)  # fmt: skip
# group_any(name, flag): whether any of the 128 lanes' flags is set, which all of them wait for at barrier `name`.
group_any = instruction(
    "group_any",
    "{ .reg .pred p; setp.ne.u32 p, $2, 0; barrier.cta.red.or.aligned.pred p, $1, 128, p; selp.u32 $0, 1, 0, p; }",
    [i32],
    [i32, i32],
    volatile=True,
    convergent=True,
)


@intrinsic
def shared_address(typing_context: Any, array: Any) -> Any:
    """int32 shared-window address of a `cuda.shared.array`."""

    def emit(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, operands[0]).data
        window = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(window, ir.IntType(32))

    return i32(array), emit


# ---- conversions and arithmetic; pack(high, low): two f32 rounded to nearest even into one int32
pack_bf16 = instruction("pack_bf16", "cvt.rn.bf16x2.f32 $0, $1, $2;", [i32], [f32, f32])
pack_f16 = instruction("pack_f16", "cvt.rn.f16x2.f32 $0, $1, $2;", [i32], [f32, f32])
low_bf16 = instruction("low_bf16", "{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", [f32], [i32])
high_bf16 = instruction("high_bf16", "{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }", [f32], [i32])
low_f16 = instruction("low_f16", "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, lo; }", [f32], [i32])
high_f16 = instruction("high_f16", "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, hi; }", [f32], [i32])
bits_of_f32 = instruction("bits_of_f32", "mov.b32 $0, $1;", [i32], [f32])
f32_of_bits = instruction("f32_of_bits", "mov.b32 $0, $1;", [f32], [i32])
exp2 = instruction("exp2", "ex2.approx.ftz.f32 $0, $1;", [f32], [f32])  # error below 2 ulp
log2 = instruction("log2", "lg2.approx.ftz.f32 $0, $1;", [f32], [f32])
reciprocal = instruction("reciprocal", "rcp.approx.ftz.f32 $0, $1;", [f32], [f32])  # error below 1 ulp
rsqrt = instruction("rsqrt", "rsqrt.approx.ftz.f32 $0, $1;", [f32], [f32])
maximum = instruction("maximum", "max.f32 $0, $1, $2;", [f32], [f32, f32])
minimum = instruction("minimum", "min.f32 $0, $1, $2;", [f32], [f32, f32])
# A product that is to be added to something, with the rounding spelled out: a compiler may not fuse, or split, these.
fused = instruction("fused", "fma.rn.f32 $0, $1, $2, $3;", [f32], [f32, f32, f32])
product = instruction("product", "mul.rn.f32 $0, $1, $2;", [f32], [f32, f32])
# Of numbers that are not negative: `//` divides signed ones of 64 bits, in five times the instructions.
quotient = instruction("quotient", "div.u32 $0, $1, $2;", [i32], [i32, i32])
popcount = instruction("popcount", "popc.b32 $0, $1;", [i32], [i32])

# ---- warp-wide exchange, all 32 lanes
# The lane's number, asked for anew: what follows from it is computed there, not kept in registers since before a loop.
clock = instruction("clock", "mov.u32 $0, %clock;", [i32], volatile=True)  # cycles of the processor
lane_number = instruction("lane_number", "mov.u32 $0, %laneid;", [i32], volatile=True)
shuffle_xor_f32 = instruction(
    "shuffle_xor_f32", "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", [f32], [f32, i32], convergent=True
)
shuffle_xor_i32 = instruction(
    "shuffle_xor_i32", "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", [i32], [i32, i32], convergent=True
)
shuffle_i32 = instruction(
    "shuffle_i32", "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", [i32], [i32, i32], convergent=True
)
# 8 x 8 sixteen-bit elements, row l / 4 and columns 2 (l % 4) and the next in lane l: transposed, in the same lanes.
transpose = instruction(
    "transpose", "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [i32], [i32], convergent=True
)  # fmt: skip
warp_max_i32 = instruction(
    "warp_max_i32", "redux.sync.max.s32 $0, $1, 0xffffffff;", [i32], [i32], volatile=True, convergent=True
)
warp_min_i32 = instruction(
    "warp_min_i32", "redux.sync.min.s32 $0, $1, 0xffffffff;", [i32], [i32], volatile=True, convergent=True
)
any_lane = instruction(
    "any_lane", "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }",
    [i32], [i32], volatile=True, convergent=True,
)  # fmt: skip
ballot = instruction(
    "ballot",
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
    [i32],
    [i32],
    volatile=True,
    convergent=True,
)

# ---- order between blocks and kernels
processor = instruction("processor", "mov.u32 $0, %smid;", [i32], volatile=True)  # the block's multiprocessor, from 0
named_barrier = instruction("named_barrier", "bar.sync $0, $1;", takes=[i32, i32], memory=True, convergent=True)
named_arrive = instruction("named_arrive", "bar.arrive $0, $1;", takes=[i32, i32], memory=True, convergent=True)
fence_gpu = instruction("fence_gpu", "fence.acq_rel.gpu;", memory=True)
atomic_add_i32 = instruction(
    "atomic_add_i32", "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", [i32], [i64, i32], memory=True
)
# What was there: one more comes after it, or 0 after `$2`; or `$2`. For words that nothing else is ordered by.
atomic_inc_i32 = instruction(
    "atomic_inc_i32", "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;", [i32], [i64, i32], memory=True
)
atomic_exchange_i32 = instruction(
    "atomic_exchange_i32", "atom.relaxed.gpu.global.exch.b32 $0, [$1], $2;", [i32], [i64, i32], memory=True
)
# One more at `$0`, or 0 again after `$1`. It gives nothing back, so nobody waits for it to arrive.
count_round = instruction("count_round", "red.release.gpu.global.inc.u32 [$0], $1;", takes=[i64, i32], memory=True)
wait_count = instruction(
    "wait_count",
    "{\n .reg .pred done;\n .reg .s32 count;\n AGAIN:\n ld.acquire.gpu.global.s32 count, [$0];\n"
    " setp.ge.s32 done, count, $1;\n @done bra OVER;\n bra AGAIN;\n OVER:\n}",
    takes=[i64, i32],
    memory=True,
)
# Programmatic dependent launch (sm_90 and later): the next kernel of the stream may start when every block of this one
# has called `let_next_start`; what earlier kernels wrote may be read, and anything written, only after `wait_previous`.
wait_previous = instruction("wait_previous", "griddepcontrol.wait;", memory=True)
let_next_start = instruction("let_next_start", "griddepcontrol.launch_dependents;", memory=True)

MMA = {"bf16": mma_bf16, "f16": mma_f16}
PACK = {"bf16": pack_bf16, "f16": pack_f16}
LOW = {"bf16": low_bf16, "f16": low_f16}
HIGH = {"bf16": high_bf16, "f16": high_f16}
