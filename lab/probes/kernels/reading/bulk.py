"""A kernel that reads memory by bulk copies into deep rings and sums what it read: what a step's products could reach.

Each warp has a ring of `stages` pieces of `piece` bytes in shared memory and a barrier a stage, as the engine's
products have, but nothing beside: no tiles, no second operand, no epilogue. All lanes add up what arrived: of random
words the sum is the buffer's only if each was read once.

Source: docs/requirements.md R-129; bulk copies and mbarriers from the PTX ISA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels import Launch, Variant, parameters

_LANE_BYTES, _WARP_BYTES = 16, 512  # of one shared load


@dataclass(frozen=True)
class Ring:
    """How a block reads: `warps` rings of `stages` pieces of `piece` bytes, `blocks` of them on a multiprocessor."""

    warps: int
    stages: int
    piece: int
    blocks: int

    @property
    def bytes_under_way(self) -> int:
        """Of a multiprocessor."""
        return self.blocks * self.warps * self.stages * self.piece

    def __str__(self) -> str:
        return f"{self.blocks} x {self.warps} warps x {self.stages} x {self.piece} B"


# Nearly all shared memory of a multiprocessor under way: cut as the products cut it, in one block, in large pieces.
_LARGE = (Ring(4, 7, 4096, 2), Ring(8, 7, 4096, 1), Ring(4, 3, 16384, 1))
RINGS: dict[str, Sequence[Ring]] = {"sm_90a": _LARGE, "sm_100": _LARGE, "sm_120": (Ring(4, 6, 4096, 1),)}


def make_bulk_read(isa: Any, *, warps: int, stages: int, piece: int) -> Any:
    """Sums `n_pieces` pieces a warp: warp n starts `n * first` bytes after x and goes on by `pitch`; a sum a lane."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    ring_bytes, loads = stages * piece, piece // _WARP_BYTES

    def copy_piece(target: Any, source: Any, barrier: Any, lane: Any) -> None:
        if lane == 0:
            isa.mbarrier_expect(barrier, i32(piece))
        isa.warp_bulk_copy(target, source, i32(piece), barrier)

    copy_piece = isa.inlined(copy_piece)

    def bulk_read(x: Any, y: Any, first: Any, pitch: Any, n_pieces: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        # So that the compiler knows that the warp's number is one for all its lanes.
        lane, warp = i32(tid & 31), isa.shuffle_i32(i32(tid >> 5), 0)
        base = isa.shared_address(cuda.shared.array(0, isa.f32, alignment=128))
        ring, full = i32(base + warp * ring_bytes), i32(base + warps * ring_bytes + warp * (8 * stages))
        number = i32(cuda.blockIdx.x * warps + warp)
        at = x + i64(number) * first
        # One arrival a barrier, that of the lane which announces the bytes; the bytes do the rest.
        if lane < stages:
            isa.mbarrier_init(i32(full + lane * 8), i32(1))
            isa.mbarrier_fence_init()
        cuda.syncwarp()
        for stage in range(stages):
            if stage < n_pieces:
                copy_piece(i32(ring + stage * piece), at, i32(full + stage * 8), lane)
                at += pitch
        total, reading, barrier, parity, left = i64(0), i32(0), i32(0), i32(0), n_pieces
        while left > 0:
            isa.mbarrier_wait(i32(full + barrier), parity)
            for i in range(loads):
                v = isa.shared_load_u32x4(i32(ring + reading + lane * _LANE_BYTES + i * _WARP_BYTES))
                total += i64(v[0]) + i64(v[1]) + i64(v[2]) + i64(v[3])
            # Other lanes may still be reading this piece: they meet before it is filled again.
            if left > stages:
                cuda.syncwarp()
                copy_piece(i32(ring + reading), at, i32(full + barrier), lane)
                at += pitch
            # A round later a stage's barrier has the other parity.
            reading, barrier = i32(reading + piece), i32(barrier + 8)
            if reading == ring_bytes:
                reading, barrier, parity = i32(0), i32(0), i32(parity ^ 1)
            left = i32(left - 1)
        isa.store_u64(y + (i64(number) * 32 + lane) * 8, total)

    return bulk_read


def bulk_variants(arch: str) -> list[Variant]:
    """The reader of each ring of an architecture; none where there are no bulk copies."""
    return [_variant(ring) for ring in RINGS.get(arch, ())]


def _variant(ring: Ring) -> Variant:
    constants = {"warps": ring.warps, "stages": ring.stages, "piece": ring.piece}
    return Variant(
        f"bulk_read_{ring.warps}x{ring.stages}x{ring.piece}", make_bulk_read, constants,
        parameters("x:in y:out first:i64 pitch:i64 n_pieces:i32"), 32 * ring.warps,
        shared_bytes=ring.warps * ring.stages * (ring.piece + 8), blocks_per_sm=ring.blocks, instructions={"UBLKCP": 1},
    )  # fmt: skip


def reads(ring: Ring, x: Tensor, n_processors: int, *, consecutive: bool) -> tuple[Launch, Tensor, int]:
    """A launch that reads as much of `x` as gives each warp the same, its sums, and how many bytes those are of.

    Args:
        x: `[n]` int32. n_processors: of the device. consecutive: each warp reads one run of memory; else warps take
            pieces in turn.

    Returns:
        The launch; `[warps * 32]` int64 sums, poisoned; bytes from the start of `x` that it reads.
    """
    n_warps = n_processors * ring.blocks * ring.warps
    n_pieces = x.nbytes // (n_warps * ring.piece)
    sums = torch.full((n_warps * 32,), -(2**60), dtype=torch.int64, device=x.device)
    first, pitch = (n_pieces * ring.piece, ring.piece) if consecutive else (ring.piece, n_warps * ring.piece)
    grid = (n_processors * ring.blocks,)
    launch = _variant(ring).launch(grid, x=x, y=sums, first=first, pitch=pitch, n_pieces=n_pieces)
    return launch, sums, n_warps * ring.piece * n_pieces


def is_read_whole(x: Tensor, sums: Tensor, n_bytes: int) -> bool:
    """Whether `sums: [n]` int64 add up to what the first `n_bytes` of `x: [m]` int32 do."""
    return int(sums.sum()) == int(x[: n_bytes // 4].sum())
