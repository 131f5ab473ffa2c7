"""Attention's kernels as a plan asks for them: names, constants, parameters, and what their code has to hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eagle3core.errors import KernelLimit
from eagle3core.kernels.attention.combine import COMBINE_THREADS, make_attention_combine
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.paths import tail_units
from eagle3core.kernels.attention.plan import WARPS, Plan, held_pieces
from eagle3core.kernels.attention.rows import TILES, make_attention_rows, rows_shared_bytes
from eagle3core.kernels.attention.warp.splits import has_splits_kernel, make_attention_splits, splits_shared_bytes
from eagle3core.kernels.attention.warp.streams import make_attention_streams, streams_shared_bytes
from eagle3core.kernels.attention.warpgroup.group import FETCHING_WARPS, make_attention_group
from eagle3core.kernels.attention.warpgroup.shared import group_shared_bytes
from eagle3core.kernels.card import Variant, overlaps, parameters

PARAMETERS = parameters(
    "q:in k:const v:const tables:const prefix:const masks:in positions:in partial:out tops_sums:out counters:inout "
    "tokens:i32 table_width:i32 run:i32 window:i32 scale:f32"
)
# With earlier rows its place says how many there are, and above `layout.EARLIER_BITS` what the window is.
EARLIER_PARAMETERS = tuple(replace(p, name="earlier") if p.name == "window" else p for p in PARAMETERS)
# With paths their longest one, likewise.
PATHS_PARAMETERS = tuple(replace(p, name="path_len") if p.name == "window" else p for p in PARAMETERS)
COMBINE_PARAMETERS = parameters(
    "partial:in tops_sums:in prefix:const sinks:const out:out words:out tokens:i32 newest:i32 x_tiles:i32 scale:f32"
)
FP8_COMBINE_PARAMETERS = (*COMBINE_PARAMETERS, *parameters("v_scale:f32"))
# Of `attention_group`: maps of k and v as rows of the cache, 16 of 128 bytes a box, beside their addresses; then what a
# block needs that leaves its rows' output.
GROUP_PARAMETERS = parameters("k_map:const v_map:const sinks:const out:out ordered:out x_tiles:i32")


def attention_variant(
    arch: str, shape: Shape, tokens: int, plan: Plan, *, words: int = 0, paths: bool = False, windowed: bool = False,
    whole: bool = False,
) -> Variant:  # fmt: skip
    """The first kernel for `tokens` queries a sequence.

    Args:
        words: of a row's mask, 0 if only the T newest have bits.
        paths: rows add their ancestors as plain decoding does; of `attention_rows` alone.
        windowed: keys have a window; with `words` or `paths` a kernel of its own.
        whole: it leaves the output too (`Plan.is_whole`).

    Raises:
        KernelLimit: a plan that `attention_group` or `attention_splits` is not made for.
    """
    order = f"{_shape_name(shape)}_s{plan.stages}"
    order += "_counting" if plan.counting else ""
    order += f"_earlier{words}" if words else ""
    shared: dict[str, Any] = {"shape": shape, "stages": plan.stages, "counting": plan.counting}
    shared["overlap"] = overlaps(arch)
    if words:  # only where set: the other variants are to stay as they were proven, name, constants and machine code
        shared["words"] = words
    if windowed and (words or paths):
        order, shared["windowed"] = f"{order}_window", True
    tail = tail_units(tokens) if paths else 0
    if paths:
        order, shared["tail"] = f"{order}_paths{tail}", tail
    taken = PATHS_PARAMETERS if paths else EARLIER_PARAMETERS if words else PARAMETERS
    joined, held = plan.is_joined(shape), held_pieces(arch, shape, plan.tiles)
    assert plan.row_warps or not paths, "warps that walk streams of their own know no paths"
    tiles, half, units = -(-tokens * shape.group // 16), tokens * shape.group <= 8, plan.units
    if plan.by_split:
        _check_by_split(plan, shape, tokens)
        return Variant(
            name=f"attention_splits_{order}{'_half' if half else ''}",
            make=make_attention_splits, constants={**shared, "half": half}, parameters=taken,
            threads=32 * shape.bundle, shared_bytes=splits_shared_bytes(shape, half, plan.stages),
            dependent=overlaps(arch), rounds_itself=True,
            instructions={
                "HMMA": shape.dim * (3 if half else 4) // 16, "LDSM": 4 * shape.row_pieces,
                "LDGSTS": 4 * shape.row_pieces,
            },
        )  # fmt: skip
    if plan.row_warps == 0:
        return Variant(
            name=f"attention_streams_{order}_u{units}_t{tiles}{'h' if half else ''}{_joined(joined)}",
            make=make_attention_streams,
            constants={**shared, "tiles": tiles, "half": half, "units": units, "joined": joined},
            parameters=taken, threads=32 * shape.streams,
            shared_bytes=streams_shared_bytes(shape, tiles, half, units, plan.stages, joined),
            dependent=overlaps(arch), rounds_itself=True,
            instructions={
                "HMMA": tiles * units * shape.dim * (3 if half else 4) // 16,
                "LDSM": units * (2 if shape.is_fp8 else 4) * shape.row_pieces,
                "LDGSTS": units * 4 * shape.row_pieces,
            },
        )  # fmt: skip
    layout = {"row_warps": plan.row_warps, "groups": plan.groups, "units": plan.units, "joined": joined}
    if plan.grouped:
        _check_grouped(plan)
        if plan.short and not paths and not (windowed and words):  # those with a window have no register left
            order, layout["short"] = f"{order}_short", True
        if whole:
            order, layout["whole"] = f"{order}_whole", True
        # Blocks of neighbouring rows walk the same keys; over trees they gain nothing by it (docs/log.md).
        cluster = 2 if whole and plan.row_blocks(tokens * shape.group) % 2 == 0 else 1
        if cluster > 1:
            order, layout["cluster"] = f"{order}_c{cluster}", cluster
        return Variant(
            name=f"attention_group_{order}_{plan.row_warps}x{plan.groups}_u{plan.units}{_joined(joined)}",
            make=make_attention_group, constants={**shared, **layout}, parameters=taken + GROUP_PARAMETERS,
            threads=32 * (plan.row_warps * plan.groups + FETCHING_WARPS),
            shared_bytes=group_shared_bytes(shape, plan.row_warps, plan.groups, plan.units, plan.stages, tail),
            dependent=overlaps(arch), rounds_itself=True,
            instructions={"HGMMA": shape.dim // 8 + plan.units + 1, "UTMALDG": shape.dim // 32 // cluster},
            cluster=(cluster, 1, 1),
        )  # fmt: skip
    layout["held"] = held
    if plan.tiles < TILES:
        order, layout["tiles"] = f"{order}_t{plan.tiles}", plan.tiles
        # A tile's nodes all at once, but where two streams side by side, of two units a set, leave no registers for it;
        # elsewhere not tried.
        if arch == "sm_90a" and paths and shape.group <= 4 and (plan.groups == 1 or plan.units == 1):
            order, layout["abreast"] = f"{order}_a4", 4
    return Variant(
        name=f"attention_rows_{order}_{plan.row_warps}x{plan.groups}_u{plan.units}{_joined(joined)}",
        make=make_attention_rows,
        constants={**shared, **layout}, parameters=taken, threads=32 * plan.row_warps * plan.groups,
        shared_bytes=rows_shared_bytes(
            shape, plan.row_warps, plan.groups, plan.units, plan.stages, held, tail, plan.tiles
        ),
        dependent=overlaps(arch), rounds_itself=True,
        instructions={
            "HMMA": shape.dim // 4 * plan.tiles,
            "LDSM": (2 if shape.is_fp8 else 4) * shape.row_pieces,
            "LDGSTS": 4 * shape.row_pieces // plan.row_warps,
        },
    )  # fmt: skip


def _check_by_split(plan: Plan, shape: Shape, tokens: int) -> None:
    """Refuse what `attention_splits` is not made for.

    Raises:
        KernelLimit: see `attention_variant`.
    """
    is_made = plan.row_warps == 0 and plan.units == 1 and plan.run == shape.bundle and plan.stages >= 2
    if not (is_made and has_splits_kernel(shape, tokens)):
        raise KernelLimit(
            f"attention_splits with row_warps={plan.row_warps}, units={plan.units}, run={plan.run}, "
            f"stages={plan.stages} for {tokens * shape.group} rows",
            f"row_warps 0, one unit, run {shape.bundle}, 2 stages or more, at most 16 rows over a cache of 16 bits",
            "set by_split=False, or pass no plan",
        )


def _check_grouped(plan: Plan) -> None:
    """Refuse warps that are no warpgroups: they would wait for each other for ever.

    Raises:
        KernelLimit: see `attention_variant`.
    """
    warps = plan.row_warps * plan.groups
    is_made = plan.row_warps in (4, 8) and warps <= WARPS and plan.units * plan.groups == 4 and plan.stages >= 2
    if not is_made:
        raise KernelLimit(
            f"attention_group with row_warps={plan.row_warps}, groups={plan.groups}, units={plan.units}, "
            f"stages={plan.stages}",
            "row_warps 4 or 8, at most 8 with those of all groups, 4 units in all groups, 2 stages or more",
            "set grouped=False, or pass no plan",
        )


def combine_variant(arch: str, shape: Shape, *, joined: bool, ordered: bool = False) -> Variant:
    """The second kernel; `joined` if the first one joins the splits of bundles, `ordered` as in `combine`."""
    constants: dict[str, Any] = {"shape": shape, "joined": joined, "overlap": overlaps(arch)}
    constants |= {"ordered": True} if ordered else {}
    return Variant(
        name=f"attention_combine_{_shape_name(shape)}{_joined(joined)}{'_ordered' if ordered else ''}",
        make=make_attention_combine, constants=constants,
        parameters=FP8_COMBINE_PARAMETERS if shape.is_fp8 else COMBINE_PARAMETERS, threads=COMBINE_THREADS,
        instructions={"LDG": shape.splits // (shape.bundle if joined else 1)},
        # Of more splits a lane asks for two batches; without a limit the compiler holds both at once.
        max_registers=128 if shape.splits <= 16 else 168, blocks_per_sm=1 if shape.splits <= 16 else 3,
        dependent=overlaps(arch),
    )  # fmt: skip


def _shape_name(shape: Shape) -> str:
    stored = "_e4m3" if shape.is_fp8 else ""
    return f"{shape.dtype}{stored}_{shape.dim}_{shape.group}_{shape.splits}x{shape.streams}"


def _joined(joined: bool) -> str:
    return "_joined" if joined else ""
