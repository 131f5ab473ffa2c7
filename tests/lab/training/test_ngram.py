"""The 5-gram the target is measured against: a distribution, counted by hand where a hand can count."""

import math

import numpy as np
import pytest

from lab.errors import ExperimentError
from lab.training.ngram import NGram

pytestmark = pytest.mark.reference


def test_a_bigram_model_of_six_tokens_agrees_with_counting_by_hand() -> None:
    # Bigrams of 0 1 0 1 0 2: 01 twice, 10 twice, 02 once; no bigram occurs three times, so each gives up half a count.
    # Each token follows exactly one other, so the unigram level is (1 - 1/2)/3 + (3/2)/3 * 1/3 = 1/3 for every token.
    model = NGram(np.array([0, 1, 0, 1, 0, 2]), vocab=3, order=2)
    after_zero = model.probabilities(np.array([0]), np.arange(3))
    np.testing.assert_allclose(after_zero, [2 / 18, 11 / 18, 5 / 18])
    after_one = model.probabilities(np.array([1]), np.arange(3))
    np.testing.assert_allclose(after_one, [1.5 / 2 + 0.25 / 3, 0.25 / 3, 0.25 / 3])
    unseen_context = model.probabilities(np.array([2]), np.arange(3))
    np.testing.assert_allclose(unseen_context, [1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("length", [0, 1, 3, 4, 9])
def test_probabilities_after_any_history_sum_to_one_and_are_positive(length: int) -> None:
    random = np.random.default_rng(0)
    tokens = random.zipf(1.5, size=5000).clip(max=60) - 1
    model = NGram(tokens, vocab=61)
    for start in (0, 17, 1234):
        after = model.probabilities(tokens[start : start + length], np.arange(61))
        assert after.sum() == pytest.approx(1.0, abs=1e-12)
        assert after.min() > 0


def test_the_loss_of_a_stream_is_that_of_its_tokens_one_by_one() -> None:
    random = np.random.default_rng(1)
    tokens = random.zipf(1.5, size=3000).clip(max=40) - 1
    model = NGram(tokens[:2500], vocab=41)
    held_out = tokens[2500:2600]
    one_by_one = [-math.log(model.probabilities(held_out[:i], held_out[i : i + 1])[0]) for i in range(1, len(held_out))]
    assert model.loss(held_out) == pytest.approx(np.mean(one_by_one), rel=1e-12)


def test_longer_context_helps_on_text_that_has_it() -> None:
    random = np.random.default_rng(2)
    words = [random.integers(0, 30, size=6) for _ in range(12)]
    text = np.concatenate([words[i] for i in random.integers(0, 12, size=4000)])
    losses = [NGram(text[:20000], vocab=30, order=order).loss(text[20000:]) for order in (1, 2, 3, 5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] < math.log(30)
    assert losses[-1] == pytest.approx(math.log(12) / 6, abs=0.1)  # one choice among 12 words every 6 tokens


def test_an_order_that_does_not_fit_sixty_four_bits_is_refused() -> None:
    with pytest.raises(ExperimentError, match="order 5 over 65536 entries"):
        NGram(np.arange(100), vocab=65536)
