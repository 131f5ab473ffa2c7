"""PTX instructions of blocks that run side by side as a cluster and reach each other's shared memory (sm_90, later).

Blocks of a cluster have the same layout of shared memory: an address of one's own names the same place in the others.

Source: PTX ISA 9.0, barrier.cluster, mapa, mbarrier.arrive, cp.async.bulk with multicast.
"""

from __future__ import annotations

from eagle3core.kernels.isa.instruction import i32, i64, instruction

rank = instruction("cluster_rank", "mov.u32 $0, %cluster_ctarank;", [i32])

# All threads of the cluster's blocks that have not ended meet: what they did before `arrive`, others see after `wait`.
arrive = instruction("cluster_arrive", "barrier.cluster.arrive.release;", memory=True, convergent=True)
wait = instruction("cluster_wait", "barrier.cluster.wait.acquire;", memory=True, convergent=True)

# `(mbarrier, rank)`: arrives at the mbarrier of that block. Releases nothing beyond the block, which would wait for all
# memory: for those who have read, and hold what they read in registers.
mbarrier_arrive = instruction(
    "cluster_mbarrier_arrive",
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1;\n mbarrier.arrive.shared::cluster.b64 _, [there]; }",
    takes=[i32, i32],
    memory=True,
)
# `warp_bulk_copy` into all blocks whose bit is set in the last operand; the bytes complete each one's own mbarrier.
warp_bulk_copy = instruction(
    "cluster_warp_bulk_copy",
    "{ .reg .pred p; .reg .b16 blocks; cvt.u16.u32 blocks, $4; elect.sync _|p, 0xffffffff;\n"
    " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [$0], [$1], $2, [$3], blocks; }",
    takes=[i32, i64, i32, i32, i32],
    memory=True,
    convergent=True,
)
# `tensor_copy` into all blocks whose bit is set in the last operand, likewise.
tensor_copy = instruction(
    "cluster_tensor_copy",
    "{ .reg .b16 blocks; cvt.u16.u32 blocks, $5;\n"
    " cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [$0], [$1, {$2, $3}], [$4], blocks; }",
    takes=[i32, i64, i32, i32, i32, i32],
    memory=True,
)
