"""The products of one stage: by one warp, as `gemm_ring` and `gemm_tile` make them, and by a warpgroup.

A unit is 32 k: two mma for each pair of a tile of W and a tile of x, elements 8t..8t+3 of lane t, then 8t+4..8t+7.

Source: derived here; fragment layouts and matrix descriptors from the PTX ISA.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.gemm.fp8.operands import make_load_widened

UNIT = 32  # k of one unit
FRAGMENT = 512  # bytes of 8 rows of a unit
STREAMS = 4  # contiguous ranges of K, summed each by itself; see `ring`
# Of a matrix of x, without swizzle: 128 bytes from a k half to the next, 256 from 8 rows to the next, in sixteenths.
_DESCRIPTOR = (128 >> 4) << 16 | (256 >> 4) << 32


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


def make_group_multiply(isa: Any, *, dtype: str, x_tiles: int, units: int, w_stage: int, fp8: bool = False) -> Any:
    """Inlined `multiply_stage(accumulators, operands, own_w, base, reading)`: the products of a warpgroup's stage.

    It adds those of a stage, which begins `reading` bytes into the ring at `base`, to the 4 `x_tiles` sums of a lane,
    and comes back when they are done. `own_w`: where this lane's pieces of W lie in the first stage; x lies `w_stage`
    bytes into a stage. `operands`: an array of 8 `units` for W.
    """
    group_settle = isa.group_settle(8 * x_tiles)
    load_unit, multiply_unit = _make_group_unit(isa, dtype, x_tiles, w_stage, fp8)

    def multiply_stage(accumulators: Any, operands: Any, own_w: Any, base: Any, reading: Any) -> None:
        for u in range(units):
            load_unit(operands, u, own_w, reading)
        # Operands and sums are in registers from here on; until `group_settle` they belong to the tensor cores.
        isa.group_fence()
        for u in range(units):
            multiply_unit(accumulators, operands, u, base, reading)
        isa.group_commit()
        # x is read from shared memory until the products are done, so the stage is free only after this.
        group_settle(accumulators)

    return isa.inlined(multiply_stage)


def make_group_multiply_ahead(
    isa: Any, *, dtype: str, x_tiles: int, units: int, w_stage: int
) -> tuple[Any, Any]:  # fmt: skip
    """The same with the products of the last units still under way while W of the next is loaded; `units` 2 or 4.

    Inlined `multiply_stage(accumulators, operands, own_w, base, reading, before, lane, arriving)` comes back with
    products under way. As soon as those of the stage before are done, the lanes below `arriving` say at its barrier
    `before` that it has been read; of a first stage `arriving` is 0. `settle(accumulators, before, lane, arriving)`
    waits for the rest, and does so for the last stage; the sums may be used then.
    """
    cuda, group_settle, wait_for_older = isa.cuda, isa.group_settle(8 * x_tiles), isa.GROUP_WAIT[units - 1]
    load_unit, multiply_unit = _make_group_unit(isa, dtype, x_tiles, w_stage, False)

    def multiply_stage(
        accumulators: Any, operands: Any, own_w: Any, base: Any, reading: Any, before: Any, lane: Any, arriving: Any
    ) -> None:  # fmt: skip
        for u in range(units):
            # A unit is a group. Of the stage before, the group of this unit is done, whose operands are replaced; with
            # the last unit all of them.
            wait_for_older()
            if u == units - 1:
                cuda.syncwarp()
                isa.mbarrier_arrive_below(before, lane, arriving)
            load_unit(operands, u, own_w, reading)
            isa.group_fence()
            multiply_unit(accumulators, operands, u, base, reading)
            isa.group_commit()

    def settle(accumulators: Any, before: Any, lane: Any, arriving: Any) -> None:
        group_settle(accumulators)
        cuda.syncwarp()
        isa.mbarrier_arrive_below(before, lane, arriving)

    return isa.inlined(multiply_stage), isa.inlined(settle)


def _make_group_unit(isa: Any, dtype: str, x_tiles: int, w_stage: int, fp8: bool) -> tuple[Any, Any]:
    """Inlined `load_unit(operands, u, own_w, reading)`, W of a unit to registers, and `multiply_unit(accumulators,
    operands, u, base, reading)`, which asks for its products."""
    i32, i64 = isa.i32, isa.i64
    group_mma, load_widened = isa.group_mma(dtype, 8 * x_tiles), make_load_widened(isa, dtype)
    unit_bytes_w, x_unit_bytes, product_bytes = (1 if fp8 else 2) * FRAGMENT, x_tiles * FRAGMENT, x_tiles * 256

    def load_unit(operands: Any, u: Any, own_w: Any, reading: Any) -> None:
        at = i32(own_w + reading + u * unit_bytes_w)
        if fp8:
            a, b = load_widened(at)
        else:
            a, b = isa.shared_load_u32x4(at), isa.shared_load_u32x4(i32(at + FRAGMENT))
        for c in range(4):
            operands[u * 8 + c * 2], operands[u * 8 + c * 2 + 1] = a[c], b[c]

    def multiply_unit(accumulators: Any, operands: Any, u: Any, base: Any, reading: Any) -> None:
        at = i32(base + w_stage + reading + u * x_unit_bytes)
        # A matrix descriptor: the shared address in sixteenths, and how far apart its 8 x 16-byte pieces are.
        there = i64((at & 0x3FFFF) >> 4) + _DESCRIPTOR
        o = u * 8
        # The same 16 k a product as in `gemm_ring`, k 8t..8t+3 of lane t, then 8t+4..8t+7: equal bits (docs/log.md).
        group_mma(accumulators, operands[o], operands[o + 1], operands[o + 2], operands[o + 3], there)
        group_mma(
            accumulators, operands[o + 4], operands[o + 5], operands[o + 6], operands[o + 7],
            there + (product_bytes >> 4),
        )  # fmt: skip

    return isa.inlined(load_unit), isa.inlined(multiply_unit)
