"""Ways in which parts of a block hand shared memory on, as the kernels do, each also without what makes it right.

Plants for racecheck; see `plants`. Source: derived here.
"""

from __future__ import annotations

from typing import Any

PIECE = 1024  # bytes of a piece that `make_staged` fetches
_BARRIERS_AT = 2 * PIECE


def make_copied(isa: Any, *, barrier: bool) -> Any:
    """y = 2 x, n rounds of 512 floats, block of 128: each half copies 16 bytes a lane, and reads another lane's.

    Half a block meets at a named barrier of its own; without `barrier` a lane waits for its own copies only.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    wait_all = isa.COPY_WAIT[0]

    def copied(x: Any, y: Any, n: Any) -> None:
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        tid = i32(cuda.threadIdx.x)
        half, lane = i32(tid >> 6), i32(tid & 63)
        own, other = i32(base + half * 2048), i32(63 - lane)
        isa.copy16(i32(own + lane * 16), x + i64(tid) * 16)
        isa.copy_commit()
        for step in range(n):
            wait_all()
            if barrier:
                isa.named_barrier(i32(1 + half), i32(64))
            if step + 1 < n:
                isa.copy16(i32(own + ((step + 1) & 1) * 1024 + lane * 16), x + i64(tid + (step + 1) * 128) * 16)
            isa.copy_commit()
            v = isa.shared_load_f32x4(i32(own + (step & 1) * 1024 + other * 16))
            at = y + i64(step * 128 + half * 64 + other) * 16
            isa.store_f32x4(at, v[0] + v[0], v[1] + v[1], v[2] + v[2], v[3] + v[3])

    return copied


def make_turns(isa: Any, *, in_turn: bool) -> Any:
    """y = the sum of n rows of 32 floats, block of 128: four warps take turns at one total in shared memory.

    A warp waits for its turn, and arrives at the next one's barrier without waiting there; without `in_turn` it takes
    what it finds.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32

    def turns(x: Any, y: Any, n: Any) -> None:
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        at, row = i32(base + lane * 4), warp
        if warp == 0:
            isa.shared_store_f32(at, f32(0))
        while row < n:
            value = isa.load_f32(x + i64(row * 32 + lane) * 4)
            if in_turn and row > 0:
                isa.named_barrier(i32(1 + warp), i32(64))
            total = isa.shared_load_f32(at) + value
            isa.shared_store_f32(at, total)
            if row + 1 == n:
                isa.store_f32(y + i64(lane) * 4, total)
            elif in_turn:
                isa.named_arrive(i32(1 + ((warp + 1) & 3)), i32(64))
            row = i32(row + 4)

    return turns


def make_staged(isa: Any, *, waits: bool) -> Any:
    """y = the sum of n pieces of 256 floats, block of 96: two warps add what a third fetches into two stages.

    A bulk copy completes the barrier `full` of a stage, and both warps say at `empty` that they have read it. Without
    `waits` they read first and wait afterwards.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32

    def staged(x: Any, y: Any, n: Any) -> None:
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        full, empty = i32(base + _BARRIERS_AT), i32(base + _BARRIERS_AT + 16)
        if tid < 2:
            isa.mbarrier_init(i32(full + tid * 8), i32(1))
            isa.mbarrier_init(i32(empty + tid * 8), i32(2 * isa.ARRIVING_LANES))
            isa.mbarrier_fence_init()
        cuda.syncthreads()
        if warp == 2:
            for piece in range(n):
                stage = i32(piece & 1)
                isa.mbarrier_wait(i32(empty + stage * 8), i32(((piece >> 1) & 1) ^ 1))
                if lane == 0:
                    isa.mbarrier_expect(i32(full + stage * 8), i32(PIECE))
                cuda.syncwarp()
                isa.warp_bulk_copy(i32(base + stage * PIECE), x + i64(piece) * PIECE, i32(PIECE), i32(full + stage * 8))
        else:
            s0, s1, s2, s3 = f32(0), f32(0), f32(0), f32(0)
            for piece in range(n):
                stage, parity = i32(piece & 1), i32((piece >> 1) & 1)
                if waits:
                    isa.mbarrier_wait(i32(full + stage * 8), parity)
                v = isa.shared_load_f32x4(i32(base + stage * PIECE + tid * 16))
                if not waits:
                    isa.mbarrier_wait(i32(full + stage * 8), parity)
                s0, s1, s2, s3 = s0 + v[0], s1 + v[1], s2 + v[2], s3 + v[3]
                cuda.syncwarp()
                if lane < isa.ARRIVING_LANES:
                    isa.mbarrier_arrive(i32(empty + stage * 8))
            isa.store_f32x4(y + i64(tid) * 16, s0, s1, s2, s3)

    return staged
