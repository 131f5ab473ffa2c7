"""Log-probabilities of committed tokens under the target, and the likeliest tokens in their places.

Of the logits as the target gives them: before temperature and before anything is left out. A step of several tokens
keeps those of its path, one node for each committed token; they lie beside the result rows, a block a turn. Plain torch
in every executor, and only in programs of steps with a request that asks.
Source: docs/requirements.md R-76; derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from eagle3core.config import MOST_LOGPROBS
from eagle3core.kernels.card import Call
from eagle3core.kernels.isa.by_row import one_up
from eagle3core.kernels.slots.slot_state import RESULT_BLOCKS


@dataclass(frozen=True)
class TokenLogprob:
    """What a token's place held.

    Attributes:
        token_id: the token. logprob: natural logarithm of its probability under the target.
        top: the likeliest tokens of that place with theirs, best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def with_top(self, n: int) -> TokenLogprob:
        """The same with the `n` likeliest alone."""
        return TokenLogprob(self.token_id, self.logprob, self.top[:n])


@dataclass(frozen=True)
class KeptLogprobs:
    """Log-probabilities on their way to the host.

    Attributes:
        values: `[RESULT_BLOCKS, S, P, 1 + K]` f64: of each committed token, then of the K likeliest of its place.
        ids: `[RESULT_BLOCKS, S, P, K]` int32 of those.
    """

    values: Tensor
    ids: Tensor

    def of(self, turn: int, rows: Sequence[Sequence[int]]) -> list[list[TokenLogprob]]:
        """Of a block whose rows got these tokens; waits for the device."""
        values: list[list[list[float]]] = self.values[turn, : len(rows)].tolist()
        ids: list[list[list[int]]] = self.ids[turn, : len(rows)].tolist()
        places = [zip(*each, strict=False) for each in zip(rows, values, ids, strict=True)]
        return [[_told(token, own, top, likeliest) for token, (own, *top), likeliest in row] for row in places]


def _told(token: int, own: float, top: Sequence[float], likeliest: Sequence[int]) -> TokenLogprob:
    # Columns that pad the vocabulary are no tokens: -inf.
    return TokenLogprob(token, own, tuple(pair for pair in zip(likeliest, top, strict=True) if isfinite(pair[1])))


def new_kept_logprobs(slots: int, path_len: int, columns: int, device: torch.device) -> KeptLogprobs:
    """Blocks for `slots` sequences of up to `path_len` tokens a step; `columns` of the logits, padding included."""
    k = min(MOST_LOGPROBS, columns)
    values = torch.zeros(RESULT_BLOCKS, slots, path_len, 1 + k, dtype=torch.float64, device=device)
    return KeptLogprobs(values, torch.zeros(RESULT_BLOCKS, slots, path_len, k, dtype=torch.int32, device=device))


def keep_logprobs(logits: Tensor, choices: Tensor, path: Tensor, turn: Tensor, kept: KeptLogprobs) -> Call:
    """Put those of a step's committed tokens into the block that `turn: [1]` names.

    Args:
        logits: `[B * N, V]` of the nodes, -inf where a column is no token.
        choices: `[B, N]` token after each node, -1 where there is none.
        path: `[B, P]` nodes of the accepted paths, root first, dead ends -1: node j's choice is the j-th token.
    """
    operands = {"logits": logits, "choices": choices, "path": path, "turn": turn, "values": kept.values,
                "ids": kept.ids}  # fmt: skip
    return Call("keep_logprobs", operands, partial(_keep, logits, choices, path, turn, kept))


def _keep(logits: Tensor, choices: Tensor, path: Tensor, turn: Tensor, kept: KeptLogprobs) -> None:
    (batch, path_len), nodes, k = path.shape, choices.shape[1], kept.ids.shape[-1]
    at = path.clamp_min(0).long()  # a slot that goes on plainly commits the root's choice alone, which is the first
    tokens = choices.gather(1, at).clamp_min(0).long()
    rows = (torch.arange(batch, device=at.device)[:, None] * nodes + at).view(-1)
    wide = logits[rows].to(one_up(logits.dtype)).log_softmax(dim=1)  # [B * P, V]
    top = wide.topk(k, dim=1)
    values = torch.cat([wide.gather(1, tokens.view(-1, 1)), top.values], dim=1).view(1, batch, path_len, 1 + k)
    block = turn.long()
    kept.values[:, :batch, :path_len].index_copy_(0, block, values.double())
    kept.ids[:, :batch, :path_len].index_copy_(0, block, top.indices.int().view(1, batch, path_len, k))
