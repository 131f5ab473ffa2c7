"""Pictures of a profile, each with the table it was drawn from."""

from __future__ import annotations

import pandas as pd

from lab.figures import Drawing, colour_of
from lab.probes.profiles.ranges import OUTSIDE, STEP
from lab.probes.profiles.rows import ProfileRows
from lab.probes.proofs.gpu_trace import StepCounts

MOST_KERNELS = 12  # of a range's table of kernels


def time_table(rows: ProfileRows) -> pd.DataFrame:
    """One row a range: its time, how much of the step that is, kernels, bytes and rates."""
    step_us = rows.ranges[STEP]["time_us"]
    made = []
    for name, of in rows.ranges.items():
        made.append({
            "range": name, "level": of["level"], "time_us": of["time_us"],
            "share_of_step": of["time_us"] / step_us if step_us else None, "calls": of["calls"],
            "host_us": of["host_us"], "kernels": of["n_kernels"], "torch_operations": of["n_ops"], "bytes": of["bytes"],
            "gb_per_s": of["gb_per_s"], "dram_gb_per_s_ncu": of["dram_gb_per_s"], "occupancy_ncu": of["occupancy"],
        })  # fmt: skip
    return pd.DataFrame(made)


def time_per_range(rows: ProfileRows) -> Drawing:
    """Bars of a step's time by public range, and beside them by stage; number at a bar: its kernels."""
    from matplotlib import pyplot as plt

    shown = [(level, rows.of(level)) for level in ("range", "stage") if rows.of(level)]
    n = max((len(of) for _, of in shown), default=1)
    fig, axes = plt.subplots(1, max(len(shown), 1), figsize=(9.6, 1.4 + 0.34 * n), squeeze=False)
    for (level, of), one in zip(shown, axes[0], strict=True):
        names = list(of)
        times = [of[name]["time_us"] for name in names]
        one.barh(range(len(names)), times, color=colour_of("ours"))
        for y, name in enumerate(names):
            count = of[name]["n_kernels"] if rows.on_gpu else of[name]["n_ops"]
            one.text(times[y], y, f" {count:.0f}" if count is not None else "", va="center", fontsize=8)
        one.set_yticks(range(len(names)), names, fontsize=8)
        one.invert_yaxis()
        one.margins(x=0.12)
        one.set_xlabel("us a step")
        one.set_title("public ranges" if level == "range" else "stages")
    words = time_words(rows)
    alt = f"Bars of the time a step spends in each range. {words}"
    return Drawing(fig, time_table(rows), alt, f"{words} {rows.line()}.")


def time_words(rows: ProfileRows) -> str:
    """What takes most of a step, in a sentence."""
    ranges, step_us = rows.of("range"), rows.ranges[STEP]["time_us"]
    what = "the GPU's time" if rows.on_gpu else "the host's time, which is a CPU's only one"
    if not ranges or not step_us:
        return "The capture holds no public range."
    name = max(ranges, key=lambda one: ranges[one]["time_us"])
    share = ranges[name]["time_us"] / step_us
    outside = rows.ranges.get(OUTSIDE, {}).get("time_us") or 0.0
    rest = f"; kernels outside every range {outside:.0f} us" if rows.on_gpu else ""
    counted = "kernels" if rows.on_gpu else "torch operations"
    return f"{name} takes {share:.0%} of a step of {step_us:.0f} us ({what}){rest}. A number at a bar counts {counted}."


def rates(rows: ProfileRows) -> Drawing | None:
    """Bars of bandwidth by stage, declared bytes over time and as Nsight Compute counted it; occupancy beside them.

    None where no stage has a rate.
    """
    from matplotlib import pyplot as plt

    of = {name: one for name, one in rows.of("stage").items() if one["gb_per_s"] or one["dram_gb_per_s"]}
    if not of:
        return None
    has_counters = any(one["occupancy"] is not None for one in of.values())
    fig, axes = plt.subplots(1, 1 + has_counters, figsize=(9.6, 1.6 + 0.36 * len(of)), squeeze=False)
    left, places = axes[0][0], range(len(of))
    left.barh([y - 0.2 for y in places], [one["gb_per_s"] or 0 for one in of.values()], 0.38,
              color=colour_of("ours"), label="declared bytes over time")  # fmt: skip
    if has_counters:
        left.barh([y + 0.2 for y in places], [one["dram_gb_per_s"] or 0 for one in of.values()], 0.38,
                  color=colour_of("other"), label="DRAM, by ncu")  # fmt: skip
        right = axes[0][1]
        right.barh(places, [100 * (one["occupancy"] or 0) for one in of.values()], color=colour_of("ours"))
        right.set_xlabel("% of the warps there can be, by ncu")
        right.set_yticks(places, list(of), fontsize=8)
        right.set_title("Occupancy")
        right.invert_yaxis()
    left.set_yticks(places, list(of), fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("GB/s")
    left.set_title("Bandwidth")
    left.legend(fontsize=8)
    table, words = time_table(rows).query("level == 'stage'").reset_index(drop=True), rate_words(rows)
    return Drawing(fig, table, f"Bars of bandwidth by stage. {words}", f"{words} {rows.line()}.")


def rate_words(rows: ProfileRows) -> str:
    """The fastest and the slowest stage, and what ncu did not say."""
    of = {name: one["gb_per_s"] for name, one in rows.of("stage").items() if one["gb_per_s"]}
    if not of:
        return "No stage has both declared bytes and a time."
    high, low = max(of, key=lambda name: of[name]), min(of, key=lambda name: of[name])
    text = f"Highest: {high}, {of[high]:.3g} GB/s of declared bytes; lowest: {low}, {of[low]:.3g} GB/s."
    reason = next((why for what, why in rows.missing.items() if "occupancy" in what), None)
    return f"{text} Occupancy is missing: {reason}." if reason else text


def kernel_table(rows: ProfileRows) -> pd.DataFrame:
    """One row a stage and kernel: how often it ran, and how long each run took; the longest first."""
    made = []
    for name, of in rows.of("stage").items():
        runs = zip(of["kernel_names"], of["kernel_runs"], of["kernel_us_each"], strict=True)
        for kernel, n, us in list(runs)[:MOST_KERNELS]:
            made.append({"range": name, "kernel": kernel, "runs_a_step": n / rows.n_steps, "us_each": us})
    return pd.DataFrame(made, columns=["range", "kernel", "runs_a_step", "us_each"])


def quiet_table(rows: ProfileRows) -> pd.DataFrame:
    """One row a range: waits, copies and allocations over all steps."""
    counts = list(StepCounts.__dataclass_fields__)
    made = [{"range": name, **{c: of[f"n_{c}_all_steps"] for c in counts}} for name, of in rows.ranges.items()]
    return pd.DataFrame(made, columns=["range", *counts])


def quiet_words(rows: ProfileRows) -> str:
    """Whether any range waited or copied, in a sentence."""
    if not rows.on_gpu:
        return "Nothing to wait for: the steps ran on a CPU."
    inside = {
        name: {c: of[f"n_{c}_all_steps"] for c in StepCounts.__dataclass_fields__}
        for name, of in rows.of("range", "stage").items()
    }
    loud = {name: {c: n for c, n in counts.items() if n} for name, counts in inside.items()}
    loud = {name: counts for name, counts in loud.items() if counts}
    waits = rows.ranges[STEP]["n_event_waits_all_steps"]
    if not loud:
        return f"Inside ranges nothing waited, copied or allocated in {rows.n_steps} steps; {waits} waits for results."
    words = "; ".join(f"{name}: {', '.join(f'{n} {c}' for c, n in counts.items())}" for name, counts in loud.items())
    return f"Loud ranges in {rows.n_steps} steps: {words}."


def n_loud(rows: ProfileRows) -> int:
    """Waits, copies and allocations inside public ranges, over all steps."""
    counts = StepCounts.__dataclass_fields__
    return sum(int(of[f"n_{c}_all_steps"]) for of in rows.of("range").values() for c in counts)
