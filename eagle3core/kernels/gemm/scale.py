"""1 / rms of the rows of x, by which a GEMM multiplies its sums where a norm comes before it.

Whoever wrote x left the sum of squares of every 16 columns; they are added in one fixed order.

Source: RMSNorm: Zhang and Sennrich, arXiv 1910.07467; the partial sums are derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import PARTIALS_STEP, Epilogue


def make_row_scale(isa: Any, epilogue: Epilogue) -> tuple[Any, Any]:
    """Inlined halves of 1 / rms of an x row, by one warp.

    `partial(sums, row, rows, lane)` is this lane's share (loads only, so it can be early); `scale(partial, inv_width,
    eps)` adds the lanes' shares in fixed order.
    """
    i64, quads, zero = isa.i64, epilogue.quads, np.float32(0)

    def partial(sums: Any, row: Any, rows: Any, lane: Any) -> Any:
        share = zero
        if row < rows:
            at = sums + (i64(row) * (PARTIALS_STEP * quads) + lane * 4) * 4
            for q in range(quads):
                v = isa.load_f32x4(at + q * (PARTIALS_STEP * 4))
                # A lane adds four neighbouring sums, then groups of 128 upwards; below, lanes by a butterfly. No choice
                # depends on the rows or blocks of the launch.
                share = share + ((v[0] + v[1]) + (v[2] + v[3]))
        return share

    def scale(share: Any, inv_width: Any, eps: Any) -> Any:
        # Both lanes of a pair add the same two numbers: all 32 end with equal bits.
        for step in range(5):
            share = share + isa.shuffle_xor_f32(share, 1 << step)
        return isa.rsqrt(isa.fused(share, inv_width, eps))

    return isa.inlined(partial), isa.inlined(scale)


def make_put_scales(isa: Any, epilogue: Epilogue, *, x_rows: int, n_warps: int, scale_at: int) -> Any:
    """Inlined `put_scales(base, sums, row0, rows, warp, lane, inv_width, eps)`: a block's row scales to shared memory.

    That of row `row0` goes to `base + scale_at`; `n_warps` warps share the `x_rows` rows. Nothing where no norm comes
    before.
    """
    cuda, i32, f32 = isa.cuda, isa.i32, isa.f32
    share_of, scale_of = make_row_scale(isa, epilogue)
    scaled, together = epilogue.quads > 0, 8  # rows whose loads a warp has under way at once
    rounds = -(-x_rows // (together * n_warps))

    def put_scales(
        base: Any, sums: Any, row0: Any, rows: Any, warp: Any, lane: Any, inv_width: Any, eps: Any
    ) -> None:  # fmt: skip
        if scaled:
            shares = cuda.local.array(together, f32)
            for r in range(rounds):
                for j in range(together):
                    local_row = i32(warp + (r * together + j) * n_warps)
                    row = i32(row0 + local_row)
                    if local_row >= x_rows:
                        row = i32(rows)
                    shares[j] = share_of(sums, row, rows, lane)
                for j in range(together):
                    local_row = i32(warp + (r * together + j) * n_warps)
                    scale = scale_of(shares[j], inv_width, eps)
                    if lane == 0 and local_row < x_rows:
                        isa.shared_store_f32(i32(base + scale_at + local_row * 4), scale)

    return isa.inlined(put_scales)
