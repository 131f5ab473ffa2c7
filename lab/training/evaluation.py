"""What a trained pair is worth, by teacher forcing: acceptance of a drafted chain, loops, vocabulary coverage.

The draft's chained steps over the target's greedy text give, for every root, how many drafts would be accepted; walking
those roots as decoding would is decoding, up to rounding. The engine measures the same for real
(docs/requirements.md, acceptance length with the bonus token counted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lab.training.draft import Draft
from lab.training.generation import continue_greedily, looped_tokens
from lab.training.teaching import chained_losses
from lab.training.tokenizer import END_ID


@dataclass(frozen=True)
class Acceptance:
    """Greedy acceptance of a chain, measured on prompts.

    Attributes:
        n_drafts: drafted tokens a step.
        n_prompts, n_tokens: prompts, and tokens written after each.
        length: tokens committed a complete step, bonus included.
        length_outside_loops: the same over steps that commit no looped token; None if there is none.
        by_position: share of complete steps in which the first i drafts are all accepted, i = 1..n_drafts.
        looped_share: of written tokens, those in a 16-gram that occurred before in prompt or output.
        coverage: of written tokens, those inside the draft vocabulary.
    """

    n_drafts: int
    n_prompts: int
    n_tokens: int
    length: float | None
    length_outside_loops: float | None
    by_position: tuple[float | None, ...]
    looped_share: float
    coverage: float


def measure_acceptance(
    target: Any, draft: Draft, prompts: Sequence[Sequence[int]], n_new: int = 128, n_drafts: int = 3
) -> Acceptance:
    """Acceptance of `draft` for `target` on prompts, all at once.

    Args:
        target, draft: the pair, on one device.
        prompts: token ids of each.
        n_new: tokens written greedily after each; decoding does not stop at the end token here.
        n_drafts: chain length.
    """
    written = continue_greedily(target, prompts, n_new)
    rows = [[*prompt, *row] for prompt, row in zip(prompts, written.tolist(), strict=True)]
    longest = max(len(row) for row in rows)
    padded = torch.full((len(rows), longest), END_ID)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    tokens = padded.to(draft.embedding.device)
    with torch.no_grad():
        _, matches = chained_losses(draft, target, tokens, torch.ones_like(tokens).float(), n_drafts)
    right = torch.stack(matches, dim=-1).cpu().numpy()
    walks = []
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        looped = looped_tokens(np.array([row]))[0]
        walks.append((walk(right[i], len(prompt), len(row)), looped, len(prompt)))
    return _summary(walks, written, draft.draft_to_target.cpu(), n_drafts)


def walk(right: npt.NDArray[np.bool_], n_prompt: int, n_all: int) -> list[tuple[int, int]]:
    """Complete decode steps as (index of the first committed token, accepted drafts).

    Args:
        right: `[M, k]` whether step i at root j names token j + 2 + i.
        n_prompt: tokens of the prompt; the token after it is the first root.
        n_all: tokens of prompt and output together.
    """
    n_drafts, first, steps = right.shape[1], n_prompt + 1, []
    while first + n_drafts < n_all:  # the drafts and the bonus token all lie inside the output
        wrong = np.flatnonzero(~right[first - 2])
        accepted = int(wrong[0]) if len(wrong) else n_drafts
        steps.append((first, accepted))
        first += accepted + 1
    return steps


def _summary(
    walks: list[tuple[list[tuple[int, int]], npt.NDArray[np.bool_], int]],
    written: Tensor,
    ids: Tensor,
    n_drafts: int,
) -> Acceptance:
    accepted = np.array([a for steps, _, _ in walks for _, a in steps])
    fresh = np.array([not looped[s : s + a + 1].any() for steps, looped, _ in walks for s, a in steps])
    return Acceptance(
        n_drafts=n_drafts,
        n_prompts=len(walks),
        n_tokens=written.shape[1],
        length=_mean(accepted + 1),
        length_outside_loops=_mean(accepted[fresh] + 1),
        by_position=tuple(_mean(accepted > i) for i in range(n_drafts)),
        looped_share=float(np.concatenate([looped[n_prompt:] for _, looped, n_prompt in walks]).mean()),
        coverage=float(np.isin(written.numpy(), ids.numpy()).mean()),
    )


def _mean(values: npt.NDArray[Any]) -> float | None:
    return float(np.mean(values)) if values.size else None
