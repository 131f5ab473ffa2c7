"""What a reader must not overlook though every gate held: a draft that slows decoding, or whose tokens are refused, and
times that a disturbed machine gave.

Gates judge whether results are right; a pair may be right and useless. Notices come from the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.rows.store import Row

FEW = 0.05  # share of first drafts accepted, below which a draft is as good as none
# Rounds of one mode whose 10th and 90th percentile lie further apart than this share of their median were disturbed; in
# the packaged night whose rows are committed (reports/reference/h200/night) they lie at most 28% apart.
DISTURBED = 0.30
_RATE = "decode_tokens_per_s"


@dataclass(frozen=True)
class Notice:
    """A sentence for the verdict, and the job whose rows say so."""

    sentence: str
    job: str


def notices_of(rows: list[Row]) -> list[str]:
    """Sentences for the verdict and the head of the page, none where speculation pays and the rounds agree."""
    measured = [row for row in rows if row.status == "measured"]
    rules: Sequence[Callable[[list[Row]], Notice | None]] = (slow, refused, disturbed)
    return [notice.sentence for rule in rules if (notice := rule(measured)) is not None]


def slow(rows: list[Row]) -> Notice | None:
    """Of the pair that was decoded: depths that are slower than plain decoding in nine rounds of ten."""
    depths = [row for row in rows if row.kind == "decode" and row.number("speedup") is not None]
    slow = [row for row in depths if (row.number("speedup_p90") or _need(row, "speedup")) < 1.0]
    if not slow:
        return None
    told = " and ".join(f"{row.name} {_times(row)}" for row in slow)
    every = "at every depth measured" if len(slow) == len(depths) else f"at {len(slow)} of {len(depths)} depths"
    sentence = f"speculation slows this pair {every}: {told} times as fast as plain decoding"
    return Notice(sentence, slow[0].job)


def _times(row: Row) -> str:
    low, high = row.number("speedup_p10"), row.number("speedup_p90")
    span = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    return f"{_need(row, 'speedup'):.2f}{span}"


def refused(rows: list[Row]) -> Notice | None:
    """A draft whose first token is hardly ever accepted, told of the first depth that shows it."""
    for row in rows:
        shares = row.values.get("acceptance_by_position") if row.kind == "acceptance" else None
        if isinstance(shares, list) and shares and float(shares[0]) < FEW:
            told = f"the target refuses {1 - float(shares[0]):.0%} of the first drafted tokens ({row.name})"
            return Notice(f"{told}, so this draft brings nothing", row.job)
    return None


def disturbed(rows: list[Row]) -> Notice | None:
    """Rounds of decoding that differ too much to be one machine's speed; told of the widest."""
    spreads = {row.name: (spread, row) for row in rows if (spread := spread_of(row)) is not None and spread > DISTURBED}
    if not spreads:
        return None
    widest, row = max(spreads.values(), key=lambda one: one[0])
    low, high = (_need(row, f"{_RATE}_{end}") for end in ("p10", "p90"))
    others = f", and {len(spreads) - 1} more over {DISTURBED:.0%}" if len(spreads) > 1 else ""
    return Notice(
        f"the run was disturbed: rounds of {row.name} spread over {widest:.0%} of their median ({low:.3g} to "
        f"{high:.3g} tokens a second{others}), so its times are rough",
        row.job,
    )


def spread_of(row: Row) -> float | None:
    """From the 10th to the 90th percentile of the rounds' decoding speed, over the median; None for other rows."""
    if row.kind not in ("decode", "bench") or not row.number(_RATE):
        return None
    low, high = row.number(f"{_RATE}_p10"), row.number(f"{_RATE}_p90")
    return None if low is None or high is None else (high - low) / _need(row, _RATE)


def _need(row: Row, name: str) -> float:
    value = row.number(name)
    assert value is not None, f"{row.name} was chosen for its {name}"
    return value
