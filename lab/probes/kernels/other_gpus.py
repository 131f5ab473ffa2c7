"""The roofline of a GPU that may be chosen: of one that was measured its rows, of another what its memory allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from lab.figures import Drawing, colour_of
from lab.probes.ceilings import STATED_GB_PER_S
from lab.probes.kernels.pictures import ops_of, roofline
from lab.probes.kernels.roofline import PASS_US, case_text, floor_us
from lab.probes.kernels.rows import Bench, read_bench, reference_files
from lab.widgets import Control, Picker

MEASURED, STATED = "measured", "not measured"


def known_benches(chosen: Bench) -> list[Bench]:
    """The chosen rows, and those committed of other GPUs."""
    others = [read_bench(path) for path in reference_files()]
    return list({bench.gpu: bench for bench in [*others, chosen] if bench.cells}.values())


def gpu_controls(benches: Sequence[Bench], chosen: Bench) -> dict[str, Control]:
    """The GPUs whose roofline may be seen; at first the one whose rows were chosen."""
    measured = [_measured(bench) for bench in benches]
    stated = [f"{gpu}, {STATED}" for gpu in STATED_GB_PER_S if not any(gpu in bench.gpu for bench in benches)]
    return {"gpu": Picker("GPU", (*measured, *stated), _measured(chosen))}


def _measured(bench: Bench) -> str:
    return f"{bench.gpu or 'unknown GPU'}, {MEASURED}"


def roofline_of(benches: Sequence[Bench], chosen: Bench, *, gpu: str) -> Drawing:
    """The measured roofline of a GPU, or what the shapes of the chosen rows could reach on one that has no rows.

    Args:
        gpu: one of `gpu_controls`.
    """
    for bench in benches:
        if gpu == _measured(bench):
            return roofline(bench)
    name = gpu.removesuffix(f", {STATED}")
    return _expected(chosen, name, STATED_GB_PER_S[name])


def _expected(bench: Bench, gpu: str, gb_per_s: float) -> Drawing:
    """Of every shape the rate at which its bytes and passes would be done there, beside the rate measured elsewhere."""
    from matplotlib import pyplot as plt

    table = expected_table(bench, gb_per_s)
    fig, axes = plt.subplots(figsize=(7.2, 4.6))
    faint = {"linestyle": "none", "markersize": 4}
    axes.plot(table["bytes"], table["measured_gb_per_s"], marker="s", color=colour_of("other"), alpha=0.5,
              label=f"measured on {bench.gpu}", **faint)  # fmt: skip
    axes.plot(table["bytes"], table["expected_gb_per_s"], marker="D", color=colour_of("expected"),
              label=f"the most there can be on {gpu}", **faint)  # fmt: skip
    axes.axhline(gb_per_s, color=colour_of("bound"), linestyle="--", label=f"{gb_per_s:.0f} GB/s, stated")
    axes.set(xscale="log", yscale="log", xlabel="bytes that must move", ylabel="GB/s")
    axes.set_title(f"Roofline expected of {gpu}")
    axes.legend(fontsize=8.5, loc="lower right")
    gain = math.exp((table["expected_gb_per_s"] / table["measured_gb_per_s"]).map(math.log).mean())
    words = (
        f"Nothing was measured on {gpu}: at its stated {gb_per_s:.0f} GB/s and {PASS_US} us a pass, as on the GPU "
        "measured, "
        f"the {len(table)} shapes would take 1/{gain:.2f} of their times on {bench.gpu} at the least, geometric mean."
    )
    return Drawing(fig, table, words, f"{words} {bench.line()}.")


def expected_table(bench: Bench, gb_per_s: float) -> pd.DataFrame:
    """One row a timed shape: what it took, and what bytes at a rate and passes would take at the least."""
    rows = []
    for op in ops_of(bench):
        for cell in bench.of(op):
            least = floor_us(cell.bytes, gb_per_s) + PASS_US * cell.dependent_passes
            rows.append({
                "op": op, "shape": case_text(cell.shape), "bytes": cell.bytes, "measured_us": cell.us,
                "least_us": least, "measured_gb_per_s": cell.gb_per_s, "expected_gb_per_s": cell.bytes / least / 1e3,
            })  # fmt: skip
    return pd.DataFrame(rows)
