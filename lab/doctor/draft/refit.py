"""What a little more training would give a head: a short fit on some texts, measured on the others.

Every text is drafted for by weights that were fitted without it, so the gain is none that was learnt by heart. The loss
is that of EAGLE-3's training: soft cross-entropy against the target over the draft vocabulary, chained, true tokens fed
(`lab.training.teaching`); it goes through the doctor's own forward pass, so that heads of every kind can be fitted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lab.doctor.draft.forward import likelihoods, propose, taught_logits
from lab.doctor.draft.measure import Measurement, measure
from lab.doctor.draft.reading import Reading
from lab.doctor.draft.text import Text

STEPS, RATE, LEVEL_DECAY, LEVELS = 20, 1e-3, 0.8, 2
# Of both fits together on a CPU: about two minutes of one core. A head of an 8B target takes a hundred times as much.
MOST_FLOPS = 4e12
FROZEN, HEAD = ("embed_tokens.weight",), "lm_head.weight"


def refit_flops(reading: Reading, text: Text) -> float:
    """Floating-point operations that `refit_and_measure` takes, about."""
    n_weights = sum(tensor.numel() for name, tensor in reading.weights.items() if name not in FROZEN)
    return 6.0 * n_weights * len(text.tokens) * STEPS * LEVELS


def is_affordable(reading: Reading, text: Text) -> bool:
    """Whether a refit takes no more than may be spent on a CPU; on a GPU it always is."""
    return text.tokens.device.type != "cpu" or refit_flops(reading, text) <= MOST_FLOPS


def refit_and_measure(
    reading: Reading, text: Text, k: int, steps: int = STEPS, *, rows: Tensor | None = None
) -> tuple[Measurement, Reading]:
    """Acceptance of the head after a short fit, each half of the texts drafted for by the fit on the other half; and
    one of the two fitted heads.

    Args:
        text: two texts or more.
        steps: of AdamW, each over all roots of a half.
        rows: as of `refit`.
    """
    halves = [list(range(first, text.n_texts, 2)) for first in (0, 1)]
    proposed: dict[int, Tensor] = {}
    likely: dict[int, Tensor] = {}
    for taught, asked in (halves, halves[::-1]):
        fitted = refit(reading, text.only(taught), steps, rows=rows)
        part = text.only(asked)
        counts = [max(end - 1 - first, 0) for _, first, end in part.spans()]
        proposed |= dict(zip(asked, torch.split(propose(fitted, part, k), counts), strict=True))
        likely |= dict(zip(asked, torch.split(likelihoods(fitted, part, k), counts), strict=True))
    texts = range(text.n_texts)
    return measure(torch.cat([proposed[i] for i in texts]), torch.cat([likely[i] for i in texts]), text), fitted


def refit(reading: Reading, text: Text, steps: int = STEPS, *, rows: Tensor | None = None) -> Reading:
    """The head after `steps` of AdamW over all roots of `text`, its embedding left as it is.

    Args:
        rows: `[R]` int64 rows of `lm_head` that are fitted, and nothing else; None: everything is.
    """
    if rows is None:
        named = {name: tensor for name, tensor in reading.weights.items() if name not in FROZEN}
    else:
        named = {HEAD: reading.weights[HEAD][rows]}
    fitted = {name: tensor.detach().clone().requires_grad_() for name, tensor in named.items()}
    optimizer = torch.optim.AdamW(list(fitted.values()), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 3, 1.0 - step / steps)
        loss = _loss(_with(reading, fitted, rows), text)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(list(fitted.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return _with(reading, {name: tensor.detach() for name, tensor in fitted.items()}, rows)


def _with(reading: Reading, fitted: dict[str, Tensor], rows: Tensor | None) -> Reading:
    """The head with these tensors, or with these rows of its `lm_head`."""
    if rows is not None:
        fitted = {HEAD: reading.weights[HEAD].index_copy(0, rows, fitted[HEAD])}
    return replace(reading, weights={**reading.weights, **fitted})


def _loss(student: Reading, text: Text) -> Tensor:
    """Nats a root, the levels weighted; roots whose target token has no row in the head's vocabulary teach nothing."""
    roots, ids = text.roots().to(text.tokens.device), student.draft_to_target
    rows = torch.arange(len(text.head), device=roots.device) if ids is None else ids.to(roots.device)
    ends = text.ends().to(roots.device)
    total = torch.zeros((), device=roots.device)
    for level, logits in enumerate(taught_logits(student, text, LEVELS)):
        at = (roots + level).clamp(max=len(text.tokens) - 1)  # whose logits say the token that the level drafts
        matters = torch.isin(text.choices[at], rows) & (roots + level < ends)
        wanted = (text.normed[at[matters]] @ text.head[rows].T).softmax(dim=-1)
        entropy = -(wanted * logits[matters].log_softmax(dim=-1)).sum(dim=-1)
        total = total + LEVEL_DECAY**level * entropy.mean()
    return total
