"""Token parity with Hugging Face, teacher-forced, on a pair whose drafts are accepted now and then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from agreeing_pairs import write_agreeing_pair
from random_pairs import write_random_pair
from rings import slow_from

from lab import pairs
from lab.errors import ExperimentError
from lab.parity import inputs, run_stage_parity, run_token_parity

pytestmark = pytest.mark.reference

Pair = tuple[Path, Path]
PROMPTS = [[5, 17, 99, 230, 301, 44, 8, 412, 77], [1, 2, 3, 4, 5], [9, 8, 7]]


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_agreeing_pair(tmp_path_factory.mktemp("agreeing"))


@pytest.mark.parametrize("ks", slow_from(1, [[1, 4, 8], [2, 3, 5, 6, 7]]))
def test_float64_tokens_equal_hugging_faces_and_plain_decodings_at_every_depth(agreeing: Pair, ks: list[int]) -> None:
    report = run_token_parity(*agreeing, prompts=PROMPTS, dtype="float64", ks=ks, max_new_tokens=16, batch=3)
    assert report.passed, report.verdict
    assert report.near_tie_gap == 0.0
    assert report.n_equal_outputs == len(ks) * len(PROMPTS)
    n_positions = sum(row.n_positions for row in report.rows)
    assert sum(row.n_equal for row in report.rows) == n_positions == (len(ks) + 1) * len(PROMPTS) * 16


def test_float32_tokens_agree_and_the_gap_of_a_near_tie_is_small(agreeing: Pair) -> None:
    report = run_token_parity(*agreeing, prompts=PROMPTS, ks=(1, 3), max_new_tokens=24, batch=2)
    assert report.passed, report.verdict
    assert 0 < report.near_tie_gap < 1e-3


def test_bfloat16_differences_are_near_ties_and_counted(agreeing: Pair) -> None:
    report = run_token_parity(*agreeing, prompts=PROMPTS, dtype="bfloat16", ks=(3,), max_new_tokens=24)
    assert report.n_bugs == 0, report.verdict
    assert all(row.divergence in ("equal", "near-tie") for row in report.rows)


def test_an_end_token_does_not_shorten_the_comparison(tmp_path: Path) -> None:
    pair = write_random_pair(tmp_path, eos=list(range(512)))
    report = run_token_parity(*pair, prompts=PROMPTS[:1], ks=(1,), max_new_tokens=6)
    assert [row.n_positions for row in report.rows] == [6, 6]


def test_a_wrong_target_is_a_bug_at_the_first_position_it_shows(agreeing: Pair) -> None:
    report = run_token_parity(*agreeing, prompts=PROMPTS[:1], ks=(1,), max_new_tokens=8, fault="rolled_target_head")
    assert not report.passed
    assert report.rows[0].bugs[0] == 0


def test_a_wrong_draft_changes_no_token(agreeing: Pair) -> None:
    report = run_token_parity(*agreeing, prompts=PROMPTS, ks=(3,), max_new_tokens=12, fault="swapped_concat")
    assert report.passed, report.verdict


def test_depths_must_be_given(agreeing: Pair) -> None:
    with pytest.raises(ExperimentError, match="ks is"):
        run_token_parity(*agreeing, prompts=PROMPTS, ks=())


def test_a_target_without_a_tokenizer_gets_seeded_random_prompts(agreeing: Pair) -> None:
    given = inputs.prompt_ids(agreeing[0], "", n_prompts=5, max_tokens=20)
    assert given.ids == inputs.prompt_ids(agreeing[0], "", n_prompts=5, max_tokens=20).ids
    assert [len(ids) for ids in given.ids] == [20, 12, 20, 5, 20]
    assert "no tokenizer" in given.source
    assert all(0 <= token < 512 for ids in given.ids for token in ids)


def test_a_pair_is_named_whole_or_not_at_all(agreeing: Pair) -> None:
    assert inputs.chosen_pair(str(agreeing[0]), str(agreeing[1])) == agreeing
    with pytest.raises(ExperimentError, match="target was given without draft"):
        inputs.chosen_pair(str(agreeing[0]), "")
    with pytest.raises(ExperimentError, match=r"target folder .* does not exist"):
        inputs.chosen_pair(str(agreeing[0] / "absent"), str(agreeing[1]))
    with pytest.raises(ExperimentError, match="n_prompts is 0"):
        inputs.prompt_ids(agreeing[0], "", n_prompts=0, max_tokens=20)


@pytest.fixture(scope="module")
def held_out() -> tuple[Pair, list[list[int]]]:
    """The shipped pair and every third of its 64 held-out prompts, of all categories."""
    shipped = pairs.shipped_pair()
    given = inputs.prompt_ids(shipped.target, "", n_prompts=64, max_tokens=128)
    assert len(given.ids) == 64
    return (shipped.target, shipped.draft), given.ids[::6]


@pytest.mark.slow
def test_float64_speculation_equals_plain_decoding_at_every_depth_on_held_out_prompts(
    held_out: tuple[Pair, list[list[int]]],
) -> None:
    pair, prompts = held_out
    report = run_token_parity(*pair, prompts=prompts, dtype="float64", ks=range(1, 9), max_new_tokens=16, batch=16)
    assert report.passed, report.verdict
    assert report.n_equal_outputs == 8 * len(prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "ks", "max_new_tokens"),
    [
        ("float32", range(1, 9), 16),
        pytest.param("bfloat16", (1, 3, 8), 32, marks=pytest.mark.exhaustive),  # the packaged night asks it too
    ],
)
def test_every_divergence_on_held_out_prompts_is_a_near_tie(
    held_out: tuple[Pair, list[list[int]]], dtype: str, ks: Sequence[int], max_new_tokens: int
) -> None:
    pair, prompts = held_out
    report = run_token_parity(*pair, prompts=prompts, dtype=dtype, ks=ks, max_new_tokens=max_new_tokens, batch=16)
    assert report.passed, report.verdict
    assert all(row.divergence in ("equal", "near-tie") for row in report.rows)


def test_the_shipped_pairs_stages_agree_with_drafts_accepted() -> None:
    shipped = pairs.shipped_pair()
    given = inputs.prompt_ids(shipped.target, "", n_prompts=1, max_tokens=48)
    report = run_stage_parity(shipped.target, shipped.draft, prompts=given.ids, dtype="bfloat16", k=3, steps=3)
    assert report.passed, report.verdict
    assert "no tokenizer" not in given.source
