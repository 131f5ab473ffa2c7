"""Drafts by rejection, step by step: how often they are accepted, what stands in a rejected one's place, and q."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eagle3core.kernels.slots.slot_state import N_FIELDS, PLAIN
from eagle3core.step.acceptance import DRAFT_NUMBERS, Verified, draw_drafts, rejected
from eagle3core.step.acceptance.rejection import ACCEPT_NUMBERS, numbers_of, over_target
from eagle3core.step.draw import KEY, DrawSettings, draw, kept_tokens, key_of, mixed, new_draw_settings, uniform

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
V = 7
KNOWN = torch.tensor([5, 0, 2, 6], dtype=torch.int32)


def settings_of(n: int, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> DrawSettings:
    """Settings of n slots that draw by seeds of their own."""
    settings = new_draw_settings(n, CPU)
    settings.shares[:] = torch.tensor([temperature, top_p, 0.0, 0.0])
    settings.counts[:, KEY] = mixed(torch.arange(n) + key_of(seed))
    return settings


def logits_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def stepped(target: Tensor, draft: Tensor, settings: DrawSettings, k: int = 1, **changes: Any) -> Verified:
    """A step of `k` drafts with the same `target: [V]` and `draft: [Vd]` logits at every node, and its choices."""
    n = len(settings.shares)
    slots = torch.arange(n, dtype=torch.int32)
    lengths = torch.full((n,), 11, dtype=torch.int32)
    logits, tokens = target.repeat(n * (k + 1), 1), torch.zeros(n, k + 1, dtype=torch.int32)
    level_logits = draft.expand(k, n, -1).contiguous()
    for level in range(k):
        drafted = KNOWN[level_logits[level].argmax(dim=1)]
        draw_drafts(level_logits[level], lengths, slots, settings, KNOWN, level, drafted).meaning()
        tokens[:, level + 1] = drafted
    positions = lengths[:, None] + torch.arange(k + 1, dtype=torch.int32)
    choices = logits.argmax(dim=1).int().view(n, k + 1)
    draw(logits, positions.view(-1), slots, settings, choices.view(-1), ahead=1).meaning()
    parents = torch.arange(-1, k, dtype=torch.int32).repeat(n, 1)
    made = {"logits": logits, "tokens": tokens, "slots": slots, "state": torch.zeros(N_FIELDS, n, dtype=torch.int32),
            "choices": choices, **changes}  # fmt: skip
    at = Verified(parents=parents, depths=parents + 1, positions=positions, draws=settings, **made)
    rejected(at, level_logits, KNOWN).meaning()
    return at


def law_of(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    shares = torch.tensor([[temperature, top_p, 0.0, 0.0]])
    left = kept_tokens(logits[None], shares, torch.zeros(1, dtype=torch.int64))[0]
    return left / left.sum()


def spread_over(q: Tensor) -> Tensor:
    full = torch.zeros(V, dtype=q.dtype)
    full[KNOWN.long()] = q
    return full


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (2.0, 1.0)])
def test_drafts_are_accepted_as_often_as_both_distributions_share_and_none_stands_where_it_was_rejected(
    temperature: float, top_p: float
) -> None:
    n, target, draft = 40_000, logits_of(1, V), logits_of(2, len(KNOWN))
    at = stepped(target, draft, settings_of(n, temperature, top_p))
    p, q = law_of(target, temperature, top_p), spread_over(law_of(draft, temperature, top_p))
    drafted, chosen = at.tokens[:, 1].long(), at.choices[:, 0].long()
    is_accepted = drafted == chosen
    for token in range(V):
        n_drafted = int((drafted == token).sum())
        # Five standard deviations of a count.
        assert abs(n_drafted - n * float(q[token])) <= 5 * (n * float(q[token])) ** 0.5
        if n_drafted:
            rate = float(torch.clamp(p[token] / q[token], max=1.0))
            n_accepted = int((is_accepted & (drafted == token)).sum())
            assert abs(n_accepted - n_drafted * rate) <= 5 * (n_drafted * rate * (1 - rate)) ** 0.5
    rest = (p - q).clamp_min(0)
    counts = torch.bincount(chosen[~is_accepted], minlength=V)
    assert not counts[rest == 0].any()
    wanted = rest / rest.sum() * counts.sum()
    assert bool(((counts - wanted).abs() <= 5 * wanted.sqrt()).all())


def test_equal_distributions_accept_every_draft_and_disjoint_ones_none() -> None:
    target = torch.full((V,), -torch.inf, dtype=torch.float64)
    target[KNOWN.long()] = logits_of(3, len(KNOWN))
    at = stepped(target, target[KNOWN.long()], settings_of(5_000), k=3)
    assert torch.equal(at.tokens[:, 1:], at.choices[:, :3])
    unknown = torch.zeros(V, dtype=torch.float64)
    unknown[KNOWN.long()] = -torch.inf
    apart = stepped(unknown, target[KNOWN.long()], settings_of(5_000))
    assert not (apart.tokens[:, 1] == apart.choices[:, 0]).any()
    # What is left to draw from is p itself, by the number that draws without a draft.
    alone = apart.logits.argmax(dim=1).int()
    draw(apart.logits, apart.positions.view(-1), apart.slots, apart.draws, alone, ahead=1).meaning()
    assert torch.equal(apart.choices, alone.view(-1, 2))


def test_a_draft_that_is_missing_leaves_the_targets_own_draw() -> None:
    n, target, draft = 2_000, logits_of(4, V), logits_of(5, len(KNOWN))
    settings = settings_of(n)
    at = stepped(target, draft, settings, tokens=torch.full((n, 2), -1, dtype=torch.int32))
    alone = at.logits.argmax(dim=1).int()
    draw(at.logits, at.positions.view(-1), at.slots, settings, alone, ahead=1).meaning()
    assert torch.equal(at.choices, alone.view(n, 2))


def test_greedy_dead_and_plain_rows_and_missing_choices_are_left_alone() -> None:
    settings = settings_of(5)
    settings.shares[0, 0] = 0.0
    state = torch.zeros(N_FIELDS, 5, dtype=torch.int32)
    state[PLAIN, 2] = 1
    slots = torch.tensor([0, -1, 2, 3, 4], dtype=torch.int32)
    # Whatever the draft drew, the target holds it for impossible: each row that takes part rejects.
    target = torch.zeros(V, dtype=torch.float64)
    target[KNOWN.long()] = -torch.inf
    choices = torch.tensor([[5, 5], [5, 5], [5, 5], [-1, 5], [5, 5]], dtype=torch.int32)
    at = stepped(target, logits_of(6, len(KNOWN)), settings, slots=slots, state=state, choices=choices)
    assert at.choices[:4].tolist() == [[5, 5], [5, 5], [5, 5], [-1, 5]]
    assert int(at.choices[4, 0]) in (1, 3, 4)


def test_a_draft_whose_logits_are_not_finite_draws_nothing() -> None:
    settings, drafted = settings_of(2), torch.tensor([-1, 5], dtype=torch.int32)
    logits = torch.stack([torch.full((4,), torch.nan, dtype=torch.float64), logits_of(7, 4)])
    draw_drafts(logits, torch.tensor([3, 3]), torch.tensor([0, 1]), settings, KNOWN, 0, drafted).meaning()
    assert int(drafted[0]) == -1
    assert int(drafted[1]) in KNOWN.tolist()


@given(st.integers(0, 10_000), st.booleans())
def test_the_drafts_distribution_lies_over_the_targets_tokens(seed: int, maps: bool) -> None:
    q = logits_of(seed, 3, len(KNOWN)).softmax(dim=1)
    # Two columns of padding, which hold nothing and whose map means nothing.
    padded = torch.nn.functional.pad(q, (0, 2))
    map_ = torch.nn.functional.pad(KNOWN, (0, 2)) if maps else None
    full = over_target(padded, torch.ones(3, V, dtype=q.dtype), map_)
    columns = KNOWN.long() if maps else torch.arange(len(KNOWN))
    assert torch.equal(full[:, columns], q)
    assert int((full != 0).sum()) == q.numel()


def test_numbers_of_a_position_for_its_three_uses_are_apart() -> None:
    keys = torch.tensor([key_of(seed) for seed in range(200)])[:, None].expand(-1, 200).contiguous()
    positions = torch.arange(200).expand(200, -1)
    uses = [uniform(keys, positions), *(numbers_of(keys, positions, use) for use in (DRAFT_NUMBERS, ACCEPT_NUMBERS))]
    flat = torch.stack([numbers.double().view(-1) for numbers in uses])
    off = torch.corrcoef(flat) - torch.eye(3, dtype=torch.float64)
    assert float(off.abs().max()) < 5 / flat.shape[1] ** 0.5
    # Nor is one use the other's at the next position.
    for a, b in ((0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)):
        pair = torch.stack([uses[a][:, :-1].double().reshape(-1), uses[b][:, 1:].double().reshape(-1)])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / pair.shape[1] ** 0.5
