"""Candidates and samples: against torch's own, and by statistics with a stated false-alarm rate."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3core.errors import KernelLimit
from eagle3core.kernels.choice.argmax import argmax, join_variant
from eagle3core.kernels.choice.sample import sample_reference, sample_variant
from eagle3core.kernels.tree.accept import accept_reference
from eagle3core.kernels.tree.top_k import top_k_reference

pytestmark = pytest.mark.reference


def test_top_k_gives_log_probabilities_best_first() -> None:
    logits = torch.randn(5, 40)
    log_probs, ids, lse = top_k_reference(logits, 6)
    expected = logits.double().log_softmax(-1).topk(6)
    assert torch.allclose(log_probs, expected.values)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(lse, logits.double().logsumexp(-1))


def test_equal_logits_are_ordered_by_their_column() -> None:
    _, ids, _ = top_k_reference(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0]]), 5)
    assert ids.tolist() == [[1, 2, 4, 0, 5]]


def test_a_certain_token_has_log_probability_zero_and_never_more() -> None:
    log_probs, _, _ = top_k_reference(torch.tensor([[80.0, 0.0, 0.0, 0.0]]), 1)
    assert log_probs.tolist() == [[0.0]]


def typical(logits: torch.Tensor, temperature: float, epsilon: float) -> torch.Tensor:
    """The truncated distribution, written out once more."""
    p = (logits.double() / temperature).softmax(-1)
    entropy = -sum(x * math.log(x) for x in p.tolist())
    kept = torch.where(p >= min(epsilon, math.sqrt(epsilon) * math.exp(-entropy)), p, 0.0)
    return kept / kept.sum()


@pytest.mark.parametrize(("temperature", "epsilon"), [(1.0, 0.0), (0.7, 0.0), (0.7, 0.09), (1.5, 0.3)])
def test_draws_follow_the_truncated_distribution(temperature: float, epsilon: float) -> None:
    n, logits = 4096, torch.randn(12) * 2
    # Evenly spaced numbers make the counts those of the distribution up to one: no false alarm is possible.
    uniform = (torch.arange(n) + 0.5) / n
    drawn = sample_reference(logits.expand(n, -1), torch.full((n,), temperature), torch.full((n,), epsilon), uniform)
    counts = torch.bincount(drawn, minlength=12).double()
    assert float((counts - n * typical(logits, temperature, epsilon)).abs().max()) <= 1.01


def test_temperature_zero_draws_the_first_of_the_largest_whatever_the_number() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]]).repeat(3, 1)
    drawn = sample_reference(logits, torch.zeros(3), torch.tensor([0.0, 0.09, 1.0]), torch.tensor([0.0, 0.5, 0.99]))
    assert drawn.tolist() == [1, 1, 1]


def test_typical_sampling_drops_what_is_far_below_the_entropy_and_keeps_the_best() -> None:
    p = torch.tensor([0.9, 0.08, 0.02])
    uniform = torch.linspace(0, 0.9999, 200)
    drawn = sample_reference(p.log().expand(200, -1), torch.ones(200), torch.full((200,), 0.09), uniform)
    # H = 0.375, so sqrt(0.09) exp(-H) = 0.206 and the limit is 0.09: only the first token is typical.
    assert drawn.unique().tolist() == [0]


def test_accepting_sampled_choices_emits_tokens_of_the_distribution_sampled_from() -> None:
    """Sample-and-match: whatever is drafted, the first token emitted is the draw itself."""
    n, logits = 2000, torch.randn(6)
    uniform = (torch.arange(n) + 0.5) / n
    first = sample_reference(logits.expand(n, -1), torch.ones(n), torch.zeros(n), uniform)
    choices = torch.stack([first, torch.zeros_like(first), torch.zeros_like(first)], dim=1)
    drafts = torch.tensor([9, 2, 4]).expand(n, -1)  # root, and two siblings
    parents, depths = torch.tensor([-1, 0, 0]).expand(n, -1), torch.tensor([0, 1, 1]).expand(n, -1)
    got = accept_reference(drafts, choices, parents, depths, torch.ones(n, dtype=torch.bool), torch.empty(0), 2)
    assert torch.equal(got.tokens[:, 0], first.int())
    assert torch.equal(got.n_accepted, ((first == 2) | (first == 4)).int())


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: join_variant("sm_90a", 10, False), "multiple of 4"),
        (lambda: sample_variant("sm_90a", "draw", "bf16", 300), "at most 524288"),
        (lambda: argmax("sm_90a", torch.zeros(1, 9).bfloat16(), *[torch.zeros(1, 4)] * 3), "multiple of 8"),
    ],
)
def test_sizes_beyond_a_kernel_are_refused_with_what_is_allowed(refused, message: str) -> None:
    with pytest.raises(KernelLimit, match=message):
        refused()
