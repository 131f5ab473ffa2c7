"""What recent steps accepted, and what drafts have cost or gained beside plain decoding so far.

A draft is right with some chance once those before it were; the chances are means over recent rows, older ones fading.
The balance is in plain steps: a step with drafts adds the tokens a row got and takes what the step took.
Source: derived here; the chances are those of Chen et al., arXiv 2302.01318, estimated by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

FADES = 1.0 / 48  # of what is known, with every step
MOST_ROWS = 192.0  # that count together: many rows a step would otherwise drown a change for as many steps
PRIOR = 1.0  # rows that the chance at the depth before stands for
UNKNOWN = 0.5  # chance of a first draft of which nothing is known
ALLOWANCE = 0.8  # plain steps that drafts may lose before they have shown anything
MOST_KEPT = 8.0  # of what they have gained: a mean takes about so many steps to follow a change
DOUBTED = 0.5  # what is left of it with every step that loses more than there is
REGAINED = 0.002  # of a step, with every plain one: what looking again may take
IN_VAIN = 2  # steps with drafts in a row that lost, from which on half as much is regained


@dataclass
class History:
    """What a choice is made of.

    Attributes:
        depth: most drafts of a step.
        tried, right: by depth, rows whose drafts before it were right, and those of them whose draft was.
        balance: plain steps that drafts may still lose. reserved: of these, by steps whose results are not known yet.
        n_plain: steps without drafts since the last with some. last: drafts of the newest step.
        n_rows: rows whose drafts were ever verified; these do not fade.
        n_in_vain: steps with drafts in a row that gave less than they took, the newest included.
    """

    depth: int
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    balance: float = ALLOWANCE
    reserved: float = 0.0
    n_plain: int = 0
    last: int = 0
    n_rows: int = 0
    n_in_vain: int = 0

    def __post_init__(self) -> None:
        self.tried = self.tried or [0.0] * self.depth
        self.right = self.right or [0.0] * self.depth

    @property
    def regained(self) -> float:
        """Of a plain step, with every one: what looking again may take, of which half while looks are in vain."""
        return REGAINED / 2.0 if self.n_in_vain >= IN_VAIN else REGAINED

    def chances(self) -> list[float]:
        """Of each draft, given that those before it were right."""
        found, before = [], UNKNOWN
        for tried, right in zip(self.tried, self.right, strict=True):
            before = (right + PRIOR * before) / (tried + PRIOR)
            found.append(before)
        return found

    def lengths(self) -> list[float]:
        """Tokens that a step is expected to give a row, by its drafts, from 0 on."""
        return _lengths(self.chances())

    def sure_lengths(self) -> list[float]:
        """Likewise, each chance less its standard error: what may be counted on."""
        rows = zip(self.chances(), self.tried, strict=True)
        return _lengths([max(0.0, q - sqrt(q * (1.0 - q) / (n + PRIOR))) if n else 0.0 for q, n in rows])

    def chose(self, depth: int, risk: float) -> None:
        """Note a step that is enqueued: its drafts, and what it may lose in plain steps."""
        self.last = depth
        self.n_plain = 0 if depth else self.n_plain + 1
        self.reserved += risk if depth else 0.0

    def saw(self, depth: int, accepted: Sequence[int], over_plain: float, risk: float) -> None:
        """Note what a step gave: `accepted` drafts of each row; it took `over_plain` plain steps."""
        fade = 1.0 - FADES
        self.tried, self.right = [n * fade for n in self.tried], [n * fade for n in self.right]
        if not depth or not accepted:
            self.balance = max(self.balance, min(ALLOWANCE, self.balance + self.regained))
            return
        self.n_rows += len(accepted)
        for i in range(depth):
            tried, right = sum(n >= i for n in accepted), sum(n > i for n in accepted)
            kept = min(1.0, max(MOST_ROWS - tried, 0.0) / self.tried[i]) if self.tried[i] else 1.0
            self.tried[i], self.right[i] = self.tried[i] * kept + tried, self.right[i] * kept + right
        self.reserved = max(0.0, self.reserved - risk)
        gain = 1.0 + sum(accepted) / len(accepted) - over_plain
        self.n_in_vain = self.n_in_vain + 1 if gain < 0.0 else 0
        self.balance = min(MOST_KEPT, self.balance + gain)
        if self.balance < 0.0:  # what is known is of better times
            self.tried, self.right = [n * DOUBTED for n in self.tried], [n * DOUBTED for n in self.right]


def _lengths(chances: Sequence[float]) -> list[float]:
    found, reach = [1.0], 1.0
    for chance in chances:
        reach *= chance
        found.append(found[-1] + reach)
    return found
