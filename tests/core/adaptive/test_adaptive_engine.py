"""Whatever depth a step has, tokens are those of plain decoding, and the draft goes on as if it had never paused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import slow_but
from stepping import QUIET, admit, assert_state_is_true, start
from tiny_engines import (
    Pair,
    accepted_counts,
    drafting_engine,
    drawn_alone,
    engine_config,
    is_empty,
    new_tokens,
    plain_engine,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import ConfigError, Engine, ForcedAcceptance, RejectionAcceptance, RelaxedAcceptance, SpeculativeConfig
from eagle3core.acceptance import AcceptanceRule
from eagle3core.adaptive import Choice, History, Moment, StepCurve
from eagle3core.kernels.slots.slot_state import LENGTH
from eagle3core.metrics import SpeculativeDecodingStats
from eagle3core.step.run import DeviceRunner

pytestmark = pytest.mark.reference

LENGTHS = [5, 9, 3, 12, 7]
N_NEW = 30
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "deep chain": {"num_speculative_tokens": 8},
    "dynamic tree": {"use_dynamic_tree": True, "num_speculative_tokens": 3, "dynamic_tree_max_top_k": 3,
                     "max_decoding_tokens": 8},
    "fixed tree": {"choices": [[0], [1], [0, 0], [0, 1], [1, 0]]},
    "small model": {"method": "draft_target", "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


def adaptive_engine(
    pair: Pair, way: str = "chain", seed: int | None = None, acceptance: AcceptanceRule | None = None, **changes: Any
) -> Engine:
    """An engine that chooses each step's depth; with a seed by chance."""
    model = {"model": str(pair[0])} if way == "small model" else {}
    made = drafting_engine(pair, {**WAYS[way], **model, "adaptive": True, "acceptance": acceptance}, **changes)
    if seed is not None:
        assert made.book.depths is not None
        made.book.depths.choose = by_chance(random.Random(seed))
    return made


def by_chance(draw: random.Random) -> Any:
    """Half of all steps at any depth that is allowed, half without drafts, so that several of these follow."""

    def choose(curve: StepCurve, history: History, moment: Moment) -> Choice:
        return Choice(draw.choice(moment.depths) if draw.random() < 0.5 else 0, "by chance", 1.0, 0.0, 1.0)

    return choose


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("way", slow_but(["chain", "dynamic tree", "ngram"], WAYS))
def test_any_depth_in_any_step_gives_plain_decodings_tokens(pair: Pair, way: str, seed: int) -> None:
    prompts = random_prompts(LENGTHS, seed=seed)
    expected = plain_tokens(pair, prompts, N_NEW)
    made = adaptive_engine(pair, way, seed)
    responses = made.generate(prompts, new_tokens(N_NEW))
    assert tokens_of(responses) == expected
    assert is_empty(made)
    assert made.book.depths is not None
    depths = {depth for depth, _ in made.book.depths.counts}
    assert depths == ({0, 1, 2, 3} if way in ("chain", "small model", "ngram") else depths)
    assert len(depths) > 1
    assert accepted_counts(responses) >= {0, 1}


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 0.8]), prefix_cache=st.booleans())
def test_drawn_tokens_and_cached_beginnings_are_the_same_too(
    pair: Pair, seed: int, temperature: float, prefix_cache: bool
) -> None:
    prompts = random_prompts([6, 6, 11, 4], seed=seed)
    prompts[1] = [*prompts[0][:5], 1]
    limits, alone = drawn_alone(pair, prompts, 24, temperature, seed)
    made = adaptive_engine(pair, "chain", seed, prefix_cache=prefix_cache, cache_blocks=24)
    for _ in range(2):
        assert tokens_of(made.generate(prompts, limits)) == alone


def test_the_policy_itself_gives_plain_decodings_tokens(pair: Pair) -> None:
    prompts = random_prompts(LENGTHS)
    expected = plain_tokens(pair, prompts, N_NEW)
    assert tokens_of(adaptive_engine(pair).generate(prompts, new_tokens(N_NEW))) == expected


def stepped(runner: DeviceRunner, depth: int, sequences: list[list[int]]) -> list[list[int]]:
    """One step of every slot; the drafts of each."""
    runner.enqueue(len(sequences), 0, QUIET, depth=depth)
    [outcome] = runner.collect(everything=True)
    for row in outcome.rows:
        sequences[row.slot] += row.tokens
    return [row.drafts for row in outcome.rows]


def test_after_every_step_the_caches_and_what_the_draft_has_not_read_are_a_fresh_engines(pair: Pair) -> None:
    made, fresh, draw = adaptive_engine(pair), tiny_engine(pair, 3), random.Random(5)
    sequences, kinds = start(made, random_prompts(LENGTHS[:3])), set()
    for _ in range(26):
        depth = draw.choice([0, 0, 0, 0, 0, 1, 2, 3])
        kinds.add(made.runner.kind_for(depth))
        stepped(made.runner, depth, sequences)
        assert_state_is_true(made, fresh, sequences)
    assert kinds == {-1, 0, 1, 2, 3}


@pytest.mark.parametrize(
    ("way", "n_paused"),
    slow_but(
        [("chain", 1), ("chain", 17), ("small model", 8)],
        [(way, n) for way in ("chain", "small model") for n in (1, 8, 17)],
    ),
)
def test_drafts_after_a_pause_are_those_of_an_engine_that_never_paused(pair: Pair, way: str, n_paused: int) -> None:
    """Which has read the whole text at once."""
    made, other = adaptive_engine(pair, way), adaptive_engine(pair, way)
    sequences, n_compared = start(made, random_prompts([9], seed=3)), 0
    for depth in (3, *[0] * n_paused, 3, 3, 3, 2, 1):
        [[*before]] = sequences
        [drafts] = stepped(made.runner, depth, sequences)
        if drafts:
            assert admit(other.runner, 0, before[:-1]) == before[-1]
            other.runner._unread.forget()
            assert stepped(other.runner, len(drafts), [before]) == [drafts]
            other.runner.release(0)
            n_compared += 1
    assert n_compared >= 4


@pytest.mark.parametrize("fault", ["reads nothing", "reads one entry less", "keeps them in one place"])
def test_a_wrong_reading_after_a_pause_is_found(pair: Pair, fault: str) -> None:
    made, fresh = adaptive_engine(pair), tiny_engine(pair, 3)
    sequences = start(made, random_prompts(LENGTHS[:2]))

    def spoil() -> None:
        state, runner = made.runner.state, made.runner
        if fault == "reads nothing" and runner._unread.most > 2:
            runner._unread.most = 1
        elif fault == "reads one entry less":
            state.pending_tokens[:, 1:2] = (state.pending_tokens[:, 1:2] + 1) % 6
        elif fault == "keeps them in one place":
            for captured in state.captured:
                captured[made.runner.sizes.kept_row :] = captured[made.runner.sizes.kept_row]

    def after_the_pause() -> None:
        for depth in (3, 0, 0, 0, 0, 0, 0, 3, 3):
            spoil()
            stepped(made.runner, depth, sequences)
        assert_state_is_true(made, fresh, sequences)

    with pytest.raises((AssertionError, IndexError)):  # a wrong state, or a row that is read beyond those there are
        after_the_pause()


@pytest.mark.parametrize("way", ["chain", "dynamic tree", "ngram"])
def test_a_request_uses_as_many_drafts_as_it_says_and_others_all(pair: Pair, way: str) -> None:
    prompts, most = random_prompts(LENGTHS), [0, 1, 2, None, 7]
    expected = plain_tokens(pair, prompts, N_NEW)
    made = drafting_engine(pair, WAYS[way])
    responses = made.generate(prompts, [new_tokens(N_NEW, max_draft_tokens=n) for n in most])
    assert tokens_of(responses) == expected
    for n, response in zip(most, responses, strict=True):
        assert max(step.n_accepted for step in response.req_metrics.steps) <= (3 if n is None else min(n, 3))
        if way == "chain":
            assert {step.n_draft for step in response.req_metrics.steps} == {3 if n is None else min(n, 3)}
    assert any(step.n_accepted > 1 for step in responses[3].req_metrics.steps)


def test_prompts_that_share_a_pass_bring_their_own_numbers_of_drafts(pair: Pair) -> None:
    prompts, most = random_prompts([9, 3, 12]), [0, 2, None]
    made = drafting_engine(pair, WAYS["chain"], prefill_chunk=192, block_size=64)
    responses = made.generate(prompts, [new_tokens(N_NEW, max_draft_tokens=n) for n in most])
    assert made.book.n_passes == 1
    assert tokens_of(responses) == plain_tokens(pair, prompts, N_NEW)
    drafted = [{step.n_draft for step in response.req_metrics.steps} for response in responses]
    assert drafted == [{0}, {2}, {3}]


@pytest.mark.parametrize("way", slow_but(["chain", "ngram"], ["chain", "fixed tree", "small model", "ngram"]))
def test_a_strict_rule_of_acceptance_gives_plain_decodings_tokens_at_any_depth(pair: Pair, way: str) -> None:
    prompts = random_prompts(LENGTHS)
    expected = plain_tokens(pair, prompts, N_NEW)
    made = adaptive_engine(pair, way, 4, acceptance=RelaxedAcceptance(1, 0.0))
    assert tokens_of(made.generate(prompts, new_tokens(N_NEW))) == expected


@pytest.mark.parametrize("way", ["chain", "fixed tree", "small model"])  # a grown tree may be less deep
def test_a_rule_that_lets_everything_through_accepts_every_draft_of_any_depth(pair: Pair, way: str) -> None:
    made = adaptive_engine(pair, way, 4, acceptance=RelaxedAcceptance(10**6, 1e9))
    responses = made.generate(random_prompts(LENGTHS), new_tokens(N_NEW))
    steps = [step for response in responses for step in response.req_metrics.steps if not step.cut]
    assert [step.n_accepted for step in steps] == [step.depth for step in steps]
    assert len({step.depth for step in steps}) > 1


def test_sampled_drafts_are_the_same_for_a_seed_where_a_request_uses_fewer(pair: Pair) -> None:
    prompts = random_prompts(LENGTHS[:3])
    made = drafting_engine(pair, {**WAYS["chain"], "acceptance": RejectionAcceptance()})
    most = [0, 1, 2]
    limits = [new_tokens(20, temperature=0.8, seed=n, max_draft_tokens=n) for n in most]
    together = made.generate(prompts, limits)
    alone = [made.generate([prompt], [limit])[0] for prompt, limit in zip(prompts, limits, strict=True)]
    assert tokens_of(together) == tokens_of(alone)
    for n, response in zip(most, together, strict=True):
        assert max(step.n_accepted for step in response.req_metrics.steps) <= n
    # Without drafts nothing is rejected: the tokens are the target's own draws.
    assert tokens_of(together)[0] == tokens_of(plain_engine(pair).generate(prompts[:1], limits[:1]))[0]


def test_a_forced_length_refuses_a_request_of_fewer_drafts(pair: Pair) -> None:
    made = drafting_engine(pair, {**WAYS["chain"], "acceptance": ForcedAcceptance(length=3)})
    with pytest.raises(ConfigError, match="max_draft_tokens is 1 with acceptance forced to 3"):
        made.generate([[1, 2]], new_tokens(8, max_draft_tokens=1))
    assert is_empty(made)


def test_no_more_is_drafted_than_somebody_uses(pair: Pair) -> None:
    made = adaptive_engine(pair, seed=1)
    made.generate(random_prompts(LENGTHS), new_tokens(N_NEW, max_draft_tokens=1))
    assert made.book.depths is not None
    assert {depth for depth, _ in made.book.depths.counts} == {0, 1}


def test_each_steps_depth_is_told_and_rates_are_over_it(pair: Pair) -> None:
    made = adaptive_engine(pair, seed=2)
    responses = made.generate(random_prompts(LENGTHS), new_tokens(N_NEW))
    stats = SpeculativeDecodingStats(3)
    for response in responses:
        steps, info = response.req_metrics.steps, response.req_metrics.spec_info
        assert info is not None
        assert all(step.depth == step.n_draft for step in steps)
        complete = [step for step in steps if not step.cut]
        drafted, accepted = sum(s.n_draft for s in complete), sum(s.n_accepted for s in complete)
        assert info.mean_acceptance_rate == pytest.approx(accepted / drafted)
        assert sum(info.depth_histogram or ()) == info.n_complete
        stats.update_from_output(response)
    assert sum(stats.depth_histogram) == sum(stats.accepted_histogram)


def test_an_engine_without_it_has_no_further_programs_and_keeps_nothing(pair: Pair) -> None:
    usual, other = tiny_engine(pair, 3), adaptive_engine(pair)
    assert list(usual.runner.kinds) == [3]
    assert sorted(other.runner.kinds) == [-1, 0, 1, 2, 3]
    assert usual.book.depths is None
    n_slots, kept = usual.runner.n_slots, other.runner.sizes.n_kept
    rows = [engine.runner.state.captured[0].shape[0] for engine in (usual, other)]
    assert rows[1] - rows[0] == n_slots * kept


def test_times_come_with_the_results_and_only_between_steps_that_follow_each_other(pair: Pair) -> None:
    runner = adaptive_engine(pair).runner
    admit(runner, 0, [1, 2, 3])
    took = []
    for n in range(4):
        if n == 2:
            admit(runner, 1, [3, 2])
        runner.enqueue(2, n, QUIET, depth=1)
        [outcome] = runner.collect(everything=True)
        took.append(outcome.took_us)
    assert [us is None for us in took] == [True, False, True, False]
    assert all(us > 0 for us in took if us is not None)
    assert int(runner.state.state[LENGTH, 0]) > 3


def test_a_draft_directory_that_is_not_there_leaves_plain_decoding(pair: Pair, tmp_path: Path) -> None:
    spec = SpeculativeConfig(model=str(tmp_path / "none"), adaptive=True)
    config = engine_config(pair, None, speculative_config=spec, on_draft_failure="baseline")
    made, plain = Engine.from_pretrained(pair[0], config), tiny_engine(pair, None)
    assert made.book.depths is None
    asked = ([[1, 2]], new_tokens(4))
    assert tokens_of(made.generate(*asked)) == tokens_of(plain.generate(*asked))
