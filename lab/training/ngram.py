"""The yardstick of the target: an interpolated 5-gram with modified Kneser-Ney smoothing, in numpy.

Source: Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1999), section 3: three
discounts an order, lower orders over distinct left contexts; the lowest order is interpolated with the uniform
distribution, so that every token of the vocabulary has a probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.errors import ExperimentError

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Order:
    """Discounted probabilities of one n-gram order: sorted n-gram keys, and per sorted context its left-over mass."""

    grams: Keys
    discounted: Floats
    contexts: Keys
    left_over: Floats


class NGram:
    """An interpolated n-gram model over token ids.

    Args:
        tokens: training stream `[N]`, ids below `vocab`.
        vocab: number of entries.
        order: longest n-gram.

    Raises:
        ExperimentError: an n-gram of that order does not fit 64 bits, or the stream is shorter than one.
    """

    def __init__(self, tokens: npt.NDArray[np.integer], vocab: int, order: int = 5) -> None:
        self.vocab, self.order = vocab, order
        self._bits = max(1, (vocab - 1).bit_length())
        if self._bits * order > 64 or len(tokens) < order:
            raise ExperimentError(
                f"an n-gram of order {order} over {vocab} entries and {len(tokens)} tokens",
                "order times bits of an id at most 64, and at least one n-gram of text",
                "lower the order, or give more text",
            )
        raw, counts = np.unique(self._keys(tokens, order), return_counts=True)
        self._orders: list[_Order] = []
        for n in range(order, 0, -1):
            self._orders.insert(0, self._discount(raw, counts, n))
            shorter = raw & np.uint64((1 << (self._bits * (n - 1))) - 1)  # without the leftmost token
            raw, counts = np.unique(shorter, return_counts=True)  # counts: distinct left contexts

    def probabilities(self, history: npt.NDArray[np.integer], candidates: npt.NDArray[np.integer]) -> Floats:
        """P(candidate | history) of each candidate `[M]`; only the last `order - 1` tokens of the history count."""
        last = np.asarray(history)[len(history) - min(len(history), self.order - 1) :]
        rows = np.concatenate([np.tile(last, (len(candidates), 1)), np.asarray(candidates)[:, None]], axis=1)
        return self._interpolate(rows.astype(np.uint64), np.full(len(candidates), len(last) + 1))

    def loss(self, tokens: npt.NDArray[np.integer]) -> float:
        """Mean loss in nats over tokens 1..N-1 of a stream, each given up to `order - 1` tokens before it."""
        padded = np.concatenate([np.zeros(self.order - 1, dtype=np.uint64), tokens.astype(np.uint64)])
        rows = np.lib.stride_tricks.sliding_window_view(padded, self.order)[1:]
        known = np.minimum(np.arange(1, len(tokens)) + 1, self.order)
        return float(-np.log(self._interpolate(rows, known)).mean())

    def _interpolate(self, rows: Keys, known: npt.NDArray[np.integer]) -> Floats:
        """Probability of the last column given those before it; row r has `known[r]` genuine columns at its end."""
        result = np.full(len(rows), 1.0 / self.vocab)
        for n, level in enumerate(self._orders, start=1):
            if n > rows.shape[1]:
                break
            keys = self._joined(rows[:, rows.shape[1] - n :])
            left_over = _looked_up(level.contexts, level.left_over, keys >> np.uint64(self._bits), missing=1.0)
            update = _looked_up(level.grams, level.discounted, keys, missing=0.0) + left_over * result
            result = np.where(known >= n, update, result)
        return result

    def _discount(self, grams: Keys, counts: npt.NDArray[np.integer], n: int) -> _Order:
        contexts, start = np.unique(grams >> np.uint64(self._bits), return_index=True)
        totals = np.add.reduceat(counts, start).astype(np.float64)
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        per_gram = np.repeat(totals, np.diff([*start, len(grams)]))
        left_over = np.add.reduceat(discounts, start) / totals
        return _Order(grams, (counts - discounts) / per_gram, contexts, left_over)

    def _keys(self, tokens: npt.NDArray[np.integer], n: int) -> Keys:
        return self._joined(np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), n))

    def _joined(self, rows: Keys) -> Keys:
        keys = np.zeros(len(rows), dtype=np.uint64)
        for column in range(rows.shape[1]):
            keys = (keys << np.uint64(self._bits)) | rows[:, column]
        return keys


def _discounts(counts: npt.NDArray[np.integer]) -> Floats:
    """What is taken from n-grams counted 0, 1, 2 and 3 or more times; half a count where the estimate has no basis."""
    seen = np.array([np.count_nonzero(counts == c) for c in range(1, 5)], dtype=np.float64)
    if not seen.all():
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = seen[0] / (seen[0] + 2.0 * seen[1])
    estimates = [c - (c + 1) * y * seen[c] / seen[c - 1] for c in (1, 2, 3)]
    return np.array([0.0, *np.clip(estimates, 0.0, [1.0, 2.0, 3.0])])


def _looked_up(keys: Keys, values: Floats, wanted: Keys, missing: float) -> Floats:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], missing)
