"""How a launch of attention is laid out: the order of its sums, and what does not change them.

Source: docs/log.md; the reasons for numbers stand beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eagle3core.kernels import tuned
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.overrides import overrides, warpgroups_wanted
from eagle3core.kernels.attention.paths import tail_units
from eagle3core.kernels.attention.rows import TILE_ROWS, TILES, rows_shared_bytes
from eagle3core.kernels.attention.warp.splits import has_splits_kernel
from eagle3core.kernels.attention.warpgroup.across import has_short_walk
from eagle3core.kernels.attention.warpgroup.shared import group_shared_bytes
from eagle3core.kernels.card import SHARED_BYTES
from eagle3core.kernels.gemm.fp8.tiling import fp8_key

# Multiprocessors of the largest common part of each architecture: A100, H200, B200, RTX PRO 6000. Order-neutral.
PROCESSORS = {"sm_80": 108, "sm_90a": 132, "sm_100": 148, "sm_120": 188}
WARPS = 8  # of a block of `attention_rows`: with 255 registers a lane they fill a processor
GROUP_ROWS = 64  # of a warpgroup
# Of a warp's ring where sessions are short: a processor has room for two such blocks, or for one and a block of the map
# that follows, which fetches its weights meanwhile.
SHORT_STAGES = 3


@dataclass(frozen=True)
class Plan:
    """Order-neutral choices of one launch.

    Attributes:
        row_warps: 0 for `attention_streams` or `attention_splits`, else warps of `attention_rows` that own 16 `tiles`
            rows each.
        groups: streams that `attention_rows` walks side by side.
        units: units scored at once; those between two barriers of a group.
        stages: depth of a ring, in sets of `units`.
        run: splits a block handles one after the other.
        counting: add up the tile counters of R-109.
        tiles: of a warp of `attention_rows`, 1 or 2; a warp of `attention_group` has one.
        grouped: `attention_group` in place of `attention_rows`: warpgroups multiply.
        by_split: `attention_splits` in place of `attention_streams`: a warp has a split, a block a bundle, its `run`.
        short: `attention_group` takes sets across streams where no stream has a second unit (`warpgroup.across`). Both
            walks in one kernel make the other one slower by up to 4%, so not where sessions may be long; nor over
            trees, which gain by themselves and lose in a step (docs/log.md).
    """

    row_warps: int
    stages: int
    run: int
    groups: int = 1
    units: int = 1
    counting: bool = False
    tiles: int = TILES
    grouped: bool = False
    by_split: bool = False
    short: bool = False

    def is_joined(self, shape: Shape) -> bool:
        """Whether a block joins the splits of whole bundles."""
        return self.run % shape.bundle == 0

    def is_whole(self, shape: Shape, *, paths: bool, words: int) -> bool:
        """Whether a block walks all splits of its rows, so that it can leave their output as well."""
        return self.grouped and self.groups == 1 and self.run >= shape.splits and not paths and not words

    def row_blocks(self, rows: int) -> int:
        """Blocks that share the rows of a key head."""
        of_warp = TILE_ROWS * (1 if self.grouped else self.tiles)
        return -(-rows // (of_warp * self.row_warps)) if self.row_warps else 1


def order_of(arch: str, n_kv_heads: int, dim: int) -> tuple[int, int]:
    """(splits, streams): what sets the order of sums, one value for all of an engine's launches.

    Splits * key heads is about one block a processor at batch 1. Few streams are long, and fewer are joined; more warps
    hide more latency, which units of head size 64, half as large, need. Eight rings do not fit sm_120's shared memory.
    """
    if arch == "sm_120":
        return 32, 4
    return (16 if n_kv_heads >= 8 else 32), (8 if dim == 64 else 4)


def choose_plan(
    arch: str, shape: Shape, tokens: int, batch: int, n_kv_heads: int, keys: int = 0, *, paths: bool = False
) -> Plan:
    """The layout for `tokens` queries of `batch` sequences of at most `keys` keys: the tuned one, else the rule's.

    Variables of `overrides` replace parts of either. With `paths` it is the rule's: sweeps know none.
    """
    key = plan_key(shape, tokens, batch, n_kv_heads, keys)
    setting = None if paths else tuned.find(arch, "attention", key)
    grouped = is_grouped(arch, shape, tokens)
    if setting and bool(setting["grouped"]) == grouped:
        plan = with_short_walk(Plan(**setting), shape, keys, paths=paths)
    else:
        plan = ruled_plan(arch, shape, tokens, batch, n_kv_heads, keys, paths=paths, grouped=grouped)
    return replace(plan, **overrides(shape, plan.row_warps, grouped=plan.grouped, by_split=plan.by_split))


def with_short_walk(plan: Plan, shape: Shape, keys: int, *, paths: bool) -> Plan:
    """The plan, with the walk for short sessions where all sessions are, and its kernel is to have one."""
    has_one = plan.grouped and not paths and has_short_walk(shape, plan.groups, plan.units)
    return replace(plan, short=has_one and keys < tuned.LONG_KEYS)


def is_grouped(arch: str, shape: Shape, tokens: int) -> bool:
    """Whether warpgroups multiply: wherever they have the rows and a cache of 16 bits, unless a variable says no."""
    return arch == "sm_90a" and not shape.is_fp8 and tokens * shape.group >= GROUP_ROWS and warpgroups_wanted()


def plan_key(shape: Shape, tokens: int, batch: int, n_kv_heads: int, keys: int) -> tuned.AttentionKey:
    """What a plan is tuned for."""
    return tuned.AttentionKey(
        fp8_key(shape.dtype) if shape.is_fp8 else shape.dtype, shape.dim, shape.group, shape.splits, shape.streams,
        tuned.attention_rows_regime(tokens * shape.group), batch, n_kv_heads, tuned.keys_regime(keys),
    )  # fmt: skip


def ruled_plan(
    arch: str, shape: Shape, tokens: int, batch: int, n_kv_heads: int, keys: int = 0, *, paths: bool = False,
    grouped: bool = False,
) -> Plan:  # fmt: skip
    """The layout where nothing was tuned."""
    rows, tail = tokens * shape.group, tail_units(tokens) if paths else 0
    tiles = 1 if paths else TILES  # a tile's nodes are added one after the other, so warps share them
    # Two tiles of a head of 128 in one warp take more registers on sm_100 than there are.
    most = TILE_ROWS if arch == "sm_100" and shape.dim == 128 else 2 * TILE_ROWS
    by_streams = not grouped and rows <= most and not paths
    # Where it was measured: a set of two units along a stream has its second one past a short session's end.
    is_short = by_streams and arch == "sm_90a" and 0 < keys < tuned.MIDDLE_KEYS
    bundles = batch * n_kv_heads * (shape.splits // shape.bundle)
    if is_short and has_splits_kernel(shape, tokens) and 2 * bundles > PROCESSORS[arch]:
        return Plan(0, SHORT_STAGES, shape.bundle, by_split=True)
    if grouped:
        plan = group_plan(arch, shape, rows, tail)
    elif by_streams:
        # More rows gain by it alone, and lose 0.2% of a step.
        plan = _streams_plan(arch, shape, one_by_one=is_short and rows <= TILE_ROWS // 2)
    else:
        plan = _rows_plan(arch, shape, rows, tail, tiles)
    work = batch * n_kv_heads * plan.row_blocks(rows)

    def cost(run: int) -> float:
        waves = -(-work * -(-shape.splits // run) // PROCESSORS[arch])
        return waves * (run + 0.3)  # starting a block costs about a third of a split

    return with_short_walk(replace(plan, run=min(range(1, shape.splits + 1), key=cost)), shape, keys, paths=paths)


def _streams_plan(arch: str, shape: Shape, *, one_by_one: bool) -> Plan:
    """Two units at a time where a ring holds two such sets, unless `one_by_one`, as in short sessions."""
    held = {"sm_80": 16, "sm_90a": 24, "sm_100": 24, "sm_120": 8}[arch] * 256 // (shape.row_bytes * shape.streams)
    one_by_one = one_by_one and shape.least_units == 1
    units = 2 if held >= 4 and not one_by_one else 1
    return Plan(0, min(held // units, SHORT_STAGES if one_by_one else 6), 1, units=units)


def _rows_plan(arch: str, shape: Shape, rows: int, tail: int, tiles: int) -> Plan:
    """As many rows a block as there are and fit beside `tail` units; the other warps walk further streams."""
    # Scores of as many units as leave room in the registers for all else; on the others it was not to be had for more.
    most_units = (256 if arch == "sm_90a" else 128) // shape.dim
    row_warps = min(next((n for n in (2, 4) if rows <= TILE_ROWS * tiles * n), 8), 4 * most_units)
    groups = min(WARPS // row_warps, shape.streams)

    def ring_units(row_warps: int, groups: int) -> int:
        """Units for which each of the rings has room."""
        others = rows_shared_bytes(shape, row_warps, groups, 0, 0, held_pieces(arch, shape, tiles), tail, tiles)
        return (SHARED_BYTES[arch] - others) // (groups * shape.unit_bytes)

    while row_warps > 2 and ring_units(row_warps, 1) < 3 * max(1, row_warps // 4):
        row_warps //= 2
        if tail:  # a tree's nodes take the place of a ring, not of the warps that are left
            groups = min(WARPS // row_warps, shape.streams)
    while groups > 1 and ring_units(row_warps, groups) < 3 * max(1, row_warps // 4):
        groups //= 2
    room = ring_units(row_warps, groups)
    units = min(most_units, row_warps)
    while units > max(1, row_warps // 4) and room < 4 * units:
        units //= 2
    return Plan(row_warps, min(room // units, 6), 1, groups, units, tiles=tiles)


def group_plan(arch: str, shape: Shape, rows: int, tail: int) -> Plan:
    """Two warpgroups over one ring, or, where one has all rows, over two streams side by side."""
    row_warps = 4 if rows <= GROUP_ROWS else 8
    groups = WARPS // row_warps
    units = 4 // groups  # 64 keys in all: scores of more leave no registers for the sums
    others = group_shared_bytes(shape, row_warps, groups, 0, 0, tail)
    a_stage = group_shared_bytes(shape, row_warps, groups, units, 1, tail) - others
    return Plan(row_warps, min((SHARED_BYTES[arch] - others) // a_stage, 6), 1, groups, units, grouped=True)


def held_pieces(arch: str, shape: Shape, tiles: int) -> int:
    """Pieces of the queries that fit the registers beside the sums of a warp's tiles and the scores of a set."""
    return min(shape.pieces, 3 if arch == "sm_90a" else 2) if tiles == 2 else shape.pieces
