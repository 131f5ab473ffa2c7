"""Prompts that arrive together are read in common passes, and every request gets what it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_engines import BY_MEANING, device_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lettered import MOST_NEW, N_LETTERS, lettered_engine
from rings import slow_but
from test_prompts_between_steps import decode, recorded
from tiny_engines import Pair, is_empty, new_tokens, random_prompts, tokens_of

from eagle3core import Engine, Response, SpeculativeConfig
from eagle3core.step.run import DeviceRunner
from eagle3core.trace import RecordingTrace

pytestmark = pytest.mark.reference

SHORT = 20  # prompts that arrive together
N_SPANS = 8


def short_prompts() -> list[list[int]]:
    """Twenty prompts of 1 to 64 tokens."""
    draw = random.Random(7)
    return random_prompts([1, 64, 63, *(draw.randint(2, 64) for _ in range(SHORT - 3))], n_vocab=N_LETTERS, seed=9)


def wide_engine(pair: Pair, k: int | None, n_slots: int = 24, **changes: Any) -> Engine:
    """An engine whose passes have eight spans of 64 tokens."""
    return lettered_engine(pair, k, n_slots, session_len=256, prefill_chunk=64 * N_SPANS, **changes)


def narrow_engine(pair: Pair, k: int | None, *, span: int, n_spans: int, n_slots: int, **changes: Any) -> Engine:
    """An engine in fp64 whose passes have spans of a few tokens, so that prompts of a few tokens take several."""
    made = lettered_engine(pair, k, n_slots, prefill_chunk=span * n_spans, block_size=4, **changes)
    old = made.runner
    sizes = replace(old.sizes, span=span)
    runner = DeviceRunner(old.target, old.draft, sizes, arch=None, replayer=BY_MEANING, n_behind=old.n_behind)
    return Engine(old.target, old.draft, made.config, runner=runner, tokenizer=made.tokenizer)


@pytest.fixture(scope="module")
def short_alone(letters: Pair) -> list[list[int]]:
    """What each short prompt gives by itself, without drafts, read in passes of its own."""
    engine = lettered_engine(letters, None, 1, session_len=256, prefill_chunk=32)
    return [tokens_of(engine.generate([prompt], new_tokens(MOST_NEW)))[0] for prompt in short_prompts()]


@pytest.mark.parametrize("k", slow_but([3], [None, 3]))
def test_twenty_short_prompts_beside_running_requests_take_three_passes_and_get_what_they_get_alone(
    letters: Pair, alone: list[list[int]], short_alone: list[list[int]], k: int | None
) -> None:
    engine, running = wide_engine(letters, k), random_prompts([3, 9], n_vocab=N_LETTERS, seed=2)
    runs = [engine.add_request(prompt, new_tokens(100)) for prompt in running]
    for _ in range(3):
        engine.step()
    assert engine.book.n_passes == 1, "the two were read together"
    recorder = recorded(engine)
    handles = [engine.add_request(prompt, new_tokens(MOST_NEW)) for prompt in short_prompts()]
    while engine.step():
        pass
    assert engine.book.n_passes == 1 + 3
    assert recorder.order.count("c") == recorder.order.count("f") == 3
    assert [handle.token_ids for handle in handles] == short_alone
    one = wide_engine(letters, None, n_slots=1)
    assert [handle.token_ids for handle in runs] == tokens_of(
        [one.generate([prompt], new_tokens(100))[0] for prompt in running]
    )
    assert is_empty(engine)


def test_of_running_requests_and_prompts_that_came_together_each_gets_its_share(letters: Pair) -> None:
    engine = wide_engine(letters, None, prefill_share=0.5)
    engine.add_request([1, 2, 3], new_tokens(100))
    engine.step()
    recorder = recorded(engine)
    for prompt in short_prompts():
        engine.add_request(prompt, new_tokens(60))
    while recorder.order.count("c") < 3:
        engine.step()
    # A pass of 512 rows owes eight steps of up to 64 rows.
    assert recorder.order.startswith("cf" + "s" * 8 + "cf" + "s" * 8 + "cf")


def test_logits_are_those_of_each_prompt_alone(letters: Pair) -> None:
    prompts, trace = short_prompts(), RecordingTrace()
    engine = wide_engine(letters, 2)
    engine.trace = trace
    engine.generate(prompts, new_tokens(1))
    together = trace.tensors["prefill/target.head"]
    assert len(together) == SHORT
    for prompt, row in zip(prompts, together, strict=True):
        single = wide_engine(letters, 2, n_slots=1)
        single.trace = own = RecordingTrace()
        single.generate([prompt], new_tokens(1))
        torch.testing.assert_close(row, own.tensors["prefill/target.head"][0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", slow_but([3], [None, 3]))
def test_bits_are_those_of_each_prompt_alone_where_kernels_run(nano_pair: Pair, k: int | None) -> None:
    """The kernels' programs, each call computed by its definition: eight spans of eight tokens."""
    prompts = random_prompts([5, 30, 8, 9, 1, 64, 20], n_vocab=256)

    def bits(given: list[list[int]]) -> tuple[list[Response], list[torch.Tensor], Engine]:
        engine = device_engine(nano_pair, k, BY_MEANING, n_slots=4, trace=(trace := RecordingTrace()))
        responses = engine.generate(given, new_tokens(12))
        return responses, list(trace.tensors["prefill/target.head"].view(torch.int16)), engine

    responses, rows, engine = bits(prompts)
    # 1, 4, 1 and 2 spans, then one of 1 and 7 of 8, and so on: seven prompts alone would take seven passes.
    assert engine.book.n_passes < len(prompts)
    for prompt, got, row in zip(prompts, responses, rows, strict=True):
        [alone], [own], _ = bits([prompt])
        assert got.token_ids == alone.token_ids
        assert torch.equal(row, own)
        steps = [[step.n_accepted for step in one.req_metrics.steps] for one in (got, alone)]
        assert steps[0] == steps[1], "the draft read the same of its prompt"
        assert k is None or any(steps[0])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_prompts_of_any_length_that_arrive_at_any_round_get_what_they_get_alone(letters: Pair, data: Any) -> None:
    """Long and short ones, cached beginnings, blocks that run out, drawn and greedy ones, with drafts or without."""
    shape = {"span": data.draw(st.sampled_from([1, 3, 4])), "n_spans": data.draw(st.sampled_from([2, 5, 8]))}
    span = 4 if shape["span"] == 3 else shape["span"]
    engine = narrow_engine(
        letters, data.draw(st.sampled_from([None, 2])), span=span, n_spans=4 * shape["n_spans"] // span,
        n_slots=data.draw(st.sampled_from([1, 3, 6])), prefill_share=data.draw(st.sampled_from([0.3, 1.0])),
        prefix_cache=data.draw(st.booleans()), cache_blocks=data.draw(st.sampled_from([None, 20])),
    )  # fmt: skip
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    common = random_prompts([40], n_vocab=N_LETTERS, seed=1)[0]
    own = random_prompts(lengths, n_vocab=N_LETTERS, seed=data.draw(st.integers(0, 3)))
    prompts = [[*common[: data.draw(st.sampled_from([0, 0, 8, 13]))], *prompt][:44] for prompt in own]
    limits = [
        new_tokens(data.draw(st.integers(1, 10)), **data.draw(st.sampled_from([{}, {"temperature": 0.8, "seed": 5}])))
        for _ in prompts
    ]
    rounds = [data.draw(st.sampled_from([0, 0, 1, 4])) for _ in prompts]
    handles, number, is_busy = {}, 0, True
    while is_busy or len(handles) < len(prompts):
        for i, at in enumerate(rounds):
            if at == number:
                handles[i] = engine.add_request(prompts[i], limits[i])
        is_busy = engine.step()
        number += 1
    alone = lettered_engine(letters, None, 1)
    for i, prompt in enumerate(prompts):
        assert handles[i].token_ids == tokens_of(alone.generate([prompt], limits[i]))[0], i
    assert is_empty(engine)


def test_a_prompt_that_a_pass_cuts_goes_on_with_others_beside_it(letters: Pair) -> None:
    engine = narrow_engine(letters, 2, span=4, n_spans=4, n_slots=4)
    prompts = random_prompts([30, 6, 3, 44], n_vocab=N_LETTERS, seed=4)
    recorder = recorded(engine)
    tokens = decode(engine, [(0, prompt, 5) for prompt in prompts])
    # Spans 8 = 4 + 4; then 2 + 1 and the first of 11; then 4, 4 and 2 of it.
    assert recorder.order.startswith("ccf" + "cf" + "cccf" + "s")
    single = narrow_engine(letters, None, span=4, n_spans=1, n_slots=1)
    assert tokens == [tokens_of(single.generate([prompt], new_tokens(5)))[0] for prompt in prompts]


@pytest.mark.parametrize("method", ["draft_target", "ngram"])
def test_other_ways_to_draft_share_passes_too(letters: Pair, short_alone: list[list[int]], method: str) -> None:
    model = str(letters[0]) if method == "draft_target" else None
    spec = SpeculativeConfig(method=method, model=model, num_speculative_tokens=3)
    engine = wide_engine(letters, None, speculative_config=spec)
    if method == "ngram":
        engine.runner.n_behind = 0
    assert tokens_of(engine.generate(short_prompts(), new_tokens(MOST_NEW))) == short_alone
    assert engine.book.n_passes == 3


def test_each_of_the_prompts_that_end_in_a_pass_gets_its_own_log_probabilities(letters: Pair) -> None:
    prompts = short_prompts()[:8]
    limits = [new_tokens(3, logprobs=True) if i % 2 else new_tokens(3) for i in range(8)]
    engine, single = wide_engine(letters, None), wide_engine(letters, None, n_slots=1)
    responses = engine.generate(prompts, limits)
    assert engine.book.n_passes == 1
    for prompt, limit, response in zip(prompts, limits, responses, strict=True):
        [own] = single.generate([prompt], limit)
        assert (response.logprobs is None) == (own.logprobs is None)
        if own.logprobs is not None and response.logprobs is not None:
            got, wanted = ([token.logprob for token in each.logprobs] for each in (response, own))
            assert got == pytest.approx(wanted, rel=1e-9)


def test_one_that_is_cancelled_between_passes_leaves_the_others_alone(
    letters: Pair, short_alone: list[list[int]]
) -> None:
    engine, prompts = wide_engine(letters, None, prefill_share=0.5), short_prompts()
    handles = [engine.add_request(prompt, new_tokens(MOST_NEW)) for prompt in prompts]
    assert not engine.advance()
    assert engine.cancel(handles[2].id), "it runs"
    assert engine.cancel(handles[12].id), "it waits"
    while engine.step():
        pass
    for i, handle in enumerate(handles):
        assert handle.token_ids == ([] if i == 12 else short_alone[i][: len(handle.token_ids)])
        assert handle.finish_reason == ("cancelled" if i in (2, 12) else "length")


def test_prompts_alone_take_the_largest_passes_and_beside_running_requests_smaller_ones(
    letters: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, long = wide_engine(letters, None, prefill_share=0.2), random_prompts([250], n_vocab=N_LETTERS)[0]
    rows, read_on = list[int](), engine.runner.read_on

    def noted(*given: Any) -> int:
        rows.append(read_on(*given))
        return rows[-1]

    monkeypatch.setattr(engine.runner, "read_on", noted)
    first = engine.add_request(long, new_tokens(6))
    engine.step()
    second = engine.add_request(long, new_tokens(6))
    while engine.step():
        pass
    assert rows == [256, 128, 128], "a share of a fifth allows 128 rows"
    assert first.token_ids == second.token_ids
