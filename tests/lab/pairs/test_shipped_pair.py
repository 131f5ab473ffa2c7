"""The shipped pair keeps its promises: held-out prompts, better than a 5-gram, and long acceptance."""

from __future__ import annotations

import pytest
import torch

from eagle3core.pipeline import load_tokenizer
from lab.acceptance.measure import measure_acceptance
from lab.pairs import shipped_pair
from lab.pairs.prompts import Prompt, load_prompts
from lab.training import corpus, ngram, target, tokenizer
from lab.training.corpus import HELD_OUT

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def loaded() -> list[Prompt]:
    pair = shipped_pair()
    assert pair.prompts is not None
    return load_prompts(pair.prompts, load_tokenizer(pair.target))


def test_there_are_sixty_four_prompts_and_their_text_was_held_out(loaded: list[Prompt]) -> None:
    text = corpus.read_stdlib()
    held_out = "\0".join(document.text for document in text.split("held out"))
    assert len(loaded) == 64
    found = sum(prompt.text in held_out for prompt in loaded)
    # The prompts were cut from one Python's library; another release has edited a few of those places.
    assert found >= 48, f"only {found} of 64 prompts are in this Python's {', '.join(sorted(HELD_OUT))}"


@pytest.mark.slow
@pytest.mark.exhaustive  # the five-gram is counted from all of the training text; neither it nor the pair changes
def test_the_target_beats_an_interpolated_five_gram_on_pieces_of_the_held_out_modules() -> None:
    pair, text = shipped_pair(), corpus.read_stdlib()
    bpe = tokenizer.load_tokenizer(pair.target)
    training, held_out = (tokenizer.encode(bpe, text.split(name)) for name in ("training", "held out"))
    model = target.load_target(pair.target, torch.device("cpu"))
    length, n_pieces = 1025, 8  # a fifteenth of all, from everywhere
    starts = [len(held_out) * i // n_pieces for i in range(n_pieces)]
    pieces = [held_out[start : start + length].astype("int32") for start in starts]
    with torch.no_grad():
        own = sum(target.stream_loss(model, torch.from_numpy(piece), 512) for piece in pieces) / n_pieces
    five_gram = ngram.NGram(training, bpe.get_vocab_size())
    assert own < sum(five_gram.loss(piece) for piece in pieces) / n_pieces
    assert own == pytest.approx(pair.card["held_out_loss_nats_per_token"]["target"], abs=0.1)


# `make lab` measures the same acceptance; that it is also what the card says is asked when either changes.
@pytest.mark.slow
@pytest.mark.exhaustive
def test_spec_3_commits_at_least_2_2_tokens_a_step_outside_loops(loaded: list[Prompt]) -> None:
    pair = shipped_pair()
    report = measure_acceptance(
        pair.target, pair.draft, loaded, ks=(3,), max_new_tokens=128, batch=32, ignore_eos=True
    ).at(3)
    assert report.n_tokens == 64 * 128
    assert report.outside_loops.mean is not None
    assert report.outside_loops.mean >= 2.2
    assert report.looped_share == pytest.approx(pair.card["acceptance"]["looped_share"], abs=0.05)
    assert report.coverage == pytest.approx(pair.card["acceptance"]["coverage"], abs=0.05)
