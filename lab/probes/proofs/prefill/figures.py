"""How long prompts take to be read, drawn beside what bounds them and beside plain torch; and the limits of a night."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lab.figures import Drawing, colour_of
from lab.night.experiment import Experiment
from lab.probes.proofs.check import KIND
from lab.probes.proofs.prefill.checks import PART
from lab.rows.committed import newest_committed
from lab.rows.store import Row, read_rows

FILE = "prefill.jsonl"
NO_ROWS = f"no reports/reference/*/{FILE}; make one on a GPU: eagle3lab prove prefill --out {FILE}"


@dataclass(frozen=True)
class Limits:
    """The most milliseconds to the last first token, by load; 0 sets none.

    Attributes:
        short: one prompt of up to 64 tokens. middle: one of 512. long: one of 32768. together: four of 16384.
        least_rate: of many short prompts' tokens a second over those of one long prompt.
    """

    short: float = 0.0
    middle: float = 0.0
    long: float = 0.0
    together: float = 0.0
    least_rate: float = 0.0

    def of(self, n: int, tokens: int) -> float:
        """The limit of `n` prompts of so many tokens; 0 where there is none."""
        if n == 1 and tokens <= 64:
            return self.short
        return {(1, 512): self.middle, (1, 32768): self.long, (4, 16384): self.together}.get((n, tokens), 0.0)


def chosen(path: Path | None) -> list[Row]:
    """The rows about prefill in a file, else in the newest committed one; of several of one check the last."""
    found = path or newest_committed(FILE)
    rows = read_rows(found) if found is not None else []
    return list({row.name: row for row in rows if row.kind == KIND and row.name.startswith(f"{PART}/")}.values())


def loads_of(rows: Sequence[Row]) -> list[Row]:
    """Rows of loads that were measured, shortest prompt first."""
    found = [row for row in rows if row.number("first_token_ms") is not None]
    return sorted(found, key=lambda row: (_count(row, "tokens"), _count(row, "n")))


def load_name(row: Row) -> str:
    """How many prompts of how many tokens a row is about."""
    return f"{_count(row, 'n')} x {_count(row, 'tokens')}"


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    """One line a load: milliseconds to the last first token, of the passes, of the bound and of plain torch; rates."""
    return pd.DataFrame(
        {
            "prompts": load_name(row), "first token, ms": row.number("first_token_ms"),
            "passes, ms": row.number("device_ms"), "bound, ms": row.number("bound_ms"),
            "plain torch, ms": row.number("peer_ms"), "passes": row.number("n_passes"),
            "tokens a second": row.number("tokens_per_s"), "TFLOP/s": row.number("tflop_per_s"),
        }
        for row in rows
    )  # fmt: skip


def first_tokens(rows: Sequence[Row], limits: Limits, source: str) -> Drawing:
    """First tokens of loads, a line each, with bound, plain torch and limit marked.

    Args:
        rows: of `loads_of`, at least one. source: where they come from, for the caption.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(7.2, 1.9 + 0.42 * len(rows)))
    marks = {"bound_ms": ("bound", "o", "bound"), "peer_ms": ("plain torch", "s", "plain")}
    for y, row in enumerate(rows):
        first = row.number("first_token_ms") or 0.0
        axes.barh(y, first, height=0.6, color=colour_of("ours"), label="first token" if y == 0 else None)
        for value, (label, marker, meaning) in marks.items():
            if (at := row.number(value)) is not None:
                style = {"marker": marker, "linestyle": "", "color": colour_of(meaning), "markeredgecolor": "white"}
                axes.plot([at], [y], label=label if y == 0 else None, **style)
        limit = limits.of(_count(row, "n"), _count(row, "tokens"))
        if limit:
            axes.plot([limit, limit], [y - 0.4, y + 0.4], linestyle=":", marker="", color=colour_of("bad"))
    names = [f"{load_name(row)}: {row.number('first_token_ms'):.1f} ms" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xscale="log", xlabel="ms from the prompts' arrival to the last one's first token (dotted: limit)")
    axes.grid(visible=False, axis="y")
    axes.set_title("How long prompts take to be read")
    fig.legend(loc="outside lower center", ncols=3)
    words = words_of(rows)
    alt = f"First tokens of {len(rows)} loads beside their bounds and plain torch, in milliseconds. {words}"
    return Drawing(fig, table_of(rows), alt, f"{words} {source}.")


def words_of(rows: Sequence[Row]) -> str:
    """The load furthest above its bound, and the one furthest behind plain torch if any is, in sentences."""
    far = max(rows, key=lambda row: row.number("over_bound") or 0.0)
    text = f"{load_name(far)} tokens take {far.number('over_bound') or 0.0:.2f} of what bytes and products ask for."
    behind = [row for row in rows if (row.number("over_peer") or 0.0) > 1]
    if behind:
        slow = max(behind, key=lambda row: row.number("over_peer") or 0.0)
        text += f" Plain torch is faster at {len(behind)} loads, most at {load_name(slow)}."
    return text


def write_gates(exp: Experiment, rows: Sequence[Row], limits: Limits) -> None:
    """Each load against its limit, the rate of many short prompts, and tokens and bits wherever they were looked at."""
    for row in rows:
        rated, sized = "rated" in row.parameters, "sizes" in row.parameters
        if rated and limits.least_rate > 0:
            _gate(exp, row, "rate of many short prompts", "rate_ratio", least=limits.least_rate)
        if sized:
            _gate(exp, row, "bits of every size of pass, that differ", "n_differing", most=0)
        if rated or sized or "tokens" not in row.parameters:
            continue
        if limit := limits.of(_count(row, "n"), _count(row, "tokens")):
            _gate(exp, row, f"first token, {load_name(row)}, ms", "first_token_ms", most=limit)
        _gate(exp, row, f"prompts with other tokens, {load_name(row)}", "n_differing_prompts", most=0)
    if not any("tokens" in row.parameters for row in rows) and limits != Limits():
        why = next((row.reason for row in rows if row.reason), None)
        exp.gate("first token of prompts", None, detail=why or "no prompt was read")


def _gate(
    exp: Experiment, row: Row, name: str, value: str, *, most: float | None = None, least: float | None = None
) -> None:
    """One value of a row against a limit: missing where the row is, and failed where its check ended without it."""
    got, passed = row.number(value), None
    if row.status == "measured":
        passed = got is not None and (most is None or got <= most) and (least is None or got >= least)
    threshold = most if least is None else least
    exp.gate(name, passed, value=got, threshold=threshold, detail=row.reason or str(row.values.get("detail", "")))


def _count(row: Row, name: str) -> int:
    """A count among a row's parameters; 0 where it has none."""
    value = row.parameters.get(name)
    return value if isinstance(value, int) else 0
