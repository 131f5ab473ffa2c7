"""Equal shares of a map's streams for blocks that stay: how they are cut, and how a stream's sums come to its tile.

Whole tiles divide badly where there are few: 448 of them keep 132 processors busy for four rounds, of which the last is
a third full. Here the streams of all tiles of W, in order, are cut into runs, and as many blocks have each as there are
blocks of x: one each, side by side, so that W comes from memory once. A tile that two runs have streams of is finished
by the block with its first stream, its last tile: the other has its later streams first, leaves their sums in the
workspace as each lane holds them, and counts once it has the next stream's, when its stores are long done; the one that
finishes adds them in order, ((s0 + s1) + s2) + s3, whoever made them. A warp waits for the warps of its own tile of W
alone, and for blocks that were all on the GPU before any of them could wait.

Source: derived here; work cut without regard to tiles after Stream-K, Osama et al., arXiv 2301.03598.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle3core.kernels.gemm.ring import STREAMS

_LATER = STREAMS - 1  # streams of a tile that others may have


class Shares(NamedTuple):
    """Inlined functions of run `index` of `n` over `blocks` tiles of W.

    Attributes:
        of: `(index, n, blocks)`: the first stream of a run, and the end; stream s of tile b is 4 b + s.
        until: `(stream, end)`: the end of a run's streams of the tile of `stream`, as streams of the tile: 1 .. 4.
        owner: `(stream, n, blocks)`: the run that has a stream.
        leave: `(workspace, owner, stream, warp, lane, sums)`: sums of a tile's later stream, for block `owner`.
        announce: `(counters, owner, n, warp, lane)`: `n` streams' sums are there.
        take: `(workspace, counters, owner, stream, warp, lane, totals)`: totals with all streams from `stream` on.
    """

    of: Any
    until: Any
    owner: Any
    leave: Any
    announce: Any
    take: Any


def shared_sums_words(x_tiles: int, w_tiles: int, n: int) -> int:
    """Words of 4 bytes that `n` shares leave each other at most."""
    return n * _LATER * 128 * x_tiles * w_tiles


def shared_counters(w_tiles: int, n: int) -> int:
    """Counters that `n` shares take: one a warp."""
    return n * w_tiles


def make_shares(isa: Any, *, x_tiles: int, w_tiles: int) -> Shares:
    """The shares of blocks of 8 `x_tiles` rows of x and `w_tiles` tiles of W, a warp each."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    stream_bytes = 512 * x_tiles * w_tiles

    def begin_of(index: Any, n: Any, blocks: Any) -> Any:
        each = i32(i32(blocks * STREAMS) // n)
        return i32(index * each + min(index, i32(blocks * STREAMS - n * each)))

    begin_of = isa.inlined(begin_of)

    def of(index: Any, n: Any, blocks: Any) -> Any:
        return begin_of(index, n, blocks), begin_of(i32(index + 1), n, blocks)

    def until(stream: Any, end: Any) -> Any:
        return i32(min(i32(end - (stream & -STREAMS)), i32(STREAMS)))

    def owner(stream: Any, n: Any, blocks: Any) -> Any:
        each = i32(i32(blocks * STREAMS) // n)
        longer = i32(blocks * STREAMS - n * each)  # so many shares, the first ones, have a stream more
        if stream < i32(longer * (each + 1)):
            return i32(stream // i32(each + 1))
        return i32(longer + i32(stream - longer * (each + 1)) // each)

    def place_of(workspace: Any, owner: Any, stream: Any, warp: Any, lane: Any) -> Any:
        at = i64(i32(owner * _LATER + stream - 1)) * stream_bytes
        return workspace + at + i32((warp * x_tiles * 32 + lane) * 16)

    place_of = isa.inlined(place_of)

    def leave(workspace: Any, owner: Any, stream: Any, warp: Any, lane: Any, sums: Any) -> None:
        at = place_of(workspace, owner, stream, warp, lane)
        for m in range(x_tiles):
            isa.store_f32x4(at + m * 512, sums[4 * m], sums[4 * m + 1], sums[4 * m + 2], sums[4 * m + 3])

    def announce(counters: Any, owner: Any, n: Any, warp: Any, lane: Any) -> None:
        isa.fence_gpu()
        cuda.syncwarp()
        if lane == 0:
            isa.atomic_add_i32(counters + i32((owner * w_tiles + warp) * 4), n)

    def take(workspace: Any, counters: Any, owner: Any, stream: Any, warp: Any, lane: Any, totals: Any) -> None:
        if lane == 0:
            counter = counters + i32((owner * w_tiles + warp) * 4)
            isa.wait_count(counter, i32(STREAMS - stream))
            isa.store_u32(counter, i32(0))  # ready for the next launch
        cuda.syncwarp()
        isa.fence_gpu()  # what the others left is read after this, and past L1, which does not see their writes
        for s in range(stream, STREAMS):
            at = place_of(workspace, owner, i32(s), warp, lane)
            for m in range(x_tiles):
                v = isa.load_f32x4_l2(at + m * 512)
                totals[4 * m], totals[4 * m + 1] = totals[4 * m] + v[0], totals[4 * m + 1] + v[1]
                totals[4 * m + 2], totals[4 * m + 3] = totals[4 * m + 2] + v[2], totals[4 * m + 3] + v[3]

    return Shares(*(isa.inlined(one) for one in (of, until, owner, leave, announce, take)))
