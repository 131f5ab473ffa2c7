"""Rules that are not lossless: drafts near enough to the target's best, typical ones, or so many whatever they are.

Each says of every node whether it is accepted if its parent is; the deepest path of such nodes is taken, of equally
deep ones the one whose last node comes first. Behind it stands the target's own choice. Rows of slots that go on
plainly, dead rows, and nodes without a choice (logits that are not finite) are left as they are.
Source: of relaxed acceptance TensorRT-LLM's description of it for drafts of thinking models; of the typical test
Medusa, arXiv 2401.10774, section 2.3.1; forced lengths derived here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eagle3core.acceptance import AcceptanceRule, ForcedAcceptance, MedusaAcceptance, RelaxedAcceptance
from eagle3core.kernels.card import Call
from eagle3core.kernels.choice.sample_kernels import COLDEST
from eagle3core.kernels.isa.by_row import one_up
from eagle3core.kernels.slots.slot_state import PLAIN, REQUEST_ID
from eagle3core.step.draw import TEMPERATURE, DrawSettings, mixed, uniform


@dataclass(frozen=True)
class Verified:
    """What a step knows when the target has chosen.

    Attributes:
        logits: `[B * N, V]`, -inf where a column is no token.
        tokens, parents, depths, positions: `[B, N]` int32 of the nodes, root first; a token is -1 where none is.
        slots: `[B]` int32, -1 for dead rows. state: `[N_FIELDS, S]` int32 (`kernels.slots.slot_state`).
        draws: how each slot draws.
        choices: `[B, N]` int32 the target's choice after each node, greedy or drawn, -1 where it has none.
    """

    logits: Tensor
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    positions: Tensor
    slots: Tensor
    state: Tensor
    draws: DrawSettings
    choices: Tensor

    @property
    def operands(self) -> dict[str, Tensor]:
        """By name, for whoever looks at calls."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return {**tensors, "shares": self.draws.shares, "counts": self.draws.counts}

    @property
    def goes_by_rule(self) -> Tensor:
        """`[B]` bool: rows that take part and have not lost their drafts to a fault."""
        return (self.slots >= 0) & (self.state[PLAIN, self._slot] == 0)

    @property
    def request_ids(self) -> Tensor:
        """`[B]` int64."""
        return self.state[REQUEST_ID, self._slot].long()

    @property
    def temperatures(self) -> Tensor:
        """`[B]` f32, 0 for greedy rows."""
        of = self.draws.shares[self._slot, TEMPERATURE]
        return of.where(of >= COLDEST, 0.0)

    @property
    def _slot(self) -> Tensor:
        return self.slots.clamp_min(0).long()


def rewrite_choices(rule: AcceptanceRule, at: Verified) -> Call:
    """Rewrite `at.choices` so that `accept` accepts what the rule does."""
    return Call(f"accept_{type(rule).__name__}", at.operands, partial(_rewrite, rule, at))


def _rewrite(rule: AcceptanceRule, at: Verified) -> None:
    before = at.parents.clamp_min(0).long()
    is_there = (at.tokens >= 0) & (at.parents >= 0) & (at.choices.gather(1, before) >= 0) & at.goes_by_rule[:, None]
    if isinstance(rule, ForcedAcceptance):
        is_good = at.depths <= forced_drafts(rule, at)[:, None]
    else:
        # What the target chose itself is accepted by every rule.
        is_good = _is_near(rule, at) | (at.tokens == at.choices.gather(1, before))
    last = _deepest(at, before, is_there & is_good)
    if isinstance(rule, ForcedAcceptance):
        _choose_no_draft(at, last)
    _choose_path(at, before, last)


def forced_drafts(rule: ForcedAcceptance, at: Verified) -> Tensor:
    """`[B]` int64 drafts to accept. The rest of a fraction goes by a number of request and root position: a row's
    count does not depend on its company, and rows of one batch differ."""
    whole = int(rule.drafts)
    numbers = uniform(mixed(at.request_ids), at.positions[:, 0].long())
    return whole + (numbers < rule.drafts - whole).long()


def _is_near(rule: AcceptanceRule, at: Verified) -> Tensor:
    """`[B, N]` bool: nodes whose token the rule accepts after its parent."""
    batch, nodes = at.tokens.shape
    before = at.parents.clamp_min(0).long()
    parent = (torch.arange(batch, device=before.device)[:, None] * nodes + before).view(-1)  # rows of the logits
    warmth = at.temperatures.repeat_interleave(nodes)[:, None]
    logits = at.logits.to(one_up(at.logits.dtype)) / warmth.where(warmth > 0, 1.0)
    logs = logits.log_softmax(dim=1)  # [B * N, V]
    token = at.tokens.clamp_min(0).long().view(-1)
    own = logs[parent, token]
    if isinstance(rule, RelaxedAcceptance):
        best = logs.amax(dim=1)[parent]
        # Of equal tokens the lower id comes first, so exactly so many are candidates.
        likeliest = logs.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_n]
        is_likely = (likeliest[parent] == token[:, None]).any(dim=1)
        return (is_likely & (best - own <= rule.delta)).view(batch, nodes)
    assert isinstance(rule, MedusaAcceptance), "every rule has its function"
    entropy: Tensor = -torch.special.xlogy(logs.exp(), logs.exp()).sum(dim=1)[parent]
    bound = (rule.delta * (-entropy).exp()).clamp_max(rule.epsilon)
    is_typical = (own.exp() > bound) & (warmth[:, 0] > 0)
    return is_typical.view(batch, nodes)


def _deepest(at: Verified, before: Tensor, is_good: Tensor) -> Tensor:
    """`[B]` int64: the deepest node on whose path every node is good; the root where no draft is."""
    accepted = torch.zeros_like(is_good)
    accepted[:, 0] = True
    for node in range(1, is_good.shape[1]):
        accepted[:, node] = accepted.gather(1, before[:, node : node + 1])[:, 0] & is_good[:, node]
    depth = at.depths.where(accepted, -1)
    return (depth == depth.amax(dim=1, keepdim=True)).int().argmax(dim=1)


def _choose_path(at: Verified, before: Tensor, last: Tensor) -> None:
    """Make every node on the path to `last: [B]` the choice after its parent."""
    node = last[:, None]
    for _ in range(at.tokens.shape[1] - 1):
        parent, token = before.gather(1, node), at.tokens.gather(1, node)
        chosen = at.choices.gather(1, parent)
        at.choices.scatter_(1, parent, token.where(node > 0, chosen))
        node = parent


def _choose_no_draft(at: Verified, last: Tensor) -> None:
    """Where the choice after `last: [B]` is one of its drafts, choose the likeliest token that is none."""
    batch, nodes = at.tokens.shape
    is_child = (at.parents == last[:, None]) & (at.tokens >= 0)
    rows = at.logits[torch.arange(batch, device=last.device) * nodes + last]  # [B, V]
    is_drafted = torch.zeros_like(rows, dtype=torch.int32)
    is_drafted.scatter_add_(1, at.tokens.clamp_min(0).long(), is_child.int())
    others = rows.masked_fill(is_drafted > 0, -torch.inf).argmax(dim=1).to(at.choices.dtype)
    chosen = at.choices.gather(1, last[:, None])[:, 0]
    is_draft = (is_child & (at.tokens == chosen[:, None])).any(dim=1) & at.goes_by_rule
    at.choices.scatter_(1, last[:, None], others.where(is_draft, chosen)[:, None])
