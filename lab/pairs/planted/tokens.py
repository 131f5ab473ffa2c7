"""The map that a planted target follows and the one its draft proposes.

The draft's vocabulary is one long cycle; every token outside it leads into it. The draft is right after a chosen share
of the cycle's tokens, drawn at random, so a drafted token is right with that probability whatever came before it.

Of a target with experts a token takes the experts of its code (`expert_weights`): its predecessor's on the cycle with a
chosen probability, else one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.errors import ExperimentError
from lab.options.values import MOST_REPEATED


@dataclass(frozen=True)
class TokenMap:
    """Successors of every token, on the CPU.

    Attributes:
        draft_to_target: `[Vd]` int64 target ids of the draft vocabulary, ascending.
        successor: `[V]` int64 the token that follows each token.
        proposed: `[Vd]` int64 row of the draft's head that wins after each token of the draft vocabulary.
        right: `[Vd]` bool where that row is the successor's.
        predecessors: `[Vd, P]` int64 the tokens that lead to each token of the draft vocabulary, -1 padded.
        code_holder: `[V]` int64 the token whose code each token has.
        repeated: share of the cycle's tokens that have their predecessor's, drawn at random.
    """

    draft_to_target: Tensor
    successor: Tensor
    proposed: Tensor
    right: Tensor
    predecessors: Tensor
    code_holder: Tensor
    repeated: float = 0.0

    @property
    def share(self) -> float:
        """Share of the draft vocabulary after which the draft is right."""
        return float(self.right.double().mean())

    def follow(self, token: int, n_tokens: int) -> list[int]:
        """The `n_tokens` tokens that greedy decoding gives after `token`."""
        tokens = []
        for _ in range(n_tokens):
            token = int(self.successor[token])
            tokens.append(token)
        return tokens


def plan_tokens(vocab: int, draft_vocab: int, share: float, seed: int, repeated: float = 0.0) -> TokenMap:
    """The map of a vocabulary with `draft_vocab` draft tokens, right after `share` of them; the same on any machine.

    `repeated`: chance that a token of the cycle takes its predecessor's experts.

    Raises:
        ExperimentError: a share outside 0..1.
    """
    if not 0.0 <= share <= 1.0:
        raise ExperimentError(f"acceptance share is {share}", "0 to 1", "give the share of positions to be accepted")
    if not 0.0 <= repeated <= MOST_REPEATED:
        raise ExperimentError(
            f"share of repeated experts is {repeated}", f"0 to {MOST_REPEATED}", "give the share of tokens that repeat"
        )
    random = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocab, generator=random)[:draft_vocab].sort().values
    cycle = torch.randperm(draft_vocab, generator=random)
    follows = torch.empty_like(cycle)
    follows[cycle] = cycle.roll(-1)
    successor = torch.empty(vocab, dtype=torch.int64)
    successor[ids] = ids[follows]
    outside = torch.ones(vocab, dtype=torch.bool).index_fill_(0, ids, False).nonzero().flatten()
    entries = torch.randperm(draft_vocab, generator=random)
    entered = entries[torch.arange(len(outside)) % draft_vocab]  # evenly: no token has many more predecessors
    successor[outside] = ids[entered]
    right = _chosen(draft_vocab, share, random)
    wrong = (~right).nonzero().flatten()
    wrong = wrong[torch.randperm(len(wrong), generator=random)]
    proposed = follows.clone()
    proposed[wrong] = follows[wrong.roll(1)]  # each wrong token proposes another wrong one's successor
    before = _predecessors(ids, follows, outside, entered, draft_vocab)
    holder = _code_holders(vocab, ids[cycle], repeated, seed)
    return TokenMap(ids, successor, proposed, right, before, holder, repeated)


def _code_holders(vocab: int, cycle: Tensor, repeated: float, seed: int) -> Tensor:
    """`[V]` the token whose code each has: `cycle` is walked, and a code kept with probability `repeated`.

    Drawn apart from all else, so that a pair has the same tokens at any share of repeated experts.
    """
    drawn = torch.rand(len(cycle), generator=torch.Generator().manual_seed(seed)) >= repeated
    drawn[0] = True
    places = torch.arange(len(cycle))
    holder = torch.arange(vocab)
    holder[cycle] = cycle[torch.where(drawn, places, 0).cummax(0).values]
    return holder


def share_for_length(length: float, k: int) -> float:
    """The share a at which k drafts give the acceptance length 1 + a + a^2 + ... + a^k.

    Raises:
        ExperimentError: a length outside 1..k+1, or no draft.
    """
    if k < 1 or not 1.0 <= length <= k + 1:
        raise ExperimentError(
            f"acceptance length {length} at {k} drafts a step",
            f"1 to {max(k, 0) + 1} with at least one draft",
            "give a length that k drafts can reach, or a larger k",
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, k) < length else (low, middle)
    return (low + high) / 2


def expected_length(share: float, k: int) -> float:
    """Tokens a step of k drafts commits on average, bonus included, each right with probability `share`."""
    return sum(share**i for i in range(k + 1))


def _chosen(n: int, share: float, random: torch.Generator) -> Tensor:
    n_right = round(share * n)
    if n_right == n - 1:  # a single wrong token would have no other one's successor to propose
        n_right = n - 2 if share < 1 - 1.5 / n else n
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[torch.randperm(n, generator=random)[:n_right]] = True
    return chosen


def _predecessors(ids: Tensor, follows: Tensor, outside: Tensor, entered: Tensor, n: int) -> Tensor:
    table = torch.full((n, 1 + -(-len(outside) // n)), -1, dtype=torch.int64)
    table[follows, 0] = ids
    table[entered, 1 + torch.arange(len(outside)) // n] = outside
    return table
