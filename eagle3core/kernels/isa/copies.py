"""PTX instructions that copy without anybody waiting, and the barriers that say when it is done; part of `ptx`.

Source: PTX ISA 9.0, the instruction named in each text.
"""

from __future__ import annotations

from eagle3core.kernels.isa.instruction import i32, i64, instruction

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
