"""The products of one stage, by one warp, in the words that `gemm_ring` and `gemm_tile` share.

A unit is 32 k: two mma for each pair of a tile of W and a tile of x, elements 8t..8t+3 of lane t, then 8t+4..8t+7.

Source: derived here; fragment layouts from the PTX ISA.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.gemm.fp8.operands import make_load_widened

FRAGMENT = 512  # bytes of 8 rows x 32 k


def make_multiply(
    isa: Any, *, dtype: str, x_tiles: int, w_tiles: int, units: int, pitches: tuple[int, int], steps: tuple[int, int],
    fp8: bool = False,
) -> Any:  # fmt: skip
    """Inlined `multiply(accumulators, x_at, w_at, reading)`: adds the products of a stage's 1, 2 or 4 units, upwards.

    `accumulators` holds 4 f32 a pair of tiles, [tile of W][tile of x]. The addresses are this lane's in the ring's
    first stage; the stage begins `reading` bytes later. Added up by the caller, they made the compiler leave other
    loops of the kernel rolled.

    Args:
        pitches: bytes in shared memory from one tile of x to the next, and of W; a tile of W is two fragments.
        steps: the same from one unit to the next.
        fp8: W is in e4m3, one fragment a tile.
    """
    cuda, i32, mma = isa.cuda, isa.i32, isa.MMA[dtype]
    (x_pitch, w_pitch), (x_step, w_step) = pitches, steps
    n_operands = 4 * x_tiles
    load_widened = make_load_widened(isa, dtype)

    def multiply_unit(accumulators: Any, x_at: Any, w_at: Any, reading: Any) -> None:
        # x of the unit stays in registers while W's tiles pass: 4 int32 a tile of x, 8 of W at a time.
        x_operands = cuda.local.array(n_operands, i32)
        for m in range(x_tiles):
            v = isa.shared_load_u32x4(i32(x_at + reading + m * x_pitch))
            for c in range(4):
                x_operands[m * 4 + c] = v[c]
        for r in range(w_tiles):
            at = i32(w_at + reading + r * w_pitch)
            if fp8:
                a, b = load_widened(at)
            else:
                a, b = isa.shared_load_u32x4(at), isa.shared_load_u32x4(i32(at + FRAGMENT))
            for m in range(x_tiles):
                q, o = (r * x_tiles + m) * 4, m * 4
                # Operands of m16n8k16 by lane: rows g and g + 8 of W (a, b), each with the k of columns 2t and 2t + 8.
                # Which k those are is free as long as W and x agree: 8t..8t+1 and 8t+2..8t+3 here, the next four below.
                d = mma(
                    a[0], b[0], a[1], b[1], x_operands[o], x_operands[o + 1],
                    accumulators[q], accumulators[q + 1], accumulators[q + 2], accumulators[q + 3],
                )  # fmt: skip
                d = mma(a[2], b[2], a[3], b[3], x_operands[o + 2], x_operands[o + 3], d[0], d[1], d[2], d[3])
                for c in range(4):
                    accumulators[q + c] = d[c]

    multiply_unit = isa.inlined(multiply_unit)

    def multiply(accumulators: Any, x_at: Any, w_at: Any, reading: Any) -> None:
        # Unit by unit in so many words: the compiler leaves a loop over large units rolled.
        multiply_unit(accumulators, x_at, w_at, reading)
        if units > 1:
            multiply_unit(accumulators, x_at + x_step, w_at + w_step, reading)
        if units > 2:
            multiply_unit(accumulators, x_at + 2 * x_step, w_at + 2 * w_step, reading)
            multiply_unit(accumulators, x_at + 3 * x_step, w_at + 3 * w_step, reading)

    return isa.inlined(multiply)
