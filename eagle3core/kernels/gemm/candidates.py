"""Which tilings there are kernels for, and by rows of x those worth timing against each other: the rule's, and others.

Every one gives the same bits (`tiling`), so only time decides. Source: docs/log.md says what was tried before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import SHARED_BYTES
from eagle3core.kernels.gemm.fp8.tiling import Fp8Tiling, as_fp8, deepened, low_block, takes
from eagle3core.kernels.gemm.held import holds_totals
from eagle3core.kernels.gemm.products import STREAMS, UNIT
from eagle3core.kernels.gemm.ring.bulk import holds_x
from eagle3core.kernels.gemm.ring.stay import has_whole_turns
from eagle3core.kernels.gemm.tiling import MULTIPROCESSORS, Tiling, deepest, fitted


def _shared(warps: int, w_tiles: int, *rings: tuple[int, int]) -> list[Tiling]:
    """`ring` of so many warps a stream, which share 16 rows of x, by units and stages."""
    return [Tiling("ring", 2, w_tiles, *ring, warps_w=warps) for ring in rings]


# For up to 8 rows: how much of W is under way, and in how large copies. With two tiles of W a block reads x half as
# often. Little under way leaves memory to attention, beside which the map after it begins.
_BULK = [Tiling("bulk", 1, 1, units, stages) for units, stages in ((8, 2), (8, 3), (4, 2), (4, 3), (4, 4), (4, 6))]
_BULK += [Tiling("bulk", 1, 1, 2, stages) for stages in (3, 4)]
_BULK += [Tiling("bulk", 1, 2, units, stages) for units, stages in ((8, 2), (4, 2), (4, 3), (4, 4), (2, 3))]
_BULK += [Tiling("bulk", 1, 3, units, stages) for units, stages in ((8, 2), (4, 3), (4, 4))]
# Much, asked for as fast as memory gives it (8 KB in 400 cycles a processor), which leaves turns to others.
_PACED = [Tiling("bulk", 1, 1, 8, stages, paced=paced) for stages, paced in ((2, 800), (3, 400), (3, 800), (3, 1200))]
_PACED += [Tiling("bulk", 1, 1, 4, stages, paced=paced) for stages, paced in ((4, 400), (4, 800), (6, 400))]
_PACED += [Tiling("bulk", 1, 2, 4, 5, paced=paced) for paced in (400, 800)]
_PACED += [Tiling("bulk", 1, 2, 8, 2, paced=800)]
# Blocks that stay, one, two or three a processor: no ring but the first of each begins empty.
_STAYING = [
    Tiling("bulk", 1, w_tiles, units, stages, resident=blocks * MULTIPROCESSORS)
    for w_tiles, units, stages, blocks in (
        (1, 8, 6, 1), (1, 8, 3, 2), (1, 8, 2, 3), (1, 4, 6, 2), (2, 8, 3, 1), (2, 4, 6, 1)
    )
]  # fmt: skip
_RING = [
    Tiling("ring", 1, 1, units, stages) for units, stages in ((4, 3), (4, 4), (2, 6), (1, 8), (1, 12), (1, 16))
]  # fmt: skip
# For up to 16.
_SIXTEEN = [Tiling("ring", 2, 1, units, stages) for units, stages in ((2, 4), (2, 6), (1, 8), (1, 13))]
_SIXTEEN += [Tiling("ring", 2, 2, units, stages) for units, stages in ((2, 3), (2, 4), (1, 5), (1, 8))]
_SIXTEEN += [Tiling("bulk", 2, 1, units, stages) for units, stages in ((4, 3), (4, 4), (4, 6), (2, 6), (2, 8))]
_SIXTEEN += [Tiling("bulk", 2, 2, units, stages) for units, stages in ((4, 3), (2, 4))]
# Where a map has at most a block a processor, room for a second may hold more of it under way instead. Three tiles of W
# a block make it so for the 384 tiles of q, k and v, which else have three blocks a processor that read x each.
_SIXTEEN += [Tiling("bulk", 2, w_tiles, 4, stages) for w_tiles, stages in ((2, 4), (2, 6), (3, 3), (3, 4))]
_SIXTEEN += [Tiling("ring", 2, w_tiles, 2, stages) for w_tiles, stages in ((2, 6), (2, 8), (3, 4), (3, 6))]
_SIXTEEN += [*_shared(2, 2, (2, 6), (2, 8)), *_shared(3, 3, (2, 4)), *_shared(4, 8, (1, 4))]
_SIXTEEN += [Tiling("ring", 2, 7, 1, 3), *_shared(2, 14, (1, 3))]
_SIXTEEN += [Tiling("bulk", 2, 2, 4, stages, resident=b * MULTIPROCESSORS) for stages, b in ((3, 2), (6, 1))]
# W in e4m3, for up to 8 rows. Where a processor has many tiles, little under way lets it have several blocks at once,
# of which some begin while others end.
_FP8_EIGHT = [Tiling("bulk", 1, 1, 8, stages) for stages in (2, 3, 4, 6)]
_FP8_EIGHT += [Tiling("bulk", 1, 1, 4, stages) for stages in (4, 6)]
_FP8_EIGHT += [Tiling("bulk", 1, w_tiles, 8, 2) for w_tiles in (2, 4)]
_FP8_EIGHT += [
    Tiling("bulk", 1, 1, 8, stages, paced=paced) for stages, paced in ((2, 400), (4, 200), (4, 400), (6, 400))
]
_FP8_EIGHT += [Tiling("ring", 1, 1, 4, stages) for stages in (4, 5, 6)]
_FP8_EIGHT += [Tiling("ring", 1, 1, 2, 8), Tiling("ring", 1, 2, 4, 4)]
_FP8_EIGHT += [
    Tiling("bulk", 1, w_tiles, 8, stages, resident=blocks * MULTIPROCESSORS)
    for w_tiles, stages, blocks in ((1, 12, 1), (1, 6, 2), (1, 4, 3), (2, 6, 1), (2, 3, 2))
]
# For up to 16, where x weighs as much as W of a tile: the more tiles share it, the less comes from the cache.
_FP8_SIXTEEN = [Tiling("ring", 2, 1, 2, stages) for stages in (6, 8)]
_FP8_SIXTEEN += [Tiling("ring", 2, 2, units, stages) for units, stages in ((2, 4), (2, 6), (2, 8), (4, 3))]
_FP8_SIXTEEN += [Tiling("ring", 2, 4, units, stages) for units, stages in ((2, 3), (2, 4), (2, 6), (4, 2))]
_FP8_SIXTEEN += [Tiling("ring", 2, 8, units, stages) for units, stages in ((1, 4), (1, 5), (2, 3))]
# Of the 1,792 tiles of gate and up seven a block make two blocks a processor, fourteen one, with few left over.
_FP8_SIXTEEN += [Tiling("ring", 2, 7, units, stages) for units, stages in ((1, 5), (2, 3))]
_FP8_SIXTEEN += [Tiling("ring", 2, 2, 4, 4)]
_FP8_SIXTEEN += [Tiling("bulk", 2, 2, 4, stages) for stages in (4, 6)]
_FP8_SIXTEEN += [Tiling("group", 2, 8, 4, 5), Tiling("group", 2, 12, 2, 7)]
# And the more warps share it, the more there are to widen W.
_FP8_SIXTEEN += [*_shared(2, 2, (2, 8)), *_shared(3, 3, (2, 6), (4, 3)), *_shared(4, 8, (2, 2))]
_FP8_SIXTEEN += _shared(2, 14, (1, 6))
_FP8 = _FP8_EIGHT, _FP8_SIXTEEN
# For 17 to 64, of `group`: units, and the blocks that shall fit a processor, by tiles of W; and where four share K.
_ALONE = {4: ((4, 1), (4, 2), (4, 3), (2, 2)), 8: ((4, 1), (4, 2), (2, 2)), 12: ((4, 1),), 16: ((4, 1),)}
_SHARING = ((4, 1), (2, 1))


def gemm_candidates(arch: str, rows: int, n_tiles: int, k: int, packed: bool) -> list[Tiling]:
    """Distinct tilings that `gemm` takes for `rows` rows of x, `n_tiles` tiles of 16 weight rows and `k` columns."""
    units = -(-k // UNIT)
    if rows <= 8:
        has_bulk = any(_is_taken(one, arch, n_tiles, k, packed) for one in _BULK)
        found = [*_BULK, *_PACED, *_STAYING, *(_RING[:3] if has_bulk else _RING)]
    elif rows <= 16:
        found = [*_SIXTEEN, *_groups(arch, (2,), rows, n_tiles, units)]
    elif arch == "sm_90a" and packed:
        found = [Tiling("ring", 4, 2, deep, 6) for deep in (1, 2)] if rows <= 32 else []
        narrow = next((v for v in (3, 4, 6, 8) if 8 * v >= rows), None)
        found += _groups(arch, (32, 16), rows, n_tiles, units) if narrow is None else []
        found += _holding(arch, rows, units) if narrow is None else []
        found += _narrow_groups(arch, narrow, n_tiles, units) if narrow is not None else []
    else:
        found = list(_tiles(rows, n_tiles))
    fitting = [
        fitted(arch, one) for one in found
        if one.shared_bytes <= SHARED_BYTES[arch] and _is_taken(one, arch, n_tiles, k, packed)
    ]  # fmt: skip
    return list(dict.fromkeys(fitting))


def fp8_candidates(arch: str, rows: int, n_tiles: int, k: int, blocks: bool = False) -> list[Tiling]:
    """The same for W in e4m3; `blocks`: with scales of blocks."""
    found = [one for one in _FP8[rows > 8] if one.units <= 4 or not blocks] if rows <= 16 else _fp8_of_many_rows(blocks)
    found += [Tiling("bulk", 1, 2, 4, stages) for stages in (6, 8)] if rows <= 8 and blocks else []
    wide = gemm_candidates(arch, rows, n_tiles, k, True) if rows > 8 else []
    wide += [Tiling("group", low_block(rows), w_tiles, 2, 8) for w_tiles in (4, 8)] if rows > 16 and blocks else []
    taken = [as_fp8(one, blocks) for one in found if _is_taken(one, arch, n_tiles, k, True)]
    of_16_bit = [one for one in wide if one.kernel in ("group", "tile") and _is_taken(one, arch, n_tiles, k, True)]
    taken += [deepened(arch, one, k, blocks) for one in of_16_bit]
    fitting = [fitted(arch, one) for one in taken if takes(one, k) and one.shared_bytes <= SHARED_BYTES[arch]]
    return list(dict.fromkeys(fitting))


def _fp8_of_many_rows(blocks: bool) -> list[Tiling]:
    """Where `group` cannot: 32 rows of x at a time."""
    rings = ((2, 4), (2, 6), (2, 8), (1, 8), (1, 16))
    return [Tiling("ring", 4, w_tiles, *ring) for w_tiles in ((1, 2) if blocks else (1, 2, 4)) for ring in rings]


def _groups(arch: str, widest: tuple[int, ...], rows: int, n_tiles: int, units: int) -> list[Tiling]:
    """Warpgroups over blocks of every height, alone or sharing K, with rings as deep as fit."""
    made = []
    for most in widest:
        blocks_x = -(-rows // (8 * most))
        x_tiles = -(-rows // (8 * blocks_x))
        for w_tiles in (4, 8, 12):
            blocks = blocks_x * -(-n_tiles // w_tiles)
            for split in (1, STREAMS):
                whole = Tiling(
                    "group", x_tiles, w_tiles, 4 if x_tiles <= 4 else 2, 8, split=split,
                    together=split > 1 and blocks * split <= MULTIPROCESSORS,
                )  # fmt: skip
                if (split > 1 and not whole.together) or x_tiles * w_tiles > 256:
                    continue
                made.append(deepest(arch, whole, units, blocks=1))
                # Blocks of one cluster fetch W for each other, which else each brings from the L2 cache.
                sizes = (of for of in (2, 4) if split == 1 and blocks_x % of == 0)
                made += [replace(made[-1], cluster=of) for of in sizes]
                if x_tiles <= 4 and w_tiles == 4 and split == 1:
                    made.append(deepest(arch, whole, units, blocks=2))
    return made


def _holding(arch: str, rows: int, units: int) -> Iterator[Tiling]:
    """Blocks that hold their totals, small ones for small maps: each alone, one a processor that stays, and pairs."""
    for w_tiles, most in ((12, 16), (8, 24), (8, 16), (8, 8), (4, 16), (4, 8)):
        fewest = -(-rows // (8 * most))
        for blocks_x in dict.fromkeys((fewest, fewest + fewest % 2)):  # pairs where that takes a block more
            yield from _holding_by(arch, rows, units, blocks_x, w_tiles)


def _holding_by(arch: str, rows: int, units: int, blocks_x: int, w_tiles: int) -> Iterator[Tiling]:
    """The same of one height, so many blocks of rows of x."""
    x_tiles = -(-rows // (8 * blocks_x))
    for deep in (1, 2):
        if deep <= units and holds_totals(x_tiles, w_tiles, deep):
            one = deepest(arch, Tiling("group", x_tiles, w_tiles, deep, 16 // deep, held=True), units, blocks=1)
            yield from (one, replace(one, resident=MULTIPROCESSORS))
            if blocks_x % 2 == 0:
                yield replace(one, resident=MULTIPROCESSORS, cluster=2)


def _narrow_groups(arch: str, x_tiles: int, n_tiles: int, units: int) -> Iterator[Tiling]:
    """For 17 to 64 rows: small blocks, several a processor, large ones, those that share K and meet, those that stay.

    Larger blocks than the smallest that leave half of the processors idle are left out.
    """
    for w_tiles in _ALONE:
        blocks = -(-n_tiles // w_tiles)
        for split, depths in ((1, _ALONE[w_tiles]), (STREAMS, _SHARING)):
            suits = w_tiles == 4 or 2 * blocks >= MULTIPROCESSORS if split == 1 else blocks * split <= MULTIPROCESSORS
            if not suits:
                continue
            for deep, resident in depths:
                whole = Tiling("group", x_tiles, w_tiles, deep, 32 // deep, split=split, together=split > 1)
                yield deepest(arch, whole, units, blocks=resident)
    if -(-n_tiles // 8) > MULTIPROCESSORS:  # a block that stays fetches W of its next tile while it finishes one
        for deep in (4, 2):
            held = Tiling("group", x_tiles, 8, deep, 32 // deep, held=True, resident=MULTIPROCESSORS)
            yield deepest(arch, held, units, blocks=1)


def _tiles(rows: int, n_tiles: int) -> Iterator[Tiling]:
    """Where there are no warpgroups: blocks and the warps that share them; K shared where processors would be idle."""
    if rows <= 32:
        blocks = ((4, 8, 1, 4), (4, 4, 1, 4), (4, 8, 2, 4))
    elif rows <= 64:
        blocks = ((8, 8, 2, 2), (8, 8, 2, 4), (8, 4, 2, 2))
    else:
        blocks = ((16, 8, 4, 2), (16, 16, 2, 4), (8, 8, 2, 2))
    for x_tiles, w_tiles, warps_x, warps_w in blocks:
        is_small = -(-rows // (8 * x_tiles)) * -(-n_tiles // w_tiles) <= MULTIPROCESSORS
        for stages in (4, 8):
            for split in (1, STREAMS) if is_small else (1,):
                yield Tiling("tile", x_tiles, w_tiles, 1, stages, warps_x, warps_w, split)


def _is_taken(tiling: Tiling, arch: str, n_tiles: int, k: int, packed: bool) -> bool:
    """Whether the kernel of a tiling runs this shape; the same limits as `gemm` checks."""
    units = -(-k // UNIT)
    if tiling.kernel == "group":
        return arch == "sm_90a" and packed and tiling.units <= units
    if tiling.kernel == "bulk" and (
        arch == "sm_80" or not packed or k % UNIT or not holds_x(tiling.x_tiles, tiling.units)
    ):  # fmt: skip
        return False
    if tiling.kernel == "ring" and not _can_share(tiling):
        return False
    if tiling.stays and (not _can_stay(tiling, k) or n_tiles <= tiling.w_tiles * tiling.resident):
        return False  # or no block would have a second tile
    if tiling.kernel in ("ring", "bulk"):
        return n_tiles % tiling.w_tiles == 0 and (tiling.units == 1 or units % (STREAMS * tiling.units) == 0)
    return True


def check_tiling(tiling: Tiling, arch: str, n_tiles: int, k: int, packed: bool) -> None:
    """Whether there is a kernel of a tiling for a map of `n_tiles` tiles of 16 rows and `k` columns.

    Raises:
        KernelLimit: there is none.
    """
    units = -(-k // UNIT)
    if isinstance(tiling, Fp8Tiling) and not takes(tiling, k):
        raise KernelLimit(
            f"{tiling} for W in e4m3 and k {k}",
            "of tile a tile of W a warp and scales of rows; of scales of blocks at most 4 units a stage, of group whole"
            " blocks a stream and at most 8 tiles of x, 12 beside up to 8 of W, and resident=0", "pass no tiling",
        )  # fmt: skip
    if tiling.kernel == "group" and (not packed or tiling.units > units):
        raise KernelLimit(
            f"{tiling} for W {'packed' if packed else 'by rows'}",
            f"packed W, and at most {units} units a stage",
            "pack the weight, or pass no tiling",
        )
    if tiling.cluster > 1 and (tiling.kernel != "group" or tiling.w_tiles % tiling.cluster):
        raise KernelLimit(
            f"{tiling}, {tiling.cluster} blocks a cluster", "a cluster of 1, or of `group` one that divides w_tiles",
            "set cluster=1, or pass no tiling",
        )  # fmt: skip
    if tiling.paced < 0 or (tiling.paced and tiling.kernel != "bulk"):
        raise KernelLimit(f"{tiling}, paced", "cycles, of `bulk` alone", "set paced=0, or pass no tiling")
    if tiling.kernel == "ring" and not _can_share(tiling):
        raise KernelLimit(
            f"{tiling}, {tiling.warps_w} warps a stream", "1 to 4, that divide w_tiles",
            "set warps_w=1, or pass no tiling",
        )  # fmt: skip
    if tiling.stays and not _can_stay(tiling, k):
        raise KernelLimit(
            f"{tiling} for k {k}, whose blocks stay", f"k a multiple of {2 * STREAMS * UNIT * tiling.units}, two"
            " stages of each stream, and paced=0", "set resident=0, or pass no tiling",
        )  # fmt: skip
    if tiling.held and not _can_hold(tiling):
        raise KernelLimit(
            f"{tiling} holds its totals",
            "`group` with split 1, whole clusters, and sums that fit its registers twice",
            "set held=False, or pass no tiling",
        )
    if tiling.kernel in ("ring", "bulk") and (
        n_tiles % tiling.w_tiles or (tiling.units > 1 and units % (STREAMS * tiling.units))
    ):
        raise KernelLimit(
            f"{tiling} for {n_tiles} tiles of {units} units", "whole blocks and stages", "use w_tiles=1 and units=1"
        )
    has_room = holds_x(tiling.x_tiles, tiling.units)
    if tiling.kernel == "bulk" and (arch == "sm_80" or not packed or k % UNIT or not has_room):
        raise KernelLimit(
            f"{tiling} on {arch} for k {k} and W {'packed' if packed else 'by rows'}",
            f"bulk copies, packed W, whole units of {UNIT}, x_tiles 1 with up to 8 units or 2 with up to 4",
            "use `ring`, or pass no tiling",
        )


def _can_share(tiling: Tiling) -> bool:
    """Whether the warps of a stream have whole tiles of W each, and a block a barrier for every stream of theirs."""
    return 1 <= tiling.warps_w <= 4 and tiling.w_tiles % tiling.warps_w == 0


def _can_stay(tiling: Tiling, k: int) -> bool:
    """Whether a block of up to 16 rows can go on to its next tile: it multiplies two stages a turn."""
    return has_whole_turns(k, tiling.units) and not tiling.paced


def _can_hold(tiling: Tiling) -> bool:
    is_alone = tiling.kernel == "group" and tiling.split == 1 and tiling.resident % tiling.cluster == 0
    return is_alone and holds_totals(tiling.x_tiles, tiling.w_tiles, tiling.units)
