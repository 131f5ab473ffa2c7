"""Look-up by the longest suffix of any length: a suffix automaton over prompt and output, grown token by token.

A state stands for the substrings that end at the same places; the link of the state that the whole text ends in is that
of the longest suffix which also ends earlier, and every state keeps the newest place at which its substrings ended: of
many suffixes that all occur earlier, as in a run of one token, the longest `MOST_NESTED` are kept up to date.
Source: Blumer et al., The smallest automaton recognizing the subwords of a text, 1985; SuffixDecoding,
arXiv 2411.04975; docs/requirements.md R-02.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Chosen here. Without a bound a run of n equal tokens costs n * n / 2 updates; past it an older place is given.
MOST_NESTED = 64


@dataclass
class _State:
    """Substrings that end at the same places.

    Attributes:
        length: of the longest of them. link: state of their longest suffix that ends at more places, -1 for none.
        end: tokens up to the newest place, the text's own end left out. following: state by next token.
    """

    length: int
    link: int
    end: int
    following: dict[int, int] = field(default_factory=dict)


class SuffixLookup:
    """The suffix automaton of one request's text.

    Args:
        least: tokens that have to match.
    """

    def __init__(self, least: int = 1) -> None:
        self.least = least
        self._text: list[int] = []
        self._states = [_State(0, -1, 0)]
        self._last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text."""
        for token in tokens:
            # Substrings that ended here until now end earlier than the text from now on.
            at, end = self._last, len(self._text)
            for _ in range(MOST_NESTED):
                if at <= 0:
                    break
                self._states[at].end = end
                at = self._states[at].link
            self._add(token)
            self._text.append(token)

    def propose(self, n: int) -> list[int]:
        """Up to `n` tokens that followed the newest earlier occurrence of the longest repeated suffix."""
        match = self._states[self._states[self._last].link] if self._last else None
        if match is None or match.length < max(self.least, 1):
            return []
        return self._text[match.end : match.end + n]

    def _add(self, token: int) -> None:
        """The automaton of the text with one more token."""
        states, end = self._states, len(self._text) + 1
        new = len(states)
        states.append(_State(states[self._last].length + 1, 0, end))
        at = self._last
        while at >= 0 and token not in states[at].following:
            states[at].following[token] = new
            at = states[at].link
        if at >= 0:
            states[new].link = self._state_of(at, token)
        self._last = new

    def _state_of(self, before: int, token: int) -> int:
        """The state of exactly the substrings of `before` followed by `token`, split off where others share it."""
        states = self._states
        shared = states[before].following[token]
        if states[shared].length == states[before].length + 1:
            return shared
        split = len(states)
        longer = states[shared]
        states.append(_State(states[before].length + 1, longer.link, longer.end, dict(longer.following)))
        longer.link = split
        at = before
        while at >= 0 and states[at].following.get(token) == shared:
            states[at].following[token] = split
            at = states[at].link
        return split
