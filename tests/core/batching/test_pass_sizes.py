"""A prompt leaves the same bits behind in passes of any sizes, beside any others."""

from __future__ import annotations

import random

import pytest
import torch
from device_engines import device_runner, write_nano_pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_engines import Pair, random_prompts
from torch import Tensor

from eagle3core.step.admission import SlotRequest
from eagle3core.step.replay import EagerReplayer, Replayer, emulate
from eagle3core.step.run import DeviceRunner
from eagle3core.trace import Trace

N_VOCAB = 64
MEANING = EagerReplayer()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=1, taps=(0, 1), vocab=N_VOCAB)


def runner_of(pair: Pair, replayer: Replayer, chunk: int, k: int | None = 2) -> DeviceRunner:
    """Three slots; spans of eight tokens, as many as `chunk` rows have."""
    return device_runner(pair, k, replayer, n_slots=3, chunk=chunk)


def left_behind(runner: DeviceRunner, prompts: dict[int, list[int]], sizes: list[int]) -> list[Tensor]:
    """Bits of all caches and of what the draft reads next, after prompts by slot; `sizes`: most rows of each pass."""
    most, tokens = iter(sizes), []
    readings = [runner.begin(slot, SlotRequest(slot, prompt, 4, ())) for slot, prompt in prompts.items()]
    while left := [reading for reading in readings if not reading.is_done]:
        runner.read_on(left, Trace(), runner.largest_pass(next(most, None)))
        tokens += [[row.slot, *row.tokens] for made in runner.collect(everything=True) for row in made.rows]
    state = runner.state
    seeds = [rows[state.sizes.seed_row : state.sizes.kept_row] for rows in state.captured]
    return [torch.tensor(sorted(tokens)), *(t.contiguous().view(torch.int16) for t in (*state.pages, *seeds))]


def each_alone(pair: Pair, replayer: Replayer, prompts: dict[int, list[int]], slot: int) -> list[Tensor]:
    """The same of one slot's prompt read span by span, with nobody beside it."""
    return left_behind(runner_of(pair, replayer, 8), {slot: prompts[slot]}, [])


def assert_same(pair: Pair, replayer: Replayer, prompts: dict[int, list[int]], chunk: int, sizes: list[int]) -> None:
    runner = runner_of(pair, replayer, chunk)
    tokens, *together = left_behind(runner, prompts, sizes)
    for slot, prompt in prompts.items():
        own, *alone = each_alone(pair, replayer, prompts, slot)
        assert own.tolist() == [row for row in tokens.tolist() if row[0] == slot], slot
        blocks = runner.tables.own_blocks(slot)[: -(-len(prompt) // runner.sizes.block)]
        n_pages = len(runner.state.pages)
        for i, (got, wanted) in enumerate(zip(together, alone, strict=True)):
            at = blocks if i < n_pages else [slot]
            axis = 1 if i < 2 else 0  # caches of the target have layers first
            of = torch.tensor(list(at))
            assert torch.equal(got.index_select(axis, of), wanted.index_select(axis, of)), (slot, i)


@pytest.mark.reference
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 70), min_size=2, max_size=3), st.lists(st.sampled_from([8, 16, 32, 64]), max_size=5))
def test_passes_of_any_sizes_beside_any_others_leave_the_bits_of_spans_read_alone(
    pair: Pair, lengths: list[int], sizes: list[int]
) -> None:
    """The kernels' programs, each call computed by its definition."""
    prompts = dict(enumerate(random_prompts(lengths, n_vocab=N_VOCAB, seed=sum(lengths))))
    assert_same(pair, MEANING, prompts, 64, sizes)


@pytest.mark.slow
@pytest.mark.emulated
def test_kernels_of_every_size_of_pass_leave_the_same_bits(pair: Pair) -> None:
    """By warps of rows and by warpgroups, in tiles of several heights: 8, 16 and 64 rows a pass."""
    draw = random.Random(1)
    prompts = {0: random_prompts([26], n_vocab=N_VOCAB)[0], 2: random_prompts([draw.randint(3, 7)], n_vocab=N_VOCAB)[0]}
    for chunk in (16, 64):
        assert_same(pair, EagerReplayer(emulate), prompts, chunk, [])
