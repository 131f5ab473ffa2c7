"""Drafts that look up: against a naive search through the whole text, at every length of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3core.lookup import Lookup, NgramLookup, SuffixLookup
from eagle3core.lookup.suffix import MOST_NESTED

pytestmark = pytest.mark.reference

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def after_newest(text: list[int], size: int) -> int | None:
    """Where the text went on after the newest earlier occurrence of its last `size` tokens."""
    ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
    return max(ends, default=None)


def naive(text: list[int], n: int, sizes: list[int]) -> list[int]:
    """What followed the newest earlier occurrence of the longest suffix among `sizes`."""
    for size in sorted(sizes, reverse=True):
        start = after_newest(text, size)
        if start is not None:
            return text[start : start + n]
    return []


@given(TEXTS, st.integers(1, 5), st.integers(1, 6))
def test_an_n_gram_gives_what_followed_it_the_newest_time(text: list[int], most: int, n: int) -> None:
    lookup = NgramLookup(most)
    for i, token in enumerate(text):
        lookup.extend([token])
        seen = text[: i + 1]
        assert lookup.propose(n) == naive(seen, n, list(range(1, min(most, i + 1) + 1)))


@given(TEXTS, st.integers(1, 6), st.integers(1, 6))
def test_a_suffix_of_any_length_gives_what_followed_it_the_newest_time(text: list[int], least: int, n: int) -> None:
    lookup = SuffixLookup(least)
    for i, token in enumerate(text):
        lookup.extend([token])
        seen = text[: i + 1]
        assert lookup.propose(n) == naive(seen, n, list(range(least, i + 1)))


RUNS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 2 * MOST_NESTED)), max_size=4)


@settings(max_examples=30)
@given(RUNS, st.integers(1, 6))
def test_suffixes_nested_deeply_give_what_followed_the_longest_one(runs: list[tuple[int, int]], n: int) -> None:
    """Long rows of one token, where of the shorter suffixes an older occurrence is enough."""
    text = [token for token, length in runs for _ in range(length)]
    lookup = SuffixLookup()
    for i, token in enumerate(text):
        lookup.extend([token])
        seen = text[: i + 1]
        if i % 7 == 0 or i == len(text) - 1:
            assert lookup.propose(n) in after_longest(seen, n)


def after_longest(text: list[int], n: int) -> list[list[int]]:
    """What followed each earlier occurrence of the longest suffix that has one; nothing where none has."""
    for size in range(len(text) - 1, 0, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if ends:
            return [text[end : end + n] for end in ends]
    return [[]]


def test_a_long_row_of_one_token_is_added_in_steps_that_do_not_grow() -> None:
    visits = 0

    class Counting(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal visits
            visits += 1
            return super().__getitem__(at)

    lookup = SuffixLookup()
    lookup.extend([7] * 500)
    lookup._states = Counting(lookup._states)
    lookup.extend([7] * 500)
    assert visits <= 500 * (2 * MOST_NESTED + 10), "each state on the way is read twice"
    assert lookup.propose(3) == [7]


@pytest.mark.parametrize("lookup", [NgramLookup(), SuffixLookup()])
def test_a_text_may_come_in_pieces_and_may_be_empty(lookup: Lookup) -> None:
    assert lookup.propose(3) == []
    lookup.extend([])
    lookup.extend([5, 6, 7])
    lookup.extend([8, 5, 6])
    assert lookup.propose(3) == [7, 8, 5]
    assert lookup.propose(0) == []


def test_states_of_a_long_text_stay_below_twice_its_tokens() -> None:
    lookup = SuffixLookup()
    lookup.extend([i * i % 7 for i in range(500)])
    assert len(lookup._states) <= 2 * 500
