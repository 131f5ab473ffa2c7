"""What the draft learns from the frozen target: its vocabulary, and the loss of the chained steps.

Source: the EAGLE-3 paper and the published training code of its authors as docs/requirements.md describes them: soft
cross-entropy against the target's distribution over the draft vocabulary, weight 0.8^i at step i, true tokens fed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lab.training.draft import Draft, tap_layers
from lab.training.fit import Evaluate, StepLoss
from lab.training.generation import looped_tokens
from lab.training.sizes import PairSize
from lab.training.target import hidden_states, logits_of, mixed_precision, windows

STEP_DECAY = 0.8
_GREEDY_SHARE = 0.8  # of each batch; the rest are windows of the training text
_LOOP_WEIGHT = 0.1  # a loop is easy and endless; at full weight it would be half of what the draft sees


def choose_vocabulary(lessons: npt.NDArray[np.integer], greedy_from: npt.NDArray[np.integer], size: PairSize) -> Tensor:
    """`[Vd]` int64 ascending ids the target picks most often when it writes, its loops not counted.

    Args:
        lessons: `[R, T]` sequences of the target.
        greedy_from: `[R]` where each becomes greedy.
        size: both vocabularies.
    """
    counted = (np.arange(lessons.shape[1]) >= greedy_from[:, None]) & ~looped_tokens(lessons)
    counts = np.bincount(lessons[counted], minlength=size.vocab)
    most = np.argsort(-counts, kind="stable")[: size.draft_vocab]
    return torch.from_numpy(np.sort(most)).long()


@torch.no_grad()
def taps_and_logits(target: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Taps `[B, T, 3H]` and fp32 logits `[B, T, V]` of the frozen target over `tokens: [B, T]`."""
    states = hidden_states(target, tokens)
    taps = torch.cat([states[layer] for layer in tap_layers(len(states) - 1)], dim=-1)
    return taps, logits_of(target, states[-1])


def chained_losses(
    draft: Draft, target: Any, tokens: Tensor, weights: Tensor, steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Per chained step: the mean loss in nats, and whether the draft's pick is the next token, `[B, M]` bool.

    A position whose argmax lies outside the draft vocabulary has no loss: nothing there could be accepted.

    Args:
        draft, target: the pair.
        tokens: `[B, T]`; roots are positions 0..M-1 with M = T - 1 - steps.
        weights: `[B, T]` how much it matters to predict this token.
        steps: chained steps.
    """
    taps, logits = taps_and_logits(target, tokens)
    n_roots = tokens.shape[1] - 1 - steps
    with mixed_precision(tokens.device):
        chain = draft(taps[:, :n_roots], tokens, steps)
    ids = draft.draft_to_target
    inside = torch.zeros(logits.shape[-1], dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    matters = inside[logits.argmax(-1)]
    wanted = logits[..., ids].softmax(-1)
    losses, matches = [], []
    for i, guess in enumerate(chain):
        here = slice(1 + i, 1 + i + n_roots)  # position whose logits say token j + 2 + i
        weight = matters[:, here] * weights[:, 2 + i : 2 + i + n_roots]
        entropy = -(wanted[:, here] * guess.log_softmax(-1)).sum(-1)
        losses.append((entropy * weight).sum() / weights[:, 2 + i : 2 + i + n_roots].sum().clamp_min(1.0))
        matches.append(ids[guess.argmax(-1)] == tokens[:, 2 + i : 2 + i + n_roots])
    return losses, matches


def decayed(losses: list[Tensor]) -> Tensor:
    """Sum of the steps' losses, weighted 0.8^i, divided by the sum of weights."""
    powers = [STEP_DECAY**i for i in range(len(losses))]
    return torch.stack([power * loss for power, loss in zip(powers, losses, strict=True)]).sum() / sum(powers)


def draft_loss(draft: Draft, target: Any, stream: Tensor, lessons: Tensor, size: PairSize) -> StepLoss:
    """The loss of a mixed batch: greedy sequences of the target, and windows of the training text.

    Args:
        draft, target: the pair, on one device.
        stream: training tokens `[N]`.
        lessons: `[R, T]` sequences of the target.
        size: batch, window, chained steps.
    """
    n_greedy = round(_GREEDY_SHARE * size.draft.batch)
    weights = torch.from_numpy(np.where(looped_tokens(lessons.cpu().numpy()), _LOOP_WEIGHT, 1.0)).float()
    weights = weights.to(lessons.device)

    def loss(random: torch.Generator) -> Tensor:
        rows = torch.randint(0, len(lessons), (n_greedy,), generator=random).to(lessons.device)
        text = windows(stream, size.draft.batch - n_greedy, lessons.shape[1], random)
        tokens = torch.cat([lessons[rows].long(), text])
        weight = torch.cat([weights[rows], torch.ones_like(text, dtype=weights.dtype)])
        losses, _ = chained_losses(draft, target, tokens, weight, size.ttt_steps)
        return decayed(losses)

    return loss


def draft_evaluation(draft: Draft, target: Any, lessons: Tensor, first: int, steps: int) -> Evaluate:
    """Validation on greedy text of prompts that were never trained on: loss, and accuracy of each step outside loops.

    Args:
        draft, target: the pair.
        lessons: `[R, T]` openings of validation text, continued greedily.
        first: index of the first token the target wrote.
        steps: chained steps.
    """
    fresh = torch.from_numpy(~looped_tokens(lessons.cpu().numpy())).to(lessons.device)
    fresh[:, :first] = False

    def evaluate() -> dict[str, float]:
        losses, matches = chained_losses(draft, target, lessons, fresh.float(), steps)
        values = {"loss": decayed(losses).item()}
        for i, match in enumerate(matches):
            counted = fresh[:, 2 + i : 2 + i + match.shape[1]]
            values[f"accuracy_{i + 1}"] = (match & counted).sum().item() / max(1, counted.sum().item())
        return values

    return evaluate
