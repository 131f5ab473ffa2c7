"""What the lanes of a warp do together: products, matrices from shared memory, exchange, votes.

Source: PTX ISA 9.0, fragment layouts of mma.m16n8k16 and ldmatrix; the rest derived here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eagle3core.kernels.emulator.now import Warp, collective, lane
from eagle3core.kernels.emulator.numbers import i32, products, wide_bf16, wide_f16

# ---- tensor cores


mma_bf16 = collective(products(wide_bf16))
mma_f16 = collective(products(wide_f16))


def _ldmatrix(transpose: bool) -> Callable[..., Any]:
    def act(operands: Sequence[Any], warp: Warp) -> list[Any]:
        rows = [
            np.frombuffer(lane.block.shared.read(lane, o[0], 16), np.uint16)
            for lane, o in zip(warp, operands, strict=True)
        ]
        blocks = np.stack(rows).reshape(4, 8, 8).astype(np.uint32)
        if transpose:
            blocks = blocks.transpose(0, 2, 1)
        pairs = blocks[:, :, 0::2] | (blocks[:, :, 1::2] << np.uint32(16))  # [4, 8, 4]
        return [tuple(int(v) for v in pairs[:, lane >> 2, lane & 3].astype(np.int32)) for lane in range(32)]

    return collective(act)


ldmatrix_x4 = _ldmatrix(False)
ldmatrix_x4_trans = _ldmatrix(True)


# ---- warp-wide exchange


def _exchange_xor(operands: Sequence[Any], warp: Warp) -> list[Any]:
    return [operands[lane ^ o[1]][0] for lane, o in enumerate(operands)]


def _exchange_index(operands: Sequence[Any], warp: Warp) -> list[Any]:
    return [operands[o[1] & 31][0] for o in operands]


def _transpose(operands: Sequence[Any], warp: Warp) -> list[int]:
    pairs = np.array([o[0] for o in operands], np.int32).view(np.uint16)  # [32 * 2]
    return [int(word) for word in np.ascontiguousarray(pairs.reshape(8, 8).T).view(np.int32).ravel()]


def _largest(operands: Sequence[Any], warp: Warp) -> list[int]:
    return [max(o[0] for o in operands)] * 32


def _smallest(operands: Sequence[Any], warp: Warp) -> list[int]:
    return [min(o[0] for o in operands)] * 32


def _vote_any(operands: Sequence[Any], warp: Warp) -> list[int]:
    return [int(any(o[0] for o in operands))] * 32


def _vote_ballot(operands: Sequence[Any], warp: Warp) -> list[int]:
    return [i32(sum((o[0] != 0) << lane for lane, o in enumerate(operands)))] * 32


def lane_number() -> int:
    return lane().index % 32


shuffle_xor_f32 = shuffle_xor_i32 = collective(_exchange_xor)
shuffle_i32 = collective(_exchange_index)
transpose = collective(_transpose)
warp_max_i32 = collective(_largest)
warp_min_i32 = collective(_smallest)
any_lane = collective(_vote_any)
ballot = collective(_vote_ballot)
