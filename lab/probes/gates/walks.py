"""Where decoding of a planted pair goes, known before it is run: which of its tokens end a step.

After each token of the cycle the draft is right or wrong by the map, so from any place on the cycle the steps are
certain, and with them the acceptance length that a run will have. Prompts are ended where it is the one asked for, so
that a gate on a mean of some hundred steps does not hang on chance. Derived here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab.pairs.planted import TokenMap

CANDIDATES = 256  # places looked at for each request


@dataclass(frozen=True)
class Walk:
    """A request's steps.

    Attributes:
        end: token its prompt has to end in.
        n_steps: verify steps, the last one too.
        n_complete, n_committed: steps not cut by the limit, and the tokens of those.
    """

    end: int
    n_steps: int
    n_complete: int
    n_committed: int

    @property
    def length(self) -> float:
        """Tokens a complete step."""
        return self.n_committed / self.n_complete if self.n_complete else 0.0


class Cycle:
    """The cycle of a map, with the tokens a step commits from each place.

    Args:
        tokens: the map. k: drafts a step.
    """

    def __init__(self, tokens: TokenMap, k: int) -> None:
        ids = tokens.draft_to_target
        self.order = tokens.follow(int(ids[0]), len(ids))
        place = torch.searchsorted(ids, torch.tensor(self.order))
        right: list[bool] = tokens.right[place].tolist()
        n = len(right)
        self.committed = [1 + _run(right, start, min(k, n)) for start in range(n)]

    def walk(self, start: int, n_tokens: int) -> Walk:
        """A request whose first token, the prefill's, is at `start` of the cycle, and which gets `n_tokens`."""
        n, done, n_steps, n_complete, n_committed = len(self.order), 1, 0, 0, 0
        while done < n_tokens:
            step = self.committed[(start + done - 1) % n]
            n_steps += 1
            if done + step <= n_tokens:
                n_complete, n_committed = n_complete + 1, n_committed + step
            done += step
        return Walk(self.order[(start - 1) % n], n_steps, n_complete, n_committed)


def plan_walks(cycle: Cycle, *, n_requests: int, n_tokens: int, least_length: float) -> list[Walk]:
    """A walk a request, each from its own part of the cycle, at the acceptance length asked for or just above it.

    Where no place looked at gives that much, it is the one that gives most; the gates will say so.
    """
    n, walks = len(cycle.order), []
    for i in range(n_requests):
        first, end = i * n // n_requests, (i + 1) * n // n_requests
        places = range(first, max(end, first + 1), max(1, (end - first) // CANDIDATES))
        found = [cycle.walk(place, n_tokens) for place in places]
        enough = [walk for walk in found if walk.length >= least_length]
        walks.append(min(enough, key=lambda walk: walk.length) if enough else max(found, key=lambda walk: walk.length))
    return walks


def planned_length(walks: list[Walk]) -> float:
    """Tokens a complete step over all requests."""
    return sum(walk.n_committed for walk in walks) / sum(walk.n_complete for walk in walks)


def _run(right: list[bool], start: int, most: int) -> int:
    """How many places in a row, from `start` on, are right; at most `most`."""
    n = 0
    while n < most and right[(start + n) % len(right)]:
        n += 1
    return n
