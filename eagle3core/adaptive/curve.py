"""What a step takes, by its drafts, its rows and the tokens in the caches: measured beforehand, corrected by steps.

Before the first request only steps over empty slots can be timed, which leaves out attention; what attention adds is
nearly the same at every depth, since each reads the same keys once. So one depth's correction serves the others until
they have run themselves. Source: derived here.
"""

from __future__ import annotations

from collections.abc import Mapping

NEAR = 0.1  # of a new time in the mean: about the last ten count
OUTLIER = 2.0  # a time so many times the expected one, or the inverse, counts as that: the host was late, not the step
UNMEASURED = 0.06  # of a plain step a draft, where nothing was measured: a chain of the 8B pair on an H200 takes that
TOKENS = 512  # in the caches up to here, and up to each doubling, count as one


class StepCurve:
    """Microseconds of a step.

    Args:
        base: by (drafts, rows): of steps over empty slots. Whatever is missing is filled in from what is there.
    """

    def __init__(self, base: Mapping[tuple[int, int], float] | None = None) -> None:
        self._base = dict(base or {})
        self._seen: dict[tuple[int, int, int], tuple[float, int]] = {}  # mean and number, by drafts, rows and context

    def time_us(self, depth: int, rows: int, context: int) -> float:
        """Of a step of `depth` drafts over `rows` rows, with `context` tokens in a row's cache."""
        level = level_of(context)
        seen = self._seen.get((depth, rows, level))
        if seen is not None:
            return seen[0]
        base = self._base_us(depth, rows)
        near = self._nearest(depth, rows, level)
        if near is None:
            return base
        their_base = self._base_us(near[0], rows)
        if (near[0], rows) in self._base and (depth, rows) in self._base:
            return max(base + self._seen[near][0] - their_base, 0.1 * base)
        return base * self._seen[near][0] / their_base  # guesses have no unit of their own

    def saw(self, depth: int, rows: int, context: int, took_us: float) -> None:
        """Note what such a step took."""
        expected, key = self.time_us(depth, rows, context), (depth, rows, level_of(context))
        mean, n = self._seen.get(key, (took_us, 0))
        if n or (depth, rows) in self._base:
            took_us = min(max(took_us, expected / OUTLIER), expected * OUTLIER)
        share = max(NEAR, 1.0 / (n + 1))
        self._seen[key] = (mean + share * (took_us - mean) if n else took_us, n + 1)

    def _base_us(self, depth: int, rows: int) -> float:
        """As measured; what was not, from the nearest depth that was."""
        if (depth, rows) in self._base:
            return self._base[depth, rows]
        known = [(abs(d - depth), d) for d, n in self._base if n == rows]
        if not known:
            return 1.0 + UNMEASURED * depth
        nearest = min(known)[1]
        return self._base[nearest, rows] * (1.0 + UNMEASURED * depth) / (1.0 + UNMEASURED * nearest)

    def _nearest(self, depth: int, rows: int, level: int) -> tuple[int, int, int] | None:
        """What ran of these rows, nearest in context and then in depth."""
        found = [key for key in self._seen if key[1] == rows]
        return min(found, key=lambda key: (abs(key[2] - level), abs(key[0] - depth), key), default=None)


def level_of(context: int) -> int:
    """Which doubling of `TOKENS` a context lies below; 0 the first."""
    return (max(context, 1) - 1).bit_length() - (TOKENS - 1).bit_length() if context > TOKENS else 0
