"""Which generated tokens only repeat what was there before: greedy text of small models loops, and loops are easy.

An acceptance length with and without them says how much of it is the draft and how much the text
(docs/requirements.md 1.X-10).
"""

from __future__ import annotations

from collections.abc import Sequence

LOOP_GRAM = 16


def looped_tokens(prompt: Sequence[int], generated: Sequence[int], gram: int = LOOP_GRAM) -> list[bool]:
    """For each generated token, whether it lies in a run of `gram` tokens that occurred earlier in prompt or output.

    The earlier occurrence may overlap the later one, so that a single token repeated for ever counts as a loop.
    """
    sequence = [*prompt, *generated]
    looped = [False] * len(sequence)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(sequence) - gram + 1):
        run = tuple(sequence[start : start + gram])
        if run in seen:
            looped[start : start + gram] = [True] * gram
        seen.add(run)
    return looped[len(prompt) :]
