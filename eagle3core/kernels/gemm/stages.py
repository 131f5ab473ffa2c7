"""Those who fetch, in `gemm_group`: a warp for W and one for x, by copies that complete a barrier.

A stage holds `units` units of 32 k, of one stream as far as it goes. Whoever fetches walks the streams by himself:
`following` gives the unit where the next stage starts.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS

FETCHING_WARPS = 2


def make_steps_of(isa: Any, units: int) -> Any:
    """Inlined `steps_of(stream, n_units)`: stages of a stream."""
    i32, shift = isa.i32, units.bit_length() - 1

    def steps_of(stream: Any, n_units: Any) -> Any:
        return i32(((((stream + 1) * n_units) >> 2) - ((stream * n_units) >> 2) + (units - 1)) >> shift)

    return isa.inlined(steps_of)


def make_following(isa: Any, units: int) -> Any:
    """Inlined `following(unit, stop, stream, last, n_units)`: the stage after that at `unit`.

    Returns its unit, the end of its stream, and the stream; after the last stage the unit is not below the end.
    """
    i32 = isa.i32

    def following(unit: Any, stop: Any, stream: Any, last: Any, n_units: Any) -> Any:
        unit = i32(unit + units)
        while unit >= stop and stream < last:
            unit = stop
            stream = i32(stream + 1)
            stop = i32(((stream + 1) * n_units) >> 2)
        return unit, stop, stream

    return isa.inlined(following)


def make_leave_stage(isa: Any, cluster: int) -> Any:
    """Inlined `leave_stage(empty, lane)`: a multiplying warp has read a stage, and says so to all who may fill it."""
    i32 = isa.i32

    def leave_stage(empty: Any, lane: Any) -> None:
        # All lanes have read W: one arrives for them.
        if lane < isa.ARRIVING_LANES:
            if cluster == 1:
                isa.mbarrier_arrive(empty)
            else:
                for block in range(cluster):
                    isa.cluster.mbarrier_arrive(empty, i32(block))

    return isa.inlined(leave_stage)


def make_first_place(isa: Any) -> Any:
    """Inlined `first_place(ring)`: the first stage and its barrier, in the round that finds all stages empty."""
    i32 = isa.i32

    def first_place(ring: Any) -> Any:
        return ring, i32(0), i32(1)

    return isa.inlined(first_place)


def make_fetch_w(isa: Any, *, w_tiles: int, units: int, stages: int, stage_bytes: int, cluster: int, fp8: bool) -> Any:
    """Inlined `fetch_w(ring, full, empty, w, tile0, tiles, unit, stop, stream, last, n_units, lane, place)`, by a warp.

    A tile past the last is fetched from the last one's place. The blocks of a cluster have the same tiles: each fetches
    its part of them for all. `fp8`: W is in e4m3. `place`, which is also returned: where the next stage of the ring
    lies, its barrier and the parity of its round; `first_place` at the start.
    """
    i32, i64, cuda = isa.i32, isa.i64, isa.cuda
    following = make_following(isa, units)
    unit_bytes = FRAGMENT if fp8 else 2 * FRAGMENT
    piece = units * unit_bytes
    part, everyone = w_tiles // cluster, (1 << cluster) - 1

    def fetch_w(
        ring: Any, full: Any, empty: Any, w: Any, tile0: Any, tiles: Any, unit: Any, stop: Any, stream: Any, last: Any,
        n_units: Any, lane: Any, place: Any,
    ) -> Any:  # fmt: skip
        tile_bytes = i64(n_units) * unit_bytes
        source, far = w + i64(tile0) * tile_bytes, i32(tiles - 1 - tile0)
        target, barrier, parity = place
        begin = i32(0)
        if cluster > 1:
            begin = i32(isa.cluster.rank() * part)
            source += i64(min(begin, far)) * tile_bytes
        while unit < stop:
            # The multiplying warps have left this stage.
            isa.mbarrier_wait(i32(empty + barrier), parity)
            # The bytes are announced before a copy of this warp can complete them, hence the meeting of the lanes.
            if lane == 0:
                isa.mbarrier_expect(i32(full + barrier), i32(w_tiles * piece))
            cuda.syncwarp()
            start = unit
            # Past the end of K there is no W to read: the stage starts earlier, and zeros of x meet the units of
            # before.
            if units > 1 and start + units > n_units:
                start = i32(n_units - units)
            at = source + i64(start) * unit_bytes
            if cluster == 1:
                for i in range(w_tiles):
                    isa.warp_bulk_copy(i32(target + i * piece), at, i32(piece), i32(full + barrier))
                    if i < far:
                        at += tile_bytes
            else:
                # Bytes of other blocks may come before this one has announced them: a phase ends with its arrivals.
                for i in range(part):
                    tile = i32(begin + i)
                    isa.cluster.warp_bulk_copy(
                        i32(target + tile * piece), at, i32(piece), i32(full + barrier), i32(everyone)
                    )
                    if tile < far:
                        at += tile_bytes
            unit, stop, stream = following(unit, stop, stream, last, n_units)
            target, barrier = i32(target + stage_bytes), i32(barrier + 8)
            if barrier == 8 * stages:
                target, barrier, parity = ring, i32(0), i32(parity ^ 1)
        return target, barrier, parity

    return isa.inlined(fetch_w)


def make_fetch_x(isa: Any, *, x_tiles: int, units: int, stages: int, stage_bytes: int) -> Any:
    """Inlined `fetch_x(ring, full, empty, packed, n_units, first, last, lane, place)`, by one warp: a copy a stage.

    `packed` is the address of the block's x in the order of `pack`, which has zeros past the end of a stream. `place`
    as of `fetch_w`.
    """
    i32, i64, cuda = isa.i32, isa.i64, isa.cuda
    steps_of = make_steps_of(isa, units)
    step_bytes = units * x_tiles * FRAGMENT

    def fetch_x(
        ring: Any, full: Any, empty: Any, packed: Any, n_units: Any, first: Any, last: Any, lane: Any, place: Any
    ) -> Any:  # fmt: skip
        stream_bytes = i64(steps_of(i32(STREAMS - 1), n_units)) * step_bytes  # the last stream is a longest one
        source, stream = packed + i64(first) * stream_bytes, first
        target, barrier, parity = place
        while stream <= last:
            # Each stream begins at its own place: packed x gives all of them as many stages as the longest.
            at = source
            for _ in range(steps_of(stream, n_units)):
                isa.mbarrier_wait(i32(empty + barrier), parity)
                if lane == 0:
                    isa.mbarrier_expect(i32(full + barrier), i32(step_bytes))
                cuda.syncwarp()
                isa.warp_bulk_copy(target, at, i32(step_bytes), i32(full + barrier))
                at += step_bytes
                target, barrier = i32(target + stage_bytes), i32(barrier + 8)
                if barrier == 8 * stages:
                    target, barrier, parity = ring, i32(0), i32(parity ^ 1)
            source += stream_bytes
            stream = i32(stream + 1)
        return target, barrier, parity

    return isa.inlined(fetch_x)
