"""Log-probabilities of committed tokens are those of the naive oracle, whatever drafted them and whoever ran beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_engines import engine_by_meaning
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Target
from rings import slow_but
from tiny_engines import (
    DYNAMIC_TREE,
    FIXED_TREE,
    N_VOCAB,
    Pair,
    accepted_counts,
    drafting_engine,
    is_empty,
    new_tokens,
    plain_engine,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import ConfigError, Engine, Response, TokenLogprob
from eagle3core.config import MOST_LOGPROBS
from eagle3core.step.outcome import keep_logprobs, new_kept_logprobs
from eagle3core.trace import RecordingTrace

pytestmark = pytest.mark.reference

LENGTHS = [3, 9, 1, 17]
N_NEW = 14
WAYS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "fixed tree": FIXED_TREE,
    "dynamic tree": DYNAMIC_TREE,
}


def named_engine(pair: Pair, way: str, **changes: Any) -> Engine:
    return drafting_engine(pair, WAYS[way], **changes)


def assert_the_oracles(pair: Pair, prompts: list[list[int]], responses: list[Response], n_top: int) -> None:
    """Every token's own and its likeliest tokens, along the sequence of the response itself."""
    target = Target(pair[0])
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.logprobs is not None
        assert [each.token_id for each in response.logprobs] == response.token_ids
        truth = target.logits([*prompt, *response.token_ids])[len(prompt) - 1 : -1].log_softmax(dim=1)
        for row, each in zip(truth, response.logprobs, strict=True):
            assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-9)
            n = min(n_top, len(row))
            best = row.sort(descending=True, stable=True)
            assert [i for i, _ in each.top] == best.indices[:n].tolist()
            assert [value for _, value in each.top] == pytest.approx(best.values[:n].tolist(), abs=1e-9)


@pytest.mark.parametrize("way", slow_but([None, 3, *WAYS], [None, 1, 2, 3, 5, 7, *WAYS]))
def test_every_committed_token_has_the_oracles(pair: Pair, way: int | str | None) -> None:
    prompts = random_prompts(LENGTHS)
    engine = named_engine(pair, way) if isinstance(way, str) else tiny_engine(pair, way)
    expected = plain_tokens(pair, prompts, N_NEW)
    responses = engine.generate(prompts, new_tokens(N_NEW, logprobs=3))
    assert tokens_of(responses) == expected
    assert_the_oracles(pair, prompts, responses, 3)
    assert way is None or len(accepted_counts(responses)) > 1, "steps of several tokens, and of one"
    assert is_empty(engine)


@settings(max_examples=3)
@given(
    st.lists(st.tuples(st.sampled_from([False, True, 1, 4, 20]), st.sampled_from([0.0, 1.2])), min_size=4, max_size=4),
    st.sampled_from([None, 2, *WAYS]),
    st.integers(1, 3),
)
def test_who_asks_for_what_changes_no_token_and_nobody_elses_answer(
    pair: Pair, asked: list[tuple[bool | int, float]], way: int | str | None, n_slots: int
) -> None:
    prompts = random_prompts(LENGTHS)
    draws = [{"temperature": heat, "seed": i} if heat else {} for i, (_, heat) in enumerate(asked)]
    limits = [new_tokens(9 + i, logprobs=n, **draws[i]) for i, (n, _) in enumerate(asked)]
    changes = {"max_batch_size": n_slots}
    engine = named_engine(pair, way, **changes) if isinstance(way, str) else tiny_engine(pair, way, **changes)
    responses = engine.generate(prompts, limits)
    silent = [new_tokens(9 + i, **draws[i]) for i in range(4)]
    assert tokens_of(responses) == tokens_of(plain_engine(pair).generate(prompts, silent))
    for prompt, response, (n, _) in zip(prompts, responses, asked, strict=True):
        if n is False:
            assert response.logprobs is None
        else:
            assert_the_oracles(pair, [prompt], [response], int(n) if n is not True else 0)
    assert is_empty(engine)


def test_a_step_that_nobody_asks_in_runs_the_program_it_always_ran(pair: Pair) -> None:
    engine = tiny_engine(pair, 2)
    engine.generate(random_prompts([3, 4]), new_tokens(6))
    steps = engine.runner.steps
    assert (steps._asked, steps.logprobs) == ({}, None)
    engine.generate(random_prompts([3]), new_tokens(6, logprobs=True))
    assert {key[1:] for key in steps._asked} == {(None, False, True), (1, False, True)}


def test_they_end_with_the_tokens_at_a_stop_and_with_what_a_stream_gave(pair: Pair) -> None:
    prompt = random_prompts([9])[0]
    [whole] = tiny_engine(pair, 3).generate([prompt], new_tokens(N_NEW, logprobs=2))
    stop = whole.token_ids[4]
    at = whole.token_ids.index(stop) + 1
    engine = tiny_engine(pair, 3)
    stream = engine.stream(prompt, new_tokens(N_NEW, logprobs=2, stop_token_ids=(stop,)))
    given_so_far = []
    for token in stream:
        known = stream.handle.logprobs
        assert known is not None
        given_so_far.append(known[len(given_so_far)].token_id)
        assert given_so_far[-1] == token
    assert whole.logprobs is not None
    found = stream.response.logprobs
    assert found is not None
    assert [(one.token_id, pytest.approx(one.logprob, abs=1e-9)) for one in whole.logprobs[:at]] == [
        (one.token_id, one.logprob) for one in found
    ]


@pytest.mark.parametrize(("dtype", "wide"), [("float32", torch.float64), ("bfloat16", torch.float32)])
def test_in_other_dtypes_they_are_those_of_that_dtypes_logits_one_precision_up(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, wide: torch.dtype
) -> None:
    pair, trace = write_tiny_pair(tmp_path_factory.mktemp("wide"), vocab=40), RecordingTrace()
    engine = tiny_engine(pair, None, dtype=dtype, trace=trace)
    [response] = engine.generate(random_prompts([6], n_vocab=40), new_tokens(N_NEW, logprobs=20))
    names = ["prefill/target.head", *(f"step{i}/verify/target.head" for i in range(N_NEW - 1))]
    assert response.logprobs is not None
    for name, each in zip(names, response.logprobs, strict=True):
        row = trace.tensors[name][-1].to(wide).log_softmax(dim=0)
        assert each.logprob == float(row[each.token_id])
        assert [value for _, value in each.top] == row.sort(descending=True).values[:20].tolist()
        assert each.top[0][0] == each.token_id, "a greedy token is the likeliest"


def test_a_slot_that_goes_on_plainly_keeps_the_roots_and_other_blocks_are_left() -> None:
    logits = torch.randn(2 * 3, N_VOCAB, dtype=torch.float64)
    choices = torch.tensor([[4, 1, 2], [3, -1, -1]], dtype=torch.int32)
    path = torch.tensor([[0, 2], [0, -1]], dtype=torch.int32)
    kept = new_kept_logprobs(4, 2, N_VOCAB, torch.device("cpu"))
    keep_logprobs(logits, choices, path, torch.tensor([1], dtype=torch.int32), kept).meaning()
    truth = logits.log_softmax(dim=1)
    (first, second), (plain,) = kept.of(1, [[4, 2], [3]])
    assert (first.logprob, second.logprob, plain.logprob) == (
        float(truth[0, 4]),
        float(truth[2, 2]),
        float(truth[3, 3]),
    )
    assert second.top[0][1] == float(truth[2].max())
    assert second.with_top(1) == TokenLogprob(2, second.logprob, second.top[:1])
    assert not kept.values[0].any()
    assert not kept.values[1, 2:].any()


@pytest.mark.parametrize("wrong", [0, -1, MOST_LOGPROBS + 1, 1.5, "3", None])
def test_what_is_no_number_of_them_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="logprobs is "):
        new_tokens(3, logprobs=wrong)


def test_performance_mode_keeps_none(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(pair, 3)
    monkeypatch.setenv("EAGLE3_PERF_MODE", "1")
    with pytest.raises(ConfigError, match="logprobs is 2 in performance mode"):
        engine.generate(random_prompts([4]), new_tokens(3, logprobs=2))


def test_on_packed_weights_padding_is_no_token_and_drafts_change_no_choice(nano_pair: Pair) -> None:
    prompts = random_prompts([5, 11], n_vocab=256)
    limits = new_tokens(10, logprobs=20, ignore_eos=True)
    plain, drafted = (engine_by_meaning(nano_pair, k).generate(prompts, limits) for k in (None, 3))
    assert tokens_of(drafted) == tokens_of(plain)
    assert len(accepted_counts(drafted)) > 1
    for one, other in zip(plain, drafted, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        for each, same in zip(one.logprobs, other.logprobs, strict=True):
            assert each.top[0][0] == each.token_id == same.top[0][0]
            assert len({i for i, _ in each.top}) == 20
            assert all(0 <= i < 256 for i, _ in each.top)
            # Logits of bf16 have steps of 2^-5 about 8, and plain torch sums in an order of its own for each shape.
            assert same.logprob == pytest.approx(each.logprob, abs=2**-4)
