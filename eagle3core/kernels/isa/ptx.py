"""PTX instructions as Numba functions: the one file a port to another front end would rewrite.

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

# ---- asynchronous copies global -> shared, 16 bytes a lane; `_fill` writes zeros where the last operand is 0, not 16
copy16 = instruction("copy16", "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", takes=[i32, i64], memory=True)
copy16_fill = instruction(
    "copy16_fill", "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", takes=[i32, i64, i32], memory=True
)
copy16_cached = instruction("copy16_cached", "cp.async.ca.shared.global [$0], [$1], 16;", takes=[i32, i64], memory=True)
copy16_cached_fill = instruction(
    "copy16_cached_fill", "cp.async.ca.shared.global [$0], [$1], 16, $2;", takes=[i32, i64, i32], memory=True
)
copy_commit = instruction("copy_commit", "cp.async.commit_group;", memory=True)
# COPY_WAIT[n]() waits until at most n of this lane's newest committed groups are still under way.
COPY_WAIT = tuple(instruction(f"copy_wait_{n}", f"cp.async.wait_group {n};", memory=True) for n in range(16))

# This lane arrives at an mbarrier, whose count includes it, when all copies it has asked for so far are there.
copies_arrive = instruction(
    "copies_arrive", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", takes=[i32], memory=True
)

# ---- bulk copies and their barriers (sm_90 and later)
mbarrier_init = instruction("mbarrier_init", "mbarrier.init.shared::cta.b64 [$0], $1;", takes=[i32, i32], memory=True)
mbarrier_expect = instruction(
    "mbarrier_expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", takes=[i32, i32], memory=True
)
mbarrier_arrive = instruction("mbarrier_arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];", takes=[i32], memory=True)
# The same where an index is below an end, in place of a branch: the assembler lets products of a warpgroup stay under
# way while others are asked for only where there is none in between.
mbarrier_arrive_below = instruction(
    "mbarrier_arrive_below",
    "{ .reg .pred p; setp.lt.s32 p, $1, $2; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
    takes=[i32, i32, i32],
    memory=True,
)
mbarrier_wait = instruction(
    "mbarrier_wait",
    "{\n .reg .pred done;\n AGAIN:\n mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
    " @done bra OVER;\n bra AGAIN;\n OVER:\n}",
    takes=[i32, i32],
    memory=True,
)
# The same where waiting cannot sleep (compute capability 8).
mbarrier_poll = instruction(
    "mbarrier_poll",
    "{\n .reg .pred done;\n AGAIN:\n mbarrier.test_wait.parity.shared::cta.b64 done, [$0], $1;\n"
    " @done bra OVER;\n bra AGAIN;\n OVER:\n}",
    takes=[i32, i32],
    memory=True,
)
# Whether the phase of parity `$2` is over: a look, no wait.
mbarrier_is_over = instruction(
    "mbarrier_is_over",
    "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [$1], $2; selp.u32 $0, 1, 0, done; }",
    [i32], [i32, i32], memory=True,
)  # fmt: skip
# How many lanes of a warp arrive at an mbarrier for all of it, after they have met; docs/kernels.md, racecheck.
ARRIVING_LANES = 1
mbarrier_fence_init = instruction("mbarrier_fence_init", "fence.mbarrier_init.release.cluster;", memory=True)
bulk_copy = instruction(
    "bulk_copy",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    takes=[i32, i64, i32, i32],
    memory=True,
)
# The same by a converged warp whose lanes agree on the operands: one copy.
warp_bulk_copy = instruction(
    "warp_bulk_copy",
    "{ .reg .pred p; elect.sync _|p, 0xffffffff;\n"
    " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3]; }",
    takes=[i32, i64, i32, i32],
    memory=True,
    convergent=True,
)
# `mbarrier_expect` of the last operand's bytes and `warp_bulk_copy`, both by the lane that is chosen.
warp_bulk_fill = instruction(
    "warp_bulk_fill",
    "{ .reg .pred p; elect.sync _|p, 0xffffffff;\n"
    " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], $4;\n"
    " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3]; }",
    takes=[i32, i64, i32, i32, i32],
    memory=True,
    convergent=True,
)
# tensor_copy(target, map, column, row, mbarrier): the box of a matrix that begins there, by one lane; `tensor_map`.
tensor_copy = instruction(
    "tensor_copy",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3}], [$4];",
    takes=[i32, i64, i32, i32, i32],
    memory=True,
)
# Before a block copies by a map that lies in global memory; lanes that meet this one afterwards may copy by it too.
tensor_map_acquire = instruction(
    "tensor_map_acquire", "fence.proxy.tensormap::generic.acquire.sys [$0], 128;", takes=[i64], memory=True
)
fence_async_shared = instruction("fence_async_shared", "fence.proxy.async.shared::cta;", memory=True)

# ---- global loads; `_const` may bypass coherence (data no kernel writes), `_stream` spares L1 too, `_l2` skips L1
load_u16 = instruction(
    "load_u16", "{ .reg .b16 half; ld.global.b16 half, [$1]; cvt.u32.u16 $0, half; }", [i32], [i64], volatile=True
)
load_u32 = instruction("load_u32", "ld.global.u32 $0, [$1];", [i32], [i64], volatile=True)
load_u64 = instruction("load_u64", "ld.global.u64 $0, [$1];", [i64], [i64], volatile=True)
load_u32x4 = instruction("load_u32x4", "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", [i32] * 4, [i64], volatile=True)
load_u32x4_const = instruction(
    "load_u32x4_const", "ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];", [i32] * 4, [i64], volatile=True
)
load_u32x4_stream = instruction(
    "load_u32x4_stream",
    "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0,$1,$2,$3}, [$4];",
    [i32] * 4,
    [i64],
    volatile=True,
)
load_u32x4_l2 = instruction(
    "load_u32x4_l2", "ld.global.cg.v4.u32 {$0,$1,$2,$3}, [$4];", [i32] * 4, [i64], volatile=True
)
load_f32 = instruction("load_f32", "ld.global.f32 $0, [$1];", [f32], [i64], volatile=True)
load_f32x2 = instruction("load_f32x2", "ld.global.v2.f32 {$0,$1}, [$2];", [f32] * 2, [i64], volatile=True)
load_f32x4 = instruction("load_f32x4", "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", [f32] * 4, [i64], volatile=True)
load_f32_l2 = instruction("load_f32_l2", "ld.global.cg.f32 $0, [$1];", [f32], [i64], memory=True)
load_f32x4_l2 = instruction("load_f32x4_l2", "ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];", [f32] * 4, [i64], memory=True)

# ---- global stores
store_u8 = instruction("store_u8", "st.global.b8 [$0], $1;", takes=[i64, i32], memory=True)
store_u16 = instruction(
    "store_u16", "{ .reg .b16 half; cvt.u16.u32 half, $1; st.global.b16 [$0], half; }", takes=[i64, i32], memory=True
)
store_u32 = instruction("store_u32", "st.global.u32 [$0], $1;", takes=[i64, i32], memory=True)
store_u64 = instruction("store_u64", "st.global.u64 [$0], $1;", takes=[i64, i64], memory=True)
store_u32x2 = instruction("store_u32x2", "st.global.v2.u32 [$0], {$1,$2};", takes=[i64] + [i32] * 2, memory=True)
store_u32x4 = instruction("store_u32x4", "st.global.v4.u32 [$0], {$1,$2,$3,$4};", takes=[i64] + [i32] * 4, memory=True)
# The same where an index is below an end, in place of a branch around it: (address, value, index, end).
store_u32_below = instruction(
    "store_u32_below",
    "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p st.global.u32 [$0], $1; }",
    takes=[i64, i32, i32, i32],
    memory=True,
)
store_u32x2_below = instruction(
    "store_u32x2_below",
    "{ .reg .pred p; setp.lt.s32 p, $3, $4; @p st.global.v2.u32 [$0], {$1,$2}; }",
    takes=[i64, i32, i32, i32, i32],
    memory=True,
)
# Two such stores, (address, value, address, value, index, end), by a predicate each: one for both becomes
# a branch.
store_u32_twice_below = instruction(
    "store_u32_twice_below",
    "{ .reg .pred p, q; .reg .s32 next; add.s32 next, $4, 1; setp.lt.s32 p, $4, $5; setp.le.s32 q, next, $5;"
    " @p st.global.u32 [$0], $1; @q st.global.u32 [$2], $3; }",
    takes=[i64, i32, i64, i32, i32, i32],
    memory=True,
)
store_f32 = instruction("store_f32", "st.global.f32 [$0], $1;", takes=[i64, f32], memory=True)
store_f32x2 = instruction("store_f32x2", "st.global.v2.f32 [$0], {$1,$2};", takes=[i64] + [f32] * 2, memory=True)
store_f32x4 = instruction("store_f32x4", "st.global.v4.f32 [$0], {$1,$2,$3,$4};", takes=[i64] + [f32] * 4, memory=True)

# address_after(address, pitch, count): the address `count` pitches further. As a product and a sum, of which only the
# sum changes with the address, the compiler would keep the products of all counts in registers.
address_after = instruction("address_after", "mad.wide.s32 $0, $2, $3, $1;", [i64], [i64, i32, i32])

# ---- shared memory, by the addresses that `shared_address` gives
shared_load_u32 = instruction("shared_load_u32", "ld.shared.u32 $0, [$1];", [i32], [i32], memory=True)
shared_load_u32x2 = instruction("shared_load_u32x2", "ld.shared.v2.u32 {$0,$1}, [$2];", [i32] * 2, [i32], memory=True)
shared_load_u32x4 = instruction(
    "shared_load_u32x4", "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", [i32] * 4, [i32], memory=True
)
shared_load_f32 = instruction("shared_load_f32", "ld.shared.f32 $0, [$1];", [f32], [i32], memory=True)
shared_load_f32x4 = instruction(
    "shared_load_f32x4", "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", [f32] * 4, [i32], memory=True
)
shared_store_u32 = instruction("shared_store_u32", "st.shared.u32 [$0], $1;", takes=[i32, i32], memory=True)
shared_store_u32x4 = instruction(
    "shared_store_u32x4", "st.shared.v4.u32 [$0], {$1,$2,$3,$4};", takes=[i32] * 5, memory=True
)
shared_store_f32 = instruction("shared_store_f32", "st.shared.f32 [$0], $1;", takes=[i32, f32], memory=True)
shared_store_f32x2 = instruction(
    "shared_store_f32x2", "st.shared.v2.f32 [$0], {$1,$2};", takes=[i32] + [f32] * 2, memory=True
)
shared_store_f32x4 = instruction(
    "shared_store_f32x4", "st.shared.v4.f32 [$0], {$1,$2,$3,$4};", takes=[i32] + [f32] * 4, memory=True
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
named_barrier = instruction("named_barrier", "bar.sync $0, $1;", takes=[i32, i32], memory=True, convergent=True)
named_arrive = instruction("named_arrive", "bar.arrive $0, $1;", takes=[i32, i32], memory=True, convergent=True)
fence_gpu = instruction("fence_gpu", "fence.acq_rel.gpu;", memory=True)
atomic_add_i32 = instruction(
    "atomic_add_i32", "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", [i32], [i64, i32], memory=True
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
