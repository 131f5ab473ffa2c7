"""Of a prompt's last layer keys and values alone, and of its last token the rest: to the bits of reading all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_engines import BY_MEANING, device_runner, packed_pair, write_nano_pair
from tiny_engines import Pair, new_tokens, random_prompts, tiny_engine, tokens_of, write_tiny_pair
from torch import Tensor

from eagle3core.kernels.card import Call
from eagle3core.step.admission import SlotRequest
from eagle3core.step.program import calls_of
from eagle3core.step.replay import EagerReplayer, Replayer, emulate
from eagle3core.step.run import DeviceRunner
from eagle3core.trace import RecordingTrace, Trace
from eagle3core.weights import PackedTarget

N_VOCAB, LAYERS = 64, 2
LENGTHS = {0: 21, 2: 8, 3: 1}  # by slot; beside them one that does not end, and slots without a prompt


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), n_layers=LAYERS, taps=(0, 1), vocab=N_VOCAB)


def runner_of(pair: Pair, replayer: Replayer = BY_MEANING, k: int | None = 2, **sized: Any) -> DeviceRunner:
    """Five slots; spans of eight tokens, eight a pass."""
    return device_runner(pair, k, replayer, n_slots=5, chunk=64, **sized)


def read(runner: DeviceRunner) -> dict[str, Tensor]:
    """What one pass over prompts that end in it, and over one that does not, leaves behind: bits, and first tokens."""
    prompts = dict(zip(LENGTHS, random_prompts(list(LENGTHS.values()), n_vocab=N_VOCAB, seed=3), strict=True))
    [long] = random_prompts([100], n_vocab=N_VOCAB, seed=4)
    state = runner.state
    for rows in (state.act.middle, state.act.mixed, state.act.q, state.last_stream, state.last_scaled):
        rows.fill_(float("nan"))
    readings = [runner.begin(slot, SlotRequest(slot, prompt, 4, ())) for slot, prompt in prompts.items()]
    readings.append(runner.begin(1, SlotRequest(1, long, 4, ())))
    runner.read_on(readings, Trace())
    assert [reading.is_done for reading in readings] == [True, True, True, False]
    [outcome] = runner.collect(everything=True)
    assert [row.slot for row in outcome.rows] == list(LENGTHS)
    held = [runner.tables.own_blocks(slot)[0] for slot in (*LENGTHS, 1)]
    kept = {name: pages[:, held] for name, pages in (("k", state.k), ("v", state.v))}
    if state.draft is not None:
        kept |= {"draft k": state.draft.k[held], "draft v": state.draft.v[held]}
    found = {"logits": state.head.logits[: len(LENGTHS), :N_VOCAB], **kept}
    found |= {f"seeds {i}": rows[[state.sizes.seed_row + slot for slot in LENGTHS]]
              for i, rows in enumerate(state.captured)}  # fmt: skip
    bits = {name: value.contiguous().view(torch.int16) for name, value in found.items()}
    return {**bits, "tokens": torch.tensor([row.tokens for row in outcome.rows])}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.reference
@pytest.mark.parametrize("k", [None, 2])
def test_a_pass_leaves_the_bits_of_one_that_makes_every_row_of_the_last_layer(pair: Pair, k: int | None) -> None:
    """The kernels' programs, each call computed by its definition, which gives a row its bits in any company."""
    assert_same(read(runner_of(pair, k=k)), read(runner_of(pair, k=k, last_states=True)))


@pytest.mark.slow
@pytest.mark.emulated
def test_kernels_leave_the_bits_that_they_leave_where_every_row_is_made(pair: Pair) -> None:
    kernels = EagerReplayer(emulate)
    assert_same(read(runner_of(pair, kernels)), read(runner_of(pair, kernels, last_states=True)))


def layers_of(calls: list[Call], target: PackedTarget) -> list[int]:
    """Layers whose gate and up the calls read."""
    places = {layer.mlp.gate_up.weight.data_ptr(): i for i, layer in enumerate(target.layers)}
    return [places[call.operands["w"].data_ptr()] for call in calls
            if call.op == "gemm" and call.operands["w"].data_ptr() in places]  # fmt: skip


@pytest.mark.reference
def test_the_rest_of_the_last_layer_belongs_to_the_ends_unless_its_output_is_read(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reading_it = write_nano_pair(tmp_path_factory.mktemp("last"), n_layers=LAYERS, taps=(0, LAYERS), vocab=N_VOCAB)
    every, last = list(range(LAYERS)), LAYERS - 1
    for runner, of_passes, of_ends in (
        (runner_of(pair), every[:-1], [last]),
        (runner_of(reading_it), every, []),
        (runner_of(reading_it, k=None), every[:-1], [last]),  # nobody reads it without the draft
        (runner_of(pair, last_states=True), every, []),
    ):
        for program in runner.chunks.values():
            assert layers_of(calls_of(program), runner.target) == of_passes
        assert layers_of(calls_of(runner.finish), runner.target) == of_ends
        rows = {len(call.operands["x"]) for call in calls_of(runner.finish) if call.op == "gemm"}
        assert rows == {runner.sizes.n_ends}


@pytest.mark.reference
def test_of_a_small_model_that_drafts_no_pass_over_prompts_makes_more_than_its_last_keys(pair: Pair) -> None:
    target, _ = packed_pair(pair, drafts=False)
    own = runner_of(pair)
    runner = DeviceRunner(target, target, own.sizes, arch="sm_90a", replayer=BY_MEANING, order=(2, 2))
    for program in runner.draft_chunks.values():
        assert layers_of(calls_of(program), target) == list(range(LAYERS - 1))
        assert sum(call.op == "attention" for call in calls_of(program)) == LAYERS - 1


@pytest.mark.reference
@pytest.mark.parametrize("k", [None, 3])
def test_an_engine_that_collects_last_states_has_them_of_every_token_and_gives_the_same_tokens(
    tmp_path: Any, k: int | None
) -> None:
    pair = write_tiny_pair(tmp_path, taps=(0, 1))
    prompts = random_prompts([9, 5])
    answers = []
    for collects, n_rows in ((False, 1), (True, 9)):
        trace = RecordingTrace()
        engine = tiny_engine(pair, k, trace=trace, collect_last_states=collects)
        engine.generate(prompts[:1], new_tokens(2))
        assert {len(trace.tensors[f"prefill/target.1.{part}"]) for part in ("attn", "mlp")} == {n_rows}
        assert len(trace.tensors["prefill/target.0.mlp"]) == 9
        answers.append(tokens_of(tiny_engine(pair, k, collect_last_states=collects).generate(prompts, new_tokens(12))))
    assert answers[0] == answers[1]
