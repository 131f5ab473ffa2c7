"""Pictures of the kernels, each with the table it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lab.figures import MARKERS, SERIES, Drawing, colour_of
from lab.probes.kernels.on_cpu import CompiledVariant
from lab.probes.kernels.roofline import (
    PASS_US,
    SLACK,
    Cell,
    allowed_us,
    case_text,
    geometric_mean,
    peer_ratio,
)
from lab.probes.kernels.rows import Bench

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#7a7b7c"
_FEW_ROWS = 8  # rows of x up to which a GEMM is all weights


def cells_table(bench: Bench) -> pd.DataFrame:
    """One row a timed shape."""
    rows = []
    for op in ops_of(bench):
        for cell in bench.of(op):
            best = cell.best_peer
            rows.append(
                {
                    "op": op, "shape": case_text(cell.shape), "us": cell.us, "floor_us": cell.floor_us,
                    "share_of_floor": cell.share, "gb_per_s": cell.gb_per_s, "bytes": cell.bytes,
                    "passes": cell.dependent_passes, "over_bytes_and_passes": over_floor(cell, bench.held_to_gb_per_s),
                    "best_library": best, "library_us": cell.peers[best] if best else None,
                    "time_over_library": peer_ratio(cell),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def ops_of(bench: Bench) -> list[str]:
    """Ops with a timed shape: the two large ones first, then by name."""
    found = sorted({cell.op for cell in bench.cells})
    return sorted(found, key=lambda op: op not in ("gemm", "attention"))


def over_floor(cell: Cell, gb_per_s: float | None) -> float | None:
    """Time over what bytes at a read rate and dependent passes take; None without a rate."""
    return None if gb_per_s is None else cell.us * SLACK / allowed_us(cell.bytes, cell.dependent_passes, gb_per_s)


def roofline(bench: Bench) -> Drawing:
    """Bytes a second of every timed shape against its bytes, and every card's time over its bytes and passes."""
    from matplotlib import pyplot as plt

    ops = ops_of(bench)
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, max(3.8, 1.5 + 0.22 * len(ops))), width_ratios=(3, 2))
    _rates(left, bench, ops)
    _over(right, bench, ops)
    table = cells_table(bench)
    worst = table.loc[table["over_bytes_and_passes"].idxmax()]
    alt = (
        f"Roofline of {table['op'].nunique()} op cards on {bench.gpu}. Highest rate {table['gb_per_s'].max():.0f} "
        "GB/s. "
        f"Furthest from its floor: {worst['op']} ({worst['shape']}), {worst['over_bytes_and_passes']:.2f} times."
    )
    return Drawing(fig, table, alt, f"Medians of CUDA-graph replays over rotated buffers. {bench.line()}.")


def _rates(axes: Axes, bench: Bench, ops: Sequence[str]) -> None:
    groups = {op: [op] for op in ops if op in ("gemm", "attention")}
    groups |= {"other cards": [op for op in ops if op not in groups]} if len(groups) < len(ops) else {}
    sizes = [cell.bytes for cell in bench.cells]
    x = np.geomspace(min(sizes) / 2, max(sizes) * 2, 200)
    if bench.held_to_gb_per_s is not None:
        ceiling = max(bench.held_to_gb_per_s, bench.gb_per_s or 0.0)
        axes.plot(
            x, np.full_like(x, ceiling), color=GREY, linestyle="-", marker="", label=f"{ceiling:.0f} GB/s, memory"
        )
        latency = x / (x / bench.held_to_gb_per_s / 1e3 + PASS_US) / 1e3
        axes.plot(x, latency, color=GREY, linestyle=":", marker="", label=f"memory and one pass of {PASS_US} us")
    for index, (label, members) in enumerate(groups.items()):
        cells = [cell for op in members for cell in bench.of(op)]
        axes.plot(
            [cell.bytes for cell in cells], [cell.gb_per_s for cell in cells], linestyle="none",
            marker=MARKERS[index], color=SERIES[index][0], markersize=4, alpha=0.8, label=label,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="bytes that must move", ylabel="GB/s reached")
    axes.set_title(f"Roofline, {bench.gpu or 'unknown GPU'}")
    axes.legend(fontsize=8.5, loc="lower right")


def _over(axes: Axes, bench: Bench, ops: Sequence[str]) -> None:
    for y, op in enumerate(ops):
        values = [over for cell in bench.of(op) if (over := over_floor(cell, bench.held_to_gb_per_s)) is not None]
        axes.plot(values, [y] * len(values), linestyle="none", marker="|", color=colour_of("ours"), markersize=8)
    axes.axvline(1.0, color=GREY, linestyle="-")
    axes.axvline(SLACK, color=colour_of("bound"), linestyle="--")
    axes.annotate(f"{SLACK:g} allowed", (SLACK, -0.7), xytext=(3, 0), textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(ops)), ops, fontsize=8.5)
    axes.set_ylim(len(ops) - 0.5, -1.0)
    axes.set_xlabel(f"time over bytes + {PASS_US} us a pass")
    axes.set_title("Every shape of every card")


def peer_table(bench: Bench, op: str) -> pd.DataFrame:
    """Our time over the best library's, by group of shapes; a group with a missing library has no ratio."""
    groups: dict[str, list[Cell]] = {}
    for cell in bench.of(op):
        groups.setdefault(_group(cell), []).append(cell)
    rows = []
    for name, cells in groups.items():
        ratios = [ratio for cell in cells if (ratio := peer_ratio(cell)) is not None]
        whole = len(ratios) == len(cells)
        rows.append(
            {
                "shapes": name, "time_over_library": geometric_mean(ratios) if whole else None,
                "best": min(ratios, default=None), "worst": max(ratios, default=None), "cells": len(cells),
                "cells_without_library": len(cells) - len(ratios),
                "libraries": ", ".join(dict.fromkeys(cell.best_peer or "none" for cell in cells)),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _group(cell: Cell) -> str:
    shape = dict(cell.shape)
    if cell.op == "gemm":
        return f"{shape.get('n')} x {shape.get('k')}, M {'<=' if shape.get('m', 0) <= _FEW_ROWS else '>'} {_FEW_ROWS}"
    names = [name for name in ("dim", "heads", "batch", "kv", "tokens") if name in shape]
    return case_text({name: shape[name] for name in names}) if names else case_text(shape)


def peers(bench: Bench, op: str) -> Drawing:
    """Bars of our time over the best library's, by shape; below 1 is faster than every library."""
    from matplotlib import pyplot as plt

    table = peer_table(bench, op)
    fig, axes = plt.subplots(figsize=(7.2, 1.4 + 0.23 * len(table)))
    for y, row in enumerate(table.to_dict("records")):
        ratio = row["time_over_library"]
        if pd.isna(ratio):
            axes.annotate("missing", (0, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        axes.barh(y, ratio, height=0.7, color=colour_of("ours" if ratio <= 1 else "bad"), alpha=0.75)
        axes.hlines(y, row["best"], row["worst"], color=GREY, linewidth=2)
        axes.annotate(f"{ratio:.2f}", (max(ratio, row["worst"]), y), xytext=(3, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    axes.axvline(1.0, color=GREY, linestyle="-")
    axes.set_yticks(range(len(table)), list(table["shapes"]), fontsize=8)
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.set_xlabel("time over the best library's in the same run")
    axes.set_title(f"{op} beside libraries, {bench.gpu}")
    known = table["time_over_library"].dropna()
    spans = f"{known.min():.2f} to {known.max():.2f}" if len(known) else "nothing complete"
    alt = f"Bars of the time of {op} over the best library's by shape: {spans}; below 1 is faster."
    caption = f"{len(table) - len(known)} of {len(table)} bars are missing. {bench.line()}."
    return Drawing(fig, table, alt, caption)


def compiled_table(found: Sequence[CompiledVariant]) -> pd.DataFrame:
    """One row a variant and architecture."""
    rows: list[dict[str, Any]] = []
    for one in found:
        held = one.occupancy
        rows.append(
            {
                "op": one.op, "variant": one.variant, "arch": one.arch,
                "registers": None if one.missing else one.registers,
                "threads": None if one.missing else one.threads,
                "shared_bytes": None if one.missing else one.shared_bytes,
                "blocks_a_processor": held.blocks if held else None, "occupancy": held.share if held else None,
                "limited_by": held.limit if held else None,
                "state": one.missing or "; ".join(one.faults) or "no faults",
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def registers(found: Sequence[CompiledVariant]) -> Drawing:
    """Registers and occupancy by architecture, for each card's variant with the most registers there."""
    from matplotlib import pyplot as plt

    there = [one for one in found if not one.missing]
    ops, arches = list(dict.fromkeys(one.op for one in there)), list(dict.fromkeys(one.arch for one in there))
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 1.9 + 0.24 * len(ops)), sharey=True)
    for index, arch in enumerate(arches):
        widest: dict[str, CompiledVariant] = {}
        for one in (one for one in there if one.arch == arch):
            if one.op not in widest or one.registers > widest[one.op].registers:
                widest[one.op] = one
        ys = [ops.index(op) + 0.16 * (index - (len(arches) - 1) / 2) for op in widest]
        look = {"linestyle": "none", "marker": MARKERS[index], "color": SERIES[index][0], "label": arch}
        left.plot([one.registers for one in widest.values()], ys, **look)
        right.plot([one.occupancy.share if one.occupancy else 0.0 for one in widest.values()], ys, **look)
    left.set_yticks(range(len(ops)), ops, fontsize=8.5)
    left.set_ylim(len(ops) - 0.4, -0.6)
    left.set(xlabel="registers a thread", xlim=(0, 256), title="Registers")
    right.set(xlabel="resident warps over most possible", xlim=(0, 1.05), title="Occupancy")
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(arches), fontsize=8.5)
    table = compiled_table(found)
    alt = (
        f"Registers and occupancy by card and architecture. Most registers: {table['registers'].max():.0f}; lowest "
        f"occupancy: {table['occupancy'].min():.0%}."
    )
    caption = "Compiled here for every architecture, no GPU needed; of each card the variant with the most registers."
    return Drawing(fig, table, alt, caption)
