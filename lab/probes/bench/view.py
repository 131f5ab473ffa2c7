"""The rows of the bench for notebook 41_bench: measured here or read from a file, and drawn.

The numbers of docs/requirements.md R-131 (`earlier.toml`) stand beside ours under the name of the GPU they came from.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import pyplot as plt

from lab.errors import ExperimentError, NotComparable
from lab.figures import HATCHES, INK, MEANINGS, SERIES, Drawing
from lab.night.experiment import Experiment
from lab.options.values import Point, read_points
from lab.pairs.planted import share_for_length
from lab.probes.bench import hf_generate
from lab.probes.bench.command import chosen_device, resolved_device
from lab.probes.bench.results import wrong_tokens
from lab.probes.bench.run import Bench, Tell
from lab.probes.bench.scenario import PEERS, Scenario
from lab.rows.committed import newest_committed
from lab.rows.store import Row, read_rows

FILE = "bench.jsonl"
NO_ROWS = f"no reports/reference/*/{FILE}; make one: eagle3lab bench --at 512x1 --spec 0,3 --out {FILE}"
EARLIER = Path(__file__).with_name("earlier.toml")
POINT = ("geometry", "context", "batch")
RATE = "decode_tokens_per_s"
OTHER_MACHINE = "another GPU"  # how the name in `EARLIER` begins


@dataclass(frozen=True)
class BenchRows:
    """Rows of one machine, and where they come from."""

    name: str
    rows: tuple[Row, ...]

    @property
    def machine(self) -> str:
        """GPU or CPU."""
        for row in self.rows:
            if row.status == "measured":
                return str(row.values.get("system.gpu_name") or row.values.get("system.cpu") or "unknown")
        return "nothing measured"

    def line(self) -> str:
        """For people."""
        return f"{self.name}: {self.machine}"


def measured(
    *, geometry: str, points: str, ks: Sequence[int], acceptance_length: float, peers: Sequence[str], tokens: int,
    rounds: int, warmup: int, device: str, tell: Tell = print,
) -> BenchRows:  # fmt: skip
    """Rows of the engine and its peers on this machine, fresh."""
    resolved = chosen_device(device, geometry)
    scenario = Scenario(
        geometry=geometry, pair="planted", points=read_points(points), ks=tuple(ks),
        share=share_for_length(min(acceptance_length, max(ks) + 1.0), max(ks)) if max(ks) else 1.0, tokens=tokens,
        rounds=rounds, warmup=warmup, dtype="bfloat16" if resolved == "cuda" else "float32", device=resolved,
        peers=tuple(peers),
    )  # fmt: skip
    return BenchRows("measured here", tuple(Bench(scenario, tell=tell).run().rows))


def with_hf(found: BenchRows | None, *, context: int, tokens: int, rounds: int, device: str) -> BenchRows:
    """The rows, and those of transformers' `generate` on the shipped pair."""
    more = hf_generate.measured(Point(context, 1), tokens=tokens, rounds=rounds, device=resolved_device(device))
    return BenchRows(found.name if found else "measured here", (*(found.rows if found else ()), *more))


def chosen(path: Path | None) -> BenchRows | None:
    """The rows of `path`, else of the newest committed file, else None.

    Raises:
        ExperimentError: the file has none.
        NotComparable: they come from several machines.
    """
    if path is None:
        path = newest_committed(FILE)
    if path is None:
        return None
    rows = list({row.key(): row for row in read_rows(path) if row.kind == "bench"}.values())
    if not rows:
        raise ExperimentError(f"{path.name} has no rows of the bench", "what `eagle3lab bench` writes", NO_ROWS)
    machines = sorted({row.environment for row in rows})
    if len(machines) > 1:
        raise NotComparable(
            f"{path.name} has rows of machines {', '.join(machines)}", "one", "keep them in files apart"
        )
    return BenchRows(f"{path.parent.name}/{path.name}", tuple(rows))


def write_rows(exp: Experiment, found: BenchRows | None) -> None:
    """The rows as the notebook's own."""
    if found is None:
        exp.missing("bench", "every scenario", NO_ROWS)
        return
    for row in found.rows:
        exp.carry(row)


def write_gates(exp: Experiment, found: BenchRows | None) -> None:
    """Wrong tokens fail; a row that is missing is not judged."""
    if found is None:
        exp.gate("tokens of every scenario", None, detail=NO_ROWS)
        return
    wrong = [f"{row.name}: {wrong_tokens(row.values)}" for row in found.rows if wrong_tokens(row.values)]
    engines = [row for row in found.rows if row.parameters.get("who") == "engine"]
    missing = [f"{row.name}: {row.reason}" for row in engines if row.status == "missing"]
    passed = False if wrong else None if missing or not engines else True
    detail = "; ".join([*wrong, *missing]) or f"{len(engines)} rows of the engine"
    exp.gate("tokens of every scenario", passed, value=len(wrong), threshold="at most 0", detail=detail)


# ---- Pictures. Tables name the machine of every number.


def rates_table(found: BenchRows) -> pd.DataFrame:
    """One line a row with right tokens: tokens_per_s and speedup decoding only, the latter with prefill beside it."""
    rows = [row for row in found.rows if row.status == "measured" and not wrong_tokens(row.values)]
    table = pd.DataFrame([_cells(row) for row in rows if row.values.get(RATE) is not None])
    return table if table.empty else table.sort_values([*POINT, "spec_k", "who"], ignore_index=True)


def _cells(row: Row) -> dict[str, Any]:
    where, of = row.parameters, row.values
    return {
        "geometry": where["geometry"], "context": where["context"], "batch": where["batch"],
        "spec_k": where["spec_k"], "who": who_of(row),
        "tokens_per_s": of[RATE], "p10": of.get(f"{RATE}_p10"), "p90": of.get(f"{RATE}_p90"),
        "speedup": of.get("speedup"), "with_prefill_speedup": of.get("with_prefill_speedup"),
        "acceptance_length": of.get("acceptance_length"),
    }  # fmt: skip


def who_of(row: Row) -> str:
    """The implementation, and how its drafts were accepted where that is not the target's choice."""
    rule = row.parameters.get("acceptance")
    return str(row.parameters["who"]) + (f", {rule}" if rule else "")


def rates(table: pd.DataFrame, source: str) -> Drawing:
    """Bars of tokens a second, a group a point and depth, a bar an implementation.

    Args:
        source: where the rows come from, for the caption.
    """
    keys = list(zip(*(table[name] for name in (*POINT, "spec_k")), strict=True))
    groups, n_geometries = list(dict.fromkeys(keys)), table["geometry"].nunique()
    names = list(dict.fromkeys(table["who"]))
    known = list(dict.fromkeys(["engine", *PEERS, *sorted(names)]))  # a colour each, whoever else is there
    looks = [MEANINGS[meaning] for meaning in ("ours", "plain", "other", "expected", "bound")]
    figure, axes = plt.subplots(figsize=(7.2, 0.32 * len(table) + 1.6))
    height = 0.8 / len(names)
    for number, who in enumerate(names):
        own = table[table["who"] == who]
        where = [groups.index(key) for key, one in zip(keys, table["who"], strict=True) if one == who]
        style = looks[known.index(who) % len(looks)]
        axes.barh(
            [place + height * number for place in where], own["tokens_per_s"], height=height * 0.9, label=who,
            color=SERIES[style][0], hatch=HATCHES[style],
        )  # fmt: skip
    labels = [
        f"{f'{geometry}, ' if n_geometries > 1 else ''}{context} × {batch}, {f'spec-{k}' if k else 'plain'}"
        for geometry, context, batch, k in groups
    ]
    axes.set_yticks([place + height * (len(names) - 1) / 2 for place in range(len(groups))], labels)
    axes.set(xlabel="tokens a second over the batch, median of the rounds")
    axes.set_title("Decoding by scenario")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.legend()
    best = table.loc[table["tokens_per_s"].idxmax()]
    alt = (
        f"Bars of tokens a second for {len(table)} rows. Highest: {best['who']} at {best['context']} x "
        f"{best['batch']}, "
        f"{best['spec_k']} drafts, {best['tokens_per_s']:.0f}."
    )
    return Drawing(figure, table, alt, f"Decoding only, every slot in use; {source}.")


def earlier_table(ours: pd.DataFrame, machine: str) -> pd.DataFrame:
    """Ours and another project's in one table: machine, geometry, context, batch, spec_k, tokens_per_s, against_plain.

    Ours is the speed-up of the row, within rounds; of theirs only rates are known, so theirs is a ratio of two.
    """
    told = tomllib.loads(EARLIER.read_text(encoding="utf-8"))
    lines = [
        {"machine": told["machine"], "geometry": "", "context": point["context"], "batch": point["batch"],
         "spec_k": int(k), "tokens_per_s": rate, "against_plain": rate / point["tokens_per_s"]["0"],
         "acceptance_length": point.get("acceptance_length", {}).get(k)}
        for point in told["point"] for k, rate in point["tokens_per_s"].items()
    ]  # fmt: skip
    engine = ours[ours["who"] == "engine"] if not ours.empty else ours
    for row in engine.to_dict("records"):
        plain = engine[(engine[list(POINT)] == [row[name] for name in POINT]).all(axis=1)]
        has_plain = (plain["spec_k"] == 0).any()
        ratio = (row["speedup"] if row["spec_k"] else 1.0) if has_plain else None
        kept = {key: row[key] for key in (*POINT, "spec_k", "tokens_per_s", "acceptance_length")}
        lines.append({"machine": machine, **kept, "against_plain": ratio})
    return pd.DataFrame(lines).astype({"acceptance_length": float, "against_plain": float})


def beside_earlier(table: pd.DataFrame, source: str) -> Drawing:
    """Speed against plain decoding over depth, one line a machine and point: ratios, as the machines are unlike."""
    figure, axes = plt.subplots()
    for (machine, geometry, context, batch), own in table.groupby(["machine", *POINT], sort=False):
        own = own[own["against_plain"].notna()].sort_values("spec_k")
        is_other = str(machine).startswith(OTHER_MACHINE)
        label = f"{'another GPU' if is_other else f'{machine}, {geometry}'}: {context} × {batch}"
        axes.plot(own["spec_k"], own["against_plain"], label=label, linestyle="--" if is_other else "-")
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set(xlabel="drafts a step, 0 is plain decoding", ylabel="tokens a second over plain decoding", ylim=(0, None))
    axes.set_title("Beside another project's numbers, on another GPU")
    axes.legend(fontsize="small", loc="upper left")
    is_other = table["machine"].str.startswith(OTHER_MACHINE)
    alt = (
        "Lines of speed over plain decoding by depth, the other project's dashed. Ours reaches "
        f"{table[~is_other]['against_plain'].max():.2f}, theirs {table[is_other]['against_plain'].max():.2f}."
    )
    caption = (
        "Dashed: another project, on an sm_120 workstation card; ratios of its published rates. Ours are medians over "
        f"rounds of the ratio within a round, decoding only: {source}."
    )
    return Drawing(figure, table, alt, caption)
