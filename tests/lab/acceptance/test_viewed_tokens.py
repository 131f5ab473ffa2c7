"""The tokens that are viewed are the engine's own, and the proposals beside them are the draft's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_pairs import write_random_pair

from eagle3core.pipeline import load_tokenizer
from lab.acceptance.counts import DepthAcceptance
from lab.acceptance.measure import measure_acceptance
from lab.acceptance.token_views import Pieces, TokenViewer, bytes_of, extremes
from lab.figures import TokenView
from lab.figures.token_view import MOST_TOKENS
from lab.pairs.prompts import Prompt, prompts_from_ids
from lab.parity.inputs import chosen_pair

pytestmark = pytest.mark.reference

N_TOKENS, K = 24, 2  # shallow, so that some steps accept all and have a bonus


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Prompt], DepthAcceptance, list[TokenView]]:
    """Three prompts of a random pair over a vocabulary of four, three of them drafted."""
    torch.set_num_threads(1)
    pair = write_random_pair(tmp_path_factory.mktemp("pair"), vocab=4, draft_vocab=3)
    random = torch.Generator().manual_seed(1)
    prompts = prompts_from_ids([torch.randint(0, 4, (9 + i,), generator=random).tolist() for i in range(3)], "random")
    depth = measure_acceptance(*pair, prompts, (K,), max_new_tokens=N_TOKENS, ignore_eos=True).at(K)
    return prompts, depth, TokenViewer(*pair, prompts, depth).extremes(3)


def test_each_prompt_is_viewed_once_the_worst_first_and_the_best_behind(
    measured: tuple[list[Prompt], DepthAcceptance, list[TokenView]],
) -> None:
    _, depth, views = measured
    assert [view.place for view in views] == ["worst 1", "worst 2", "best 1"]
    lengths = [view.tokens_a_step for view in views]
    assert lengths == sorted(depth.per_prompt)  # type: ignore[type-var]
    assert extremes([2.0, None, 1.0, 3.0, 2.5], 1) == [("worst 1", 2), ("best 1", 3)]
    assert extremes([2.0, None, 1.0, 3.0, 2.5], 3) == [("worst 1", 2), ("worst 2", 0), ("best 1", 3), ("best 2", 4)]
    assert extremes([None], 3) == extremes([1.0, 2.0], 0) == []


def test_tokens_steps_and_kinds_are_what_the_engine_counted(
    measured: tuple[list[Prompt], DepthAcceptance, list[TokenView]],
) -> None:
    _, depth, views = measured
    order = [depth.per_prompt.index(view.tokens_a_step) for view in views]
    kinds: dict[str, int] = {}
    for i, view in zip(order, views, strict=True):
        response = depth.responses[i]
        assert [token.text for token in view.tokens] == [f"#{token}" for token in response.token_ids]
        steps = [token.step for token in view.tokens if token.step is not None]
        records = response.req_metrics.steps
        assert [steps.count(number) for number in range(1, len(records) + 1)] == [r.n_committed for r in records]
        for kind, n in view.counts().items():
            kinds[kind] = kinds.get(kind, 0) + n
        accepted = sum(min(record.n_accepted, record.n_committed) for record in records)
        assert view.counts().get("accepted", 0) == accepted
        assert view.n_left_out == 0
    assert kinds["first"] == 3, "one token of each prompt's own pass"
    assert {"accepted", "outside", "near", "bonus"} <= set(kinds), "or little is tested here"


def test_proposals_are_likeliest_first_and_agree_with_the_engines_decisions(
    measured: tuple[list[Prompt], DepthAcceptance, list[TokenView]],
) -> None:
    drafted = [token for view in measured[2] for token in view.tokens if token.position is not None]
    assert len(drafted) > 20
    for token in drafted:
        shares = [share for _, share in token.proposals]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1.0), "all of the draft vocabulary are shown"
        assert token.expected == token.rank, "the reference's order is the engine's"
        texts = [text for text, _ in token.proposals]
        assert (token.rank == 0) == (token.text not in texts)
        if token.rank:
            assert texts[token.rank - 1] == token.text
        assert (token.kind == "accepted") == (texts[0] == token.text)


@pytest.mark.slow
def test_a_long_continuation_is_cut_between_two_steps_and_says_how_much_is_left(tmp_path: Path) -> None:
    pair = write_random_pair(tmp_path, vocab=6, draft_vocab=4)
    prompts = prompts_from_ids([[1, 2, 3, 4]], "random")
    depth = measure_acceptance(*pair, prompts, (K,), max_new_tokens=MOST_TOKENS + 20, ignore_eos=True).at(K)
    (view,) = TokenViewer(*pair, prompts, depth).extremes(1)
    assert MOST_TOKENS - K <= len(view.tokens) <= MOST_TOKENS
    assert view.n_left_out == MOST_TOKENS + 20 - len(view.tokens)
    starts = {record.start for record in depth.responses[0].req_metrics.steps}
    assert len(view.tokens) in starts


def test_pieces_join_to_the_text_and_parts_of_a_character_are_bytes() -> None:
    tokenizer = load_tokenizer(chosen_pair("", "")[0])
    pieces = Pieces(tokenizer)
    text = "def main():\n    return  [1, 'two words']\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    given = [pieces.of(token, before) for token, before in zip(ids, [None, *ids], strict=False)]
    assert "".join(given) == text
    rare = tokenizer.encode("\U0001f9ea", add_special_tokens=False)
    shown = "".join(pieces.of(token, None) for token in rare)
    assert shown.replace("⟩⟨", " ") == "⟨F0 9F A7 AA⟩"
    assert bytes_of("<0xE2>") == "⟨E2⟩"
    assert bytes_of("▁the") == ""
    assert len(pieces.of(tokenizer.encode(" " * 8, add_special_tokens=False)[0], None)) <= 40
