"""1 / rms of the rows of x, by which a GEMM multiplies its sums where a norm comes before it.

Whoever wrote x left the sum of squares of every 16 columns; they are added in one fixed order.

Source: RMSNorm: Zhang and Sennrich, arXiv 1910.07467; the partial sums are derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import PARTIALS_STEP, Epilogue


def make_row_share(isa: Any, epilogue: Epilogue) -> Any:
    """Inlined `share(sums, row, lane)`: what a lane adds of the partial sums of an x row; all 32 have them all."""
    i64, quads, zero = isa.i64, epilogue.quads, np.float32(0)

    def share_of(sums: Any, row: Any, lane: Any) -> Any:
        share, at = zero, sums + (i64(row) * (PARTIALS_STEP * quads) + lane * 4) * 4
        for q in range(quads):
            v = isa.load_f32x4(at + q * (PARTIALS_STEP * 4))
            # A lane adds four neighbouring sums, then groups of 128 upwards; below, lanes by a butterfly. No choice
            # depends on the rows or blocks of the launch.
            share = share + ((v[0] + v[1]) + (v[2] + v[3]))
        return share

    return isa.inlined(share_of)


def make_row_scale(isa: Any, epilogue: Epilogue) -> tuple[Any, Any]:
    """Inlined halves of 1 / rms of an x row, by one warp.

    `partial(sums, row, rows, lane)` is this lane's share (loads only, so it can be early); `scale(partial, inv_width,
    eps)` adds the lanes' shares in fixed order.
    """
    share_of, zero = make_row_share(isa, epilogue), np.float32(0)

    def partial(sums: Any, row: Any, rows: Any, lane: Any) -> Any:
        share = zero
        if row < rows:
            share = share_of(sums, row, lane)
        return share

    def scale(share: Any, inv_width: Any, eps: Any) -> Any:
        # Both lanes of a pair add the same two numbers: all 32 end with equal bits.
        for step in range(5):
            share = share + isa.shuffle_xor_f32(share, 1 << step)
        return isa.rsqrt(isa.fused(share, inv_width, eps))

    return isa.inlined(partial), isa.inlined(scale)


def make_put_scales(
    isa: Any, epilogue: Epilogue, *, x_rows: int, n_warps: int, scale_at: int, together: int = 8
) -> Any:  # fmt: skip
    """Inlined `put_scales(base, sums, row0, rows, warp, lane, inv_width, eps)`: a block's row scales to shared memory.

    That of row `row0` goes to `base + scale_at`; `n_warps` warps share the `x_rows` rows. Those past the last row have
    its scale. Nothing where no norm comes before.

    Args:
        together: rows whose loads a warp has under way at once, 8, or 4 where few registers are left.
    """
    cuda, i32, f32 = isa.cuda, isa.i32, isa.f32
    share_of, scaled = make_row_share(isa, epilogue), epilogue.quads > 0
    rounds, fewer = -(-x_rows // (together * n_warps)), int(together == 4)

    def halve(shares: Any, half: Any, lane: Any, step: Any) -> None:
        # The lanes of a pair add up half of the rows each: the same two numbers as when both added up all.
        for j in range(half):
            kept, sent = shares[j], shares[j + half]
            if lane & step:
                kept, sent = sent, kept
            shares[j] = kept + isa.shuffle_xor_f32(sent, step)

    halve = isa.inlined(halve)

    def put_scales(
        base: Any, sums: Any, row0: Any, rows: Any, warp: Any, lane: Any, inv_width: Any, eps: Any
    ) -> None:  # fmt: skip
        if scaled:
            shares = cuda.local.array(together, f32)
            # Of the rows whose loads are together, the one that is left to this lane in the end.
            own = i32((((lane & 1) << 2) | (lane & 2) | ((lane >> 2) & 1)) >> fewer)
            for r in range(rounds):
                # No branch around loads of rows that are not there: those of all rows are under way at once.
                for j in range(together):
                    row = min(i32(row0 + warp + (r * together + j) * n_warps), i32(rows - 1))
                    shares[j] = share_of(sums, row, lane)
                if together == 8:
                    halve(shares, 4, lane, 1)
                    halve(shares, 2, lane, 2)
                    halve(shares, 1, lane, 4)
                else:
                    halve(shares, 2, lane, 1)
                    halve(shares, 1, lane, 2)
                    shares[0] = shares[0] + isa.shuffle_xor_f32(shares[0], 4)
                share = shares[0]
                share = share + isa.shuffle_xor_f32(share, 8)
                share = share + isa.shuffle_xor_f32(share, 16)
                local_row = i32(warp + (r * together + own) * n_warps)
                if lane < together and local_row < x_rows:
                    scale = isa.rsqrt(isa.fused(share, inv_width, eps))
                    isa.shared_store_f32(i32(base + scale_at + local_row * 4), scale)

    return isa.inlined(put_scales)
