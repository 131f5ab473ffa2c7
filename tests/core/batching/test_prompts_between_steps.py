"""A long prompt is read between the steps of the requests that run, in the order that the share says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from device_engines import device_engine
from hypothesis import given
from hypothesis import strategies as st
from lettered import lettered_engine, lettered_prompts
from rings import slow_but
from tiny_engines import Pair, is_empty, new_tokens, plain_tokens, random_prompts, tiny_engine, tokens_of

from eagle3core import Engine
from eagle3core.batching.share import LEAST_ROWS, ReadingShare
from eagle3core.kernels.slots.slot_state import RUNNING
from eagle3core.step.program import Program
from eagle3core.step.replay import EagerReplayer, Enqueue

pytestmark = pytest.mark.reference

# Chunks of a prompt, steps of those that run and the end of the reading, by the share of the time that reading has.
ORDERS = {0.5: "cs" * 6 + "cfs", 0.75: "cs" + "cccs" + "cccfs", 0.25: "csss" * 6 + "cfsss", 1.0: "c" * 7 + "fs"}

CHUNK = 8  # tokens, of the tiny engines
LONG = 56  # seven chunks


class Recorder(EagerReplayer):
    """Writes down which program is enqueued: c a chunk, f the end of a prompt, s a step."""

    def __init__(self) -> None:
        super().__init__()
        self.order = ""
        self.names: dict[int, str] = {}

    def whole(self, program: Program) -> Enqueue:
        run, name = super().whole(program), self.names[id(program)]

        def noted() -> None:
            self.order += name
            run()

        return noted


def recorded(engine: Engine, draft: str = "") -> Recorder:
    """The engine's programs, from now on written down in the order in which they are enqueued; `draft`: as what the
    draft's passes over prompts are."""
    recorder, runner = Recorder(), engine.runner
    by_name = {"c": runner.chunks.values(), "f": [runner.finish], "s": runner.programs.values()}
    for name, programs in {**by_name, draft: runner.draft_chunks.values()}.items():
        recorder.names |= {id(program): name for program in programs}
    runner.replay_by(recorder)
    return recorder


def decode(engine: Engine, arrivals: Sequence[tuple[int, list[int], int]]) -> list[list[int]]:
    """Tokens of requests that arrive before the round of a number: (round, prompt, budget)."""
    handles, number, is_busy = [], 0, True
    while is_busy or len(handles) < len(arrivals):
        handles += [engine.add_request(prompt, new_tokens(n)) for at, prompt, n in arrivals if at == number]
        is_busy = engine.step()
        number += 1
    assert is_empty(engine)
    return [handle.token_ids for handle in handles]


@pytest.mark.parametrize(
    ("share", "between", "n_behind"),
    slow_but(
        [(0.5, ORDERS[0.5], 0), (0.75, ORDERS[0.75], 1), (0.25, ORDERS[0.25], 0), (1.0, ORDERS[1.0], 1)],
        [(share, between, n) for share, between in ORDERS.items() for n in (0, 1)],
    ),
)
def test_running_requests_take_their_steps_between_the_chunks_of_a_long_prompt(
    pair: Pair, share: float, between: str, n_behind: int
) -> None:
    engine = tiny_engine(pair, None, prefill_share=share)
    engine.runner.n_behind = n_behind
    short, long = random_prompts([3, LONG])
    recorder = recorded(engine)
    tokens = decode(engine, [(0, short, 60), (1, long, 5)])
    assert recorder.order.startswith("cfs" + between)
    assert tokens == tokens_of(tiny_engine(pair, None).generate([short, long], [new_tokens(60), new_tokens(5)]))


def test_what_arrives_together_is_read_before_the_first_step_as_a_closed_batch_always_was(pair: Pair) -> None:
    engine = tiny_engine(pair, 2)
    recorder = recorded(engine)
    engine.generate(random_prompts([3, 20, LONG]), new_tokens(4))
    assert recorder.order.startswith("cf" + "cccf" + "c" * 7 + "fs")
    assert set(recorder.order.removeprefix("cfcccf" + "c" * 7 + "f")) == {"s"}


def test_no_first_token_waits_for_the_drafts_pass_over_its_prompt(pair: Pair) -> None:
    engine = tiny_engine(pair, 2)
    recorder = recorded(engine, draft="d")
    engine.generate(random_prompts([LONG]), new_tokens(4))
    assert recorder.order.startswith("cd" * 6 + "cfd" + "s")


def test_chunks_follow_each_other_when_nothing_runs(pair: Pair) -> None:
    engine = tiny_engine(pair, None, prefill_share=0.01)
    recorder = recorded(engine)
    decode(engine, [(0, random_prompts([LONG])[0], 1), (0, random_prompts([LONG])[0], 3)])
    assert recorder.order == "c" * 7 + "f" + "c" * 7 + "fss"


def test_reading_goes_on_without_pause_when_the_last_running_request_ends(pair: Pair) -> None:
    engine = tiny_engine(pair, None, max_batch_size=2)
    recorder = recorded(engine)
    short, long = random_prompts([3, LONG])
    decode(engine, [(0, short, 4), (1, long, 3)])
    assert recorder.order == "cfs" + "cscs" + "ccccc" + "fss"


def test_prompts_are_read_one_at_a_time_first_come_first_served(pair: Pair) -> None:
    engine = tiny_engine(pair, None, session_len=256, max_batch_size=3)
    prompts = random_prompts([3, LONG, 3])
    handles = [engine.add_request(prompts[0], new_tokens(60))]
    engine.step()
    handles += [engine.add_request(prompt, new_tokens(2)) for prompt in prompts[1:]]
    while engine.step():
        if handles[2].token_ids:
            assert handles[1].token_ids, "the short prompt came later and waits"
    assert tokens_of([handle.response() for handle in handles[1:]]) == plain_tokens(pair, prompts[1:], 2)


def test_a_slot_under_reading_takes_no_part_in_steps_until_its_prompt_is_read(pair: Pair) -> None:
    engine = tiny_engine(pair, 2, max_batch_size=2)
    running = engine.runner.state.state[RUNNING]
    short, long = random_prompts([3, LONG])
    engine.add_request(short, new_tokens(60))
    engine.step()
    engine.add_request(long, new_tokens(5))
    for _ in range(6):
        engine.step()
        assert running.tolist() == [1, 0]
    engine.step()
    assert running.tolist() == [1, 1]


@pytest.mark.parametrize("k", slow_but([3], [None, 3]))
def test_chunks_between_steps_change_no_bit_where_kernels_run(nano_pair: Pair, k: int | None) -> None:
    """The kernels' programs, each call computed by its definition, whose rows have the same bits beside any others."""
    prompts = random_prompts([9, 100, 6], n_vocab=256)

    def engine() -> Engine:
        made = device_engine(nano_pair, k, EagerReplayer(), chunk=16, n_slots=2, n_behind=1)
        recorded(made)
        return made

    together = decode(engine(), [(0, prompts[0], 24), (1, prompts[1], 9), (1, prompts[2], 9)])
    alone = [decode(engine(), [(0, prompt, n)])[0] for prompt, n in zip(prompts, (24, 9, 9), strict=True)]
    assert together == alone


@given(st.floats(0.05, 1.0), st.lists(st.tuples(st.integers(1, 600), st.integers(1, 300)), min_size=30, max_size=60))
def test_of_chunks_and_steps_chunks_get_their_share_up_to_one_of_each(
    share: float, sizes: list[tuple[int, int]]
) -> None:
    due = ReadingShare(share)
    read = stepped = 0.0
    for chunk, step in sizes:
        if due.may_read:
            due.read(chunk)
            read += max(chunk, LEAST_ROWS)
        else:
            due.stepped(step)
            stepped += max(step, LEAST_ROWS)
    owed = read * (1 - share) / share
    assert -300 <= owed - stepped <= 600 * (1 - share) / share + 1e-6


def test_a_cache_that_an_ended_reading_left_cannot_reach_the_next_prompt(letters: Pair, alone: list[list[int]]) -> None:
    engine = lettered_engine(letters, 3, 2)
    state, prompts = engine.runner.state, lettered_prompts()
    runs = engine.add_request(prompts[0], new_tokens(12))
    engine.step()
    left = engine.add_request(prompts[6], new_tokens(12))
    engine.step()
    assert list(engine.book.reading) == [left.id]
    damage: list[Any] = [state.k, state.v, state.draft.k, state.draft.v] if state.draft else []
    slot = left.request.slot
    held = [block for block in state.tables[slot].tolist() if block >= 0]
    assert len(held) > 11, "of a prompt of 44 tokens"
    for cache, axis in zip(damage, (1, 1, 0, 0), strict=True):
        cache.index_fill_(axis, torch.tensor(held), torch.nan)
    engine.cancel(left.id)
    follows = engine.add_request(prompts[5], new_tokens(12))
    engine.step()
    taken = [block for block in state.tables[slot].tolist() if block >= 0]
    assert follows.request.slot == slot
    assert set(taken) <= set(held), "the blocks of the one before"
    while engine.step():
        pass
    assert [runs.token_ids, follows.token_ids] == [alone[0][:12], alone[5][:12]]


def test_chunks_that_follow_each_other_pause_when_another_thread_wants_the_engine(pair: Pair) -> None:
    engine, [long] = tiny_engine(pair, None), random_prompts([LONG])
    recorder = recorded(engine)
    handle = engine.add_request(long, new_tokens(2))
    assert not engine.advance(pauses=lambda: True)
    assert recorder.order == "c"
    engine.add_request(long, new_tokens(2))
    assert not engine.advance(pauses=lambda: len(recorder.order) == 3)
    assert (recorder.order, handle.token_ids) == ("ccc", [])
    assert engine.cancel(handle.id), "in the middle of a prompt, with nothing running"
    while engine.step():
        pass
    assert recorder.order == "ccc" + "c" * 7 + "fs"
    assert is_empty(engine)
