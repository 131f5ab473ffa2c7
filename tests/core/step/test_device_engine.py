"""The engine on the kernels' path: schedules, slots, stops and trees, each call computed in plain torch."""

from __future__ import annotations

import dataclasses
import gc
import logging
from pathlib import Path

import pytest
from device_engines import BY_MEANING, device_runner, engine_by_meaning, write_nano_pair
from rings import slow_but
from tiny_engines import Pair, accepted_counts, letter_tokenizer, new_tokens, random_prompts, tokens_of

from eagle3core import ConfigError, Engine, EngineConfig, GenerationConfig, InvariantViolated, SpeculativeConfig
from eagle3core.batching.step_log import ACTIVE_DEBUG_VARIABLE
from eagle3core.kernels.slots.slot_state import RUNNING
from eagle3core.step.admission import SlotRequest
from eagle3core.step.outcome import RowOutcome
from eagle3core.step.program import Program
from eagle3core.step.replay import EagerReplayer, Enqueue
from eagle3core.step.sizes import DeviceSizes, buckets
from eagle3core.step.tree import FlatTree, chain_tree
from eagle3core.trace import Trace

pytestmark = pytest.mark.reference

QUIET = Trace()


def test_weights_packed_for_another_block_size_are_refused(nano_pair: Pair) -> None:
    runner = device_runner(nano_pair, 2, BY_MEANING)
    target, draft = runner.target, runner.draft
    assert draft is not None
    spec = SpeculativeConfig(model=str(nano_pair[1]), num_speculative_tokens=2)
    config = EngineConfig(session_len=128, max_batch_size=2, device="cpu", block_size=32, speculative_config=spec)
    with pytest.raises(ConfigError, match="layer 0 of the target is packed for cache blocks of 64 tokens") as refused:
        Engine(target, draft, config, runner=runner)
    assert refused.value.remedy == "set block_size=64, or pack the weights with block=32"
    fitting = dataclasses.replace(config, block_size=64)
    Engine(target, draft, fitting, runner=runner)
    epilogue = dataclasses.replace(draft.layer.qkv.epilogue, block=32)
    layer = dataclasses.replace(draft.layer, qkv=dataclasses.replace(draft.layer.qkv, epilogue=epilogue))
    with pytest.raises(ConfigError, match="the draft is packed for cache blocks of 32 tokens"):
        Engine(target, dataclasses.replace(draft, layer=layer), fitting, runner=runner)


def test_plain_decoding_gives_the_tokens_of_plain_torch_in_fp32(
    nano_pair: Pair, prompts: list[list[int]], baseline: list[list[int]]
) -> None:
    config = EngineConfig(session_len=256, device="cpu", dtype="float32")
    exact = tokens_of(Engine.from_pretrained(nano_pair[0], config).generate(prompts, new_tokens(24)))
    agree = [next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), 24)
             for ours, theirs in zip(baseline, exact, strict=True)]  # fmt: skip
    assert sum(n == 24 for n in agree) >= 5, "sixteen-bit weights may turn a near-tie, once"
    assert min(agree) >= 4


@pytest.mark.parametrize(
    ("n_slots", "k"), slow_but([(1, 3), (5, 1), (5, 8)], [(n_slots, k) for n_slots in (1, 5) for k in (1, 3, 8)])
)
def test_any_depth_and_company_give_the_baselines_tokens(
    nano_pair: Pair, prompts: list[list[int]], baseline: list[list[int]], k: int, n_slots: int
) -> None:
    responses = engine_by_meaning(nano_pair, k, n_slots=n_slots).generate(prompts, new_tokens(24))
    assert tokens_of(responses) == baseline
    assert set(range(min(k, 2) + 1)) <= accepted_counts(responses)


def test_drafts_and_acceptances_are_those_of_plain_torch_in_fp32(nano_pair: Pair, prompts: list[list[int]]) -> None:
    ours = engine_by_meaning(nano_pair, 3).generate(prompts, new_tokens(16))
    config = dataclasses.replace(engine_by_meaning(nano_pair, 3).config, dtype="float32")
    theirs = Engine.from_pretrained(nano_pair[0], config).generate(prompts, new_tokens(16))
    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids == b.token_ids]
    assert len(same) >= 4, "a near-tie may turn in sixteen bits, seldom"
    assert sum(a.req_metrics == b.req_metrics for a, b in same) >= len(same) - 1
    assert len(accepted_counts(ours)) >= 3


def test_slots_that_fill_and_empty_in_the_middle_of_a_run_change_no_token(
    nano_pair: Pair, prompts: list[list[int]], baseline: list[list[int]]
) -> None:
    limits = [new_tokens(n) for n in (1, 24, 2, 5, 1, 13)]
    for k in (None, 3):
        responses = engine_by_meaning(nano_pair, k, n_slots=2).generate(prompts, limits)
        expected = [tokens[: limit.max_new_tokens] for tokens, limit in zip(baseline, limits, strict=True)]
        assert tokens_of(responses) == expected
        assert {response.finish_reason for response in responses} == {"length"}


def test_an_engine_gives_the_same_again_and_is_empty_between(
    nano_pair: Pair, prompts: list[list[int]], baseline: list[list[int]]
) -> None:
    made = engine_by_meaning(nano_pair, 3)
    for _ in range(2):
        assert tokens_of(made.generate(prompts, new_tokens(24))) == baseline
        assert made.runner.state.state[RUNNING].tolist() == [0, 0]


@pytest.mark.parametrize("k", [None, 3])
def test_end_tokens_stop_the_slot_on_the_device(
    nano_pair: Pair, prompts: list[list[int]], baseline: list[list[int]], k: int | None
) -> None:
    ends = tuple(dict.fromkeys(tokens[7] for tokens in baseline))
    expected = [tokens[: next(i for i, t in enumerate(tokens) if t in ends) + 1] for tokens in baseline]
    made = engine_by_meaning(nano_pair, k)
    responses = made.generate(prompts, GenerationConfig(max_new_tokens=24, stop_token_ids=ends))
    assert tokens_of(responses) == expected
    assert {response.finish_reason for response in responses} == {"stop"}


def test_stop_words_are_found_by_the_host_a_step_late_and_later_tokens_thrown_away(tmp_path: Path) -> None:
    pair = write_nano_pair(tmp_path, seed=5, vocab=16, draft_vocab=16)
    prompts = random_prompts([3, 9, 5], n_vocab=6)
    words = GenerationConfig(max_new_tokens=24, stop_words=("a", "b", "c", "d", "e"))
    got = {}
    for k in (None, 3):
        made = engine_by_meaning(pair, k, tokenizer=letter_tokenizer())
        got[k] = tokens_of(made.generate(prompts, words))
        plain = tokens_of(engine_by_meaning(pair, k).generate(prompts, new_tokens(24)))
        assert [full[: len(cut)] for full, cut in zip(plain, got[k], strict=True)] == got[k]
        assert made.runner.state.state[RUNNING].tolist() == [0, 0]
    assert got[None] == got[3]
    assert any(len(tokens) < 24 for tokens in got[3])


def test_buckets_are_one_to_four_then_powers_of_two_and_the_most() -> None:
    sizes = [buckets(DeviceSizes(n, 64, 64, chain_tree(0))) for n in (1, 2, 3, 8, 12)]
    assert sizes == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 8], [1, 2, 3, 4, 8, 12]]


def test_the_batch_shrinks_with_the_slots_that_run(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, None, n_slots=4)
    batches = {id(program): batch for batch, program in made.runner.programs.items()}
    used: list[int] = []

    class Noting(EagerReplayer):
        def whole(self, program: Program) -> Enqueue:
            enqueue, batch = super().whole(program), batches.get(id(program))

            def run() -> None:
                if batch is not None:
                    used.append(batch)
                enqueue()

            return run

    made.runner.replay_by(Noting())
    made.generate(random_prompts([3, 3, 3, 3], n_vocab=256), [new_tokens(n) for n in (3, 6, 9, 12)])
    assert used == sorted(used, reverse=True)
    assert set(used) == {4, 3, 2, 1}


def test_active_slots_are_logged_every_step_when_asked_for(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine_by_meaning(nano_pair, None, n_slots=2)
    prompts, limits = random_prompts([3, 9], n_vocab=256), [new_tokens(2), new_tokens(4)]
    with caplog.at_level(logging.INFO, "eagle3core"):
        made.generate(prompts, limits)
        assert "[Active]" not in caplog.text
        monkeypatch.setenv(ACTIVE_DEBUG_VARIABLE, "1")
        made.generate(prompts, limits)
    lines = [record.message for record in caplog.records if "[Active]" in record.message]
    assert lines[0] == "[EAGLE][Active] step 0: 2 of 2 slots, [0, 1]"
    assert lines[-1].endswith(": 1 of 2 slots, [1]")


# ---- trees


def test_a_tree_given_by_hand_is_verified_in_one_pass_and_its_path_kept(
    nano_pair: Pair, prompts: list[list[int]], baseline: list[list[int]]
) -> None:
    """Thirteen nodes, the accepted path not the first: its keys have to move."""
    tree = FlatTree((-1, 0, 0, 0, 1, 2, 2, 3, 6, 6, 8, 9, 9))
    path = [2, 6, 9, 12]
    prompt = prompts[0]
    runner = device_runner(nano_pair, None, BY_MEANING, n_slots=2, tree=tree, drafts=False)
    runner.admit(1, SlotRequest(0, prompt, 24, ()), QUIET)
    [first] = runner.collect(everything=True)
    tokens = list(first.rows[0].tokens)
    while len(tokens) < 20:
        right = baseline[0][len(tokens) : len(tokens) + 4]
        drafted = runner.state.step.drafted.view(-1)[: tree.n_nodes].view(tree.n_nodes, 1)
        for node in range(1, tree.n_nodes):
            wrong = (right[min(int(tree.depths[node]), 4) - 1] + node) % 256
            drafted[node] = right[path.index(node)] if node in path else wrong
        runner.enqueue(1, 0, QUIET)
        [outcome] = runner.collect(everything=True)
        assert outcome.rows[0].n_accepted == 4
        tokens += outcome.rows[0].tokens
    assert tokens == baseline[0][: len(tokens)]


# ---- faults


def test_results_are_read_one_step_behind(nano_pair: Pair) -> None:
    runner = device_runner(nano_pair, None, BY_MEANING, n_slots=1, n_behind=1)
    runner.admit(0, SlotRequest(41, [1, 2, 3], 9, ()), QUIET)
    assert runner.collect(everything=False) == []
    runner.enqueue(1, 5, QUIET)
    [first] = runner.collect(everything=False)
    assert (first.step, first.rows[0].request_id) == (None, 41)
    runner.enqueue(1, 6, QUIET)
    with pytest.raises(InvariantViolated, match="2 results are under way"):
        runner.enqueue(1, 7, QUIET)
    outcomes = runner.collect(everything=True)
    assert [(outcome.step, outcome.rows[0].request_id) for outcome in outcomes] == [(5, 41), (6, 41)]


def test_what_capturing_leaves_is_collected_before_the_first_prompt(nano_pair: Pair) -> None:
    """A full collection takes 0.3 s of a prompt's time, and the objects of all programs are what makes one due."""
    runner, made = device_runner(nano_pair, 2, BY_MEANING), list[str]()

    class Replayer(EagerReplayer):
        def whole(self, program: Program) -> Enqueue:
            made.append("program")
            return super().whole(program)

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            made.append("collection")

    runner.replay_by(Replayer())
    gc.callbacks.append(note)
    try:
        runner.prepare()
    finally:
        gc.callbacks.remove(note)
    assert made.count("program") == len(runner.all_programs)
    assert made[-1] == "collection"


def test_a_released_slot_takes_no_part(nano_pair: Pair) -> None:
    runner = device_runner(nano_pair, 2, BY_MEANING)
    for slot in (0, 1):
        runner.admit(slot, SlotRequest(slot, [1, 2, slot], 99, ()), QUIET)
        runner.collect(everything=True)
    runner.release(0)
    runner.enqueue(2, 0, QUIET)
    [outcome] = runner.collect(everything=True)
    assert [row.slot for row in outcome.rows] == [1]
    assert isinstance(outcome.rows[0], RowOutcome)
