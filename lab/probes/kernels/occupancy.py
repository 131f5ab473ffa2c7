"""How many blocks of a kernel a multiprocessor holds at once, and what its registers and shared memory leave room for.

Pure arithmetic from the limits of each architecture, so that a machine with no GPU can say it.

Source: CUDA C++ Programming Guide, technical specifications by compute capability; the allocation steps are those of
the CUDA occupancy calculator.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3core.kernels import SHARED_BYTES_SM

_REGISTERS, _WARP_STEP, _PARTITIONS = 65536, 256, 4  # of a multiprocessor; per warp; schedulers that share them
_BLOCK_SHARED = 1024  # shared memory that every resident block takes beside its own, bytes
_SHARED_STEP = 128
# Warps and blocks a multiprocessor can hold.
_MOST_WARPS = {"sm_80": 64, "sm_90a": 64, "sm_100": 64, "sm_120": 48}
_MOST_BLOCKS = {"sm_80": 32, "sm_90a": 32, "sm_100": 32, "sm_120": 24}


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks and warps of one multiprocessor; `share` of the warps it could hold; what ran out first."""

    blocks: int
    warps: int
    share: float
    limit: str


def occupancy(arch: str, *, registers: int, threads: int, shared_bytes: int) -> Occupancy:
    """Occupancy of a kernel with `registers` a thread, blocks of `threads` and `shared_bytes` a block in all."""
    warps = -(-threads // 32)
    register_bytes = -(-registers * 32 // _WARP_STEP) * _WARP_STEP
    warps_by_registers = _REGISTERS // _PARTITIONS // register_bytes * _PARTITIONS
    shared = -(-shared_bytes // _SHARED_STEP) * _SHARED_STEP + _BLOCK_SHARED
    room = {
        "registers": warps_by_registers // warps,
        "shared memory": SHARED_BYTES_SM[arch] // shared,
        "warps": _MOST_WARPS[arch] // warps,
        "blocks": _MOST_BLOCKS[arch],
    }
    limit = min(room, key=lambda name: room[name])
    blocks = room[limit]
    return Occupancy(blocks, blocks * warps, blocks * warps / _MOST_WARPS[arch], limit)
