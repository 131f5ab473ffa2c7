"""What a reader must not overlook though every gate held: a draft that slows decoding, or whose tokens are refused.

Gates judge whether results are right; a pair may be right and useless. Notices come from the rows alone.
"""

from __future__ import annotations

from lab.rows.store import Row

FEW = 0.05  # share of first drafts accepted, below which a draft is as good as none


def notices_of(rows: list[Row]) -> list[str]:
    """Sentences for the verdict and the head of the page, none where speculation pays."""
    measured = [row for row in rows if row.status == "measured"]
    return [*_slow(measured), *_refused(measured)]


def _slow(rows: list[Row]) -> list[str]:
    """Of the pair that was decoded: depths that are slower than plain decoding in nine rounds of ten."""
    depths = [row for row in rows if row.kind == "decode" and row.number("speedup") is not None]
    slow = [row for row in depths if (row.number("speedup_p90") or _need(row, "speedup")) < 1.0]
    if not slow:
        return []
    told = " and ".join(f"{row.name} {_times(row)}" for row in slow)
    every = "at every depth measured" if len(slow) == len(depths) else f"at {len(slow)} of {len(depths)} depths"
    return [f"speculation slows this pair {every}: {told} times as fast as plain decoding"]


def _times(row: Row) -> str:
    low, high = row.number("speedup_p10"), row.number("speedup_p90")
    span = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    return f"{_need(row, 'speedup'):.2f}{span}"


def _refused(rows: list[Row]) -> list[str]:
    """A draft whose first token is hardly ever accepted, told of the first depth that shows it."""
    for row in rows:
        shares = row.values.get("acceptance_by_position") if row.kind == "acceptance" else None
        if isinstance(shares, list) and shares and float(shares[0]) < FEW:
            told = f"the target refuses {1 - float(shares[0]):.0%} of the first drafted tokens ({row.name})"
            return [f"{told}, so this draft brings nothing"]
    return []


def _need(row: Row, name: str) -> float:
    value = row.number(name)
    assert value is not None, f"{row.name} was chosen for its {name}"
    return value
