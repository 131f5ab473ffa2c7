"""What drafting without a model accepts on the same text: the controls that a trained head has to beat.

Nothing is decoded again: greedy text is the same whatever drafts it, so what a control would have drafted at each of
its own steps is compared with the text that followed. The look-ups are the engine's own methods; the bigram table knows
the prompts' text alone. Steps are counted as in `counts`: one that the text's end cuts short is left out of every mean.
Source: docs/requirements.md 1.X-19 (counting), R-02 (look-ups); the verdict is derived here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eagle3core.lookup import LOOKUPS, Lookup
from eagle3core.metrics import StepRecord
from lab.acceptance.counts import DepthAcceptance, acceptance_interval, outside_loops
from lab.acceptance.intervals import Interval
from lab.acceptance.loops import looped_tokens
from lab.pairs.prompts import Prompt

BIGRAM = "bigram"
CONTROLS = (*LOOKUPS, BIGRAM)


class BigramTable:
    """The token that most often follows each token in some texts; of equals the one that did so first."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        followed: dict[int, Counter[int]] = {}
        for text in texts:
            for token, following in pairwise(text):
                followed.setdefault(token, Counter())[following] += 1
        self.likeliest = {token: counts.most_common(1)[0][0] for token, counts in followed.items()}


class BigramDrafts:
    """A table read token after token from the end of one text: a `Lookup` like the engine's."""

    def __init__(self, table: BigramTable) -> None:
        self._table = table
        self._last = -1  # no token, which nothing follows

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text."""
        self._last = tokens[-1] if tokens else self._last

    def propose(self, n: int) -> list[int]:
        """Up to `n` tokens, fewer where the table does not know what follows."""
        proposed, last = list[int](), self._last
        while len(proposed) < n and last in self._table.likeliest:
            last = self._table.likeliest[last]
            proposed.append(last)
        return proposed


@dataclass(frozen=True)
class ControlAcceptance:
    """What one control would have accepted at one depth.

    Attributes:
        name: of the control. k: drafts a step at most.
        n_steps, n_cut: complete steps, and steps left out because the text ended in them.
        n_drafted: tokens proposed in the complete steps, which may be fewer than k a step.
        length: mean acceptance length, bonus included. outside_loops: over steps without a looped token.
    """

    name: str
    k: int
    n_steps: int
    n_cut: int
    n_drafted: int
    length: Interval
    outside_loops: Interval

    def row_values(self) -> dict[str, Any]:
        """What is stored of a control; its lengths have names of their own, which nights do not compare."""
        return {
            **self.length.values("control_length"),
            **self.outside_loops.values("control_length_outside_loops"),
            "n_steps": self.n_steps, "num_cut_steps": self.n_cut,
            "drafted_a_step": self.n_drafted / self.n_steps if self.n_steps else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A head beside the controls at one depth, on the same text.

    Attributes:
        depth: the head's acceptance. controls: in the order of `CONTROLS`.
    """

    depth: DepthAcceptance
    controls: tuple[ControlAcceptance, ...]

    @property
    def leaves_out_loops(self) -> bool:
        """Whether lengths outside loops are compared: repeated text, which look-ups know, is no test of a head."""
        intervals = [self.depth.outside_loops, *(control.outside_loops for control in self.controls)]
        return all(interval.mean is not None for interval in intervals)

    @property
    def beaten(self) -> tuple[str, ...] | None:
        """Names of the controls whose length is below the head's; None where nothing was measured."""
        own = self._length(self.depth)
        lengths = {control.name: self._length(control) for control in self.controls}
        if own is None or not lengths or None in lengths.values():
            return None
        return tuple(name for name, length in lengths.items() if length is not None and length < own)

    @property
    def is_working(self) -> bool | None:
        """Whether the head is worth more than some drafts that need no model; None where nothing was measured."""
        return None if self.beaten is None else bool(self.beaten)

    @property
    def verdict(self) -> str:
        """One sentence that holds the head against the controls."""
        own, beaten = self._length(self.depth), self.beaten
        if own is None or beaten is None:
            return f"At spec-{self.depth.k} too few steps are complete to hold the head against drafts without a model."
        lengths = ", ".join(f"{self._length(control):.2f} ({control.name})" for control in self.controls)
        where = " outside loops" if self.leaves_out_loops else ""
        head = (
            f"Without a model, a step of spec-{self.depth.k} commits{where} {lengths} tokens, with the head {own:.2f}"
        )
        if not beaten:
            return f"{head}: it beats none of them, so the head is not working."
        unbeaten = [control.name for control in self.controls if control.name not in beaten]
        return f"{head}: it beats {', but not '.join(_listed(names) for names in (beaten, unbeaten) if names)}."

    def row_values(self) -> dict[str, Any]:
        """What is stored beside the head's acceptance."""
        beaten = self.beaten
        return {
            "is_working": self.is_working,
            "controls_beaten": None if beaten is None else list(beaten),
            "against_controls": self.verdict,
        }

    def _length(self, measured: DepthAcceptance | ControlAcceptance) -> float | None:
        return (measured.outside_loops if self.leaves_out_loops else measured.length).mean


def compare_with_controls(depth: DepthAcceptance, prompts: Sequence[Prompt]) -> Comparison:
    """The head at one depth beside every control, over the text that it was measured on."""
    answers = [response.token_ids for response in depth.responses]
    table = BigramTable([prompt.ids for prompt in prompts])
    makers: Mapping[str, Callable[[], Lookup]] = {**LOOKUPS, BIGRAM: lambda: BigramDrafts(table)}
    return Comparison(depth, tuple(_counted(name, depth.k, prompts, answers, makers[name]) for name in CONTROLS))


def replayed_steps(drafts: Lookup, prompt: Sequence[int], tokens: Sequence[int], k: int) -> list[StepRecord]:
    """The steps in which `tokens` would have been decoded after `prompt`, with at most `k` tokens of `drafts` in each.

    What a step that is cut short would have accepted past the text's end is not known, and not counted.
    """
    drafts.extend(prompt)
    steps, known, start = list[StepRecord](), 0, 1  # the first token comes from prefill
    while start < len(tokens):
        drafts.extend(tokens[known:start])
        known, proposed, follows = start, drafts.propose(k), tokens[start:]
        n_accepted = next((i for i, (a, b) in enumerate(zip(proposed, follows, strict=False)) if a != b), None)
        n_accepted = min(len(proposed), len(follows)) if n_accepted is None else n_accepted
        n_committed = min(n_accepted + 1, len(follows))
        steps.append(StepRecord(start, len(proposed), n_accepted, n_committed, cut=n_committed <= n_accepted))
        start += n_committed
    return steps


def _counted(
    name: str, k: int, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], make: Callable[[], Lookup]
) -> ControlAcceptance:
    """One control over all answers."""
    steps = [replayed_steps(make(), prompt.ids, own, k) for prompt, own in zip(prompts, answers, strict=True)]
    complete = [[step for step in own if not step.cut] for own in steps]
    loops = [looped_tokens(prompt.ids, own) for prompt, own in zip(prompts, answers, strict=True)]
    n_steps = sum(map(len, complete))
    return ControlAcceptance(
        name, k, n_steps, sum(map(len, steps)) - n_steps, sum(step.n_draft for own in complete for step in own),
        acceptance_interval(complete), acceptance_interval(outside_loops(complete, loops)),
    )  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
