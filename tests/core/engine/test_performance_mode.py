"""Performance mode keeps an engine to its seven promises: each is broken here on purpose, and the error names it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_engines import CPU, engine_by_meaning, without_blocks
from tiny_engines import Pair, new_tokens, random_prompts, tokens_of

from eagle3core import Engine, EngineConfig, InvariantViolated, SpeculationState
from eagle3core.backend import Backend
from eagle3core.kernels.slots.slot_state import N_RESULT
from eagle3core.performance import mode as performance_mode
from eagle3core.performance.invariants import INVARIANTS
from eagle3core.performance.mode import Greedy, NoHostReads, Watch
from eagle3core.step.outcome import RowOutcome
from eagle3core.step.results import Sent
from eagle3core.trace import RecordingTrace

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Performance mode, which no other test's engines have answered in before."""
    monkeypatch.setenv(performance_mode.VARIABLE, "1")
    monkeypatch.setattr(performance_mode, "_greedy", Greedy())
    return monkeypatch


def breaks(name: str, words: str) -> pytest.RaisesExc[InvariantViolated]:
    """What an invariant of this name raises."""
    return pytest.raises(
        InvariantViolated,
        match=rf"(?s){words}.*\(invariant {name}\).*allowed:.*do:",
    )


PROMPT = random_prompts([9], n_vocab=256)


def test_the_seven_are_numbered_as_the_requirement_numbers_them() -> None:
    assert [one.number for one in INVARIANTS.values()] == [1, 2, 3, 4, 5, 6, 7]
    for name, one in INVARIANTS.items():
        assert re.fullmatch("[a-z_]+", name)
        assert one.broken
        assert one.remedy


def test_an_engine_that_keeps_them_answers_as_without_the_mode(nano_pair: Pair, mode: pytest.MonkeyPatch) -> None:
    kept = tokens_of(engine_by_meaning(nano_pair, 3).generate(PROMPT, new_tokens(8)))
    mode.delenv(performance_mode.VARIABLE)
    assert tokens_of(engine_by_meaning(nano_pair, 3).generate(PROMPT, new_tokens(8))) == kept


# -- 1 and 2: products


def test_plain_torch_on_a_gpu_is_a_fallback(nano_pair: Pair) -> None:
    made = Engine.from_pretrained(nano_pair[0], EngineConfig(device="cpu", dtype="float32"))
    made.generate(PROMPT, new_tokens(2))  # a CPU has nothing to fall back from
    made.promises.backend = Backend(torch.device("cuda"), "for this test", "torch", "the model computes in float32")
    with breaks("gemm_fallbacks", "plain torch multiplies on the GPU: the model computes in float32"):
        made.generate(PROMPT, new_tokens(2))


def test_a_product_outside_the_tuned_file_is_named(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, 2)
    runner = made.runner
    made.generate(PROMPT, new_tokens(2))  # this kind of device has no file, so nothing is missed
    first = next(iter(runner.gemms.counts))
    others = frozenset(runner.gemms.counts) - {first}
    runner.gemms = dataclasses.replace(runner.gemms, tuned=others, is_required=True)
    words = f"{runner.gemms.counts[first]} of {runner.gemms.total} matrix products are not in the tuned file"
    with breaks("untuned_products", f"{words}: {first.text}"):
        made.generate(PROMPT, new_tokens(2))
    runner.gemms = dataclasses.replace(runner.gemms, tuned=others | {first})
    made.generate(PROMPT, new_tokens(2))


# -- 3: drafts


def test_speculation_that_fell_back_to_plain_decoding_is_refused(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, 3)
    made.promises.speculation = SpeculationState(False, "the draft could not be loaded: no such folder")
    with breaks("single_token_steps", "3 drafts were asked for and there are none: the draft could not be loaded"):
        made.generate(PROMPT, new_tokens(2))


def test_steps_with_fewer_drafts_than_asked_for_are_refused(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, 2)
    spec = made.config.speculative_config
    assert spec is not None
    made.promises.config = dataclasses.replace(
        made.config, speculative_config=dataclasses.replace(spec, num_speculative_tokens=4)
    )
    with breaks("single_token_steps", "steps draft 2 tokens where 4 were asked for"):
        made.generate(PROMPT, new_tokens(2))


# -- 4: faults


def test_a_fault_of_the_device_ends_the_run(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, 3, n_slots=1)
    without_blocks(made.runner, 0, 1)
    with breaks("faults", r"slot 0 reports fault \d in step"):
        made.generate(random_prompts([62], n_vocab=256), new_tokens(9))


# -- 5: layouts


def test_results_without_their_axes_are_refused(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, 2)
    state = made.runner.state
    made.runner.state = dataclasses.replace(state, results=state.results.flatten())
    with breaks("guessed_layouts", r"results has the shape \[\d+\]"):
        made.generate(PROMPT, new_tokens(2))


def test_a_row_that_does_not_say_which_tokens_are_its_own_is_refused() -> None:
    performance_mode.check_row(RowOutcome(0, 0, [4, 5], [4, 9], 1), n_drafts=2)
    with breaks("guessed_layouts", r"the tokens of slot 0 has the shape \[6\]"):
        performance_mode.check_row(RowOutcome(0, 0, [1, 2, 3, 4, 5, 6], [2, 3], 1), n_drafts=2)


def _one_too_far(row: list[int]) -> None:
    row[N_RESULT:] = [*row[N_RESULT + 1 :], 0]


def _uncounted(row: list[int]) -> None:
    row[1] = 4


def _below_none(row: list[int]) -> None:
    row[1] = -1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_one_too_far, r"slot 0 accepted \[[\d, ]+\] of the drafts \[[\d, ]+\]"),
        (_uncounted, "slot 0 accepted 4 of 3 drafts"),
        (_below_none, "slot 0 accepted -1 of 3 drafts"),
    ],
)
def test_a_row_of_the_device_that_is_damaged_on_its_way_ends_the_run(
    nano_pair: Pair, mode: pytest.MonkeyPatch, damage: Callable[[list[int]], None], words: str
) -> None:
    made = engine_by_meaning(nano_pair, 3)
    receive = made.runner._results.receive

    def damaged() -> tuple[Sent, list[list[int]]]:
        sent, rows = receive()
        for row in rows if sent.step is not None else ():
            damage(row)
        return sent, rows

    mode.setattr(made.runner._results, "receive", damaged)
    with breaks("guessed_layouts", words):
        made.generate(PROMPT, new_tokens(24))


# -- 6: copies, waits, log lines


@pytest.mark.parametrize("switch", ["eagle_debug", "eagle_metrics_debug"])
def test_a_debug_switch_is_refused_unless_a_variable_asks(
    nano_pair: Pair, mode: pytest.MonkeyPatch, switch: str
) -> None:
    made = engine_by_meaning(nano_pair, 2)
    spec = made.config.speculative_config
    assert spec is not None
    config = dataclasses.replace(made.config, speculative_config=dataclasses.replace(spec, **{switch: True}))
    watch = Watch(config, made.backend, made.runner, made.speculation)
    with breaks("debug_switches", f"{switch} is on"):
        watch.begin(made.trace)
    mode.setenv("EAGLE3_ACCEPT_DEBUG", "1")
    watch.begin(made.trace)


def test_a_trace_that_copies_every_stage_is_refused(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, 2, trace=RecordingTrace())
    with breaks("debug_switches", "a recording trace is on"):
        made.generate(PROMPT, new_tokens(2))


def test_a_host_read_inside_a_step_ends_the_run_unless_a_variable_asks(
    nano_pair: Pair, mode: pytest.MonkeyPatch
) -> None:
    made = engine_by_meaning(nano_pair, None)
    made.promises.guards_steps = True  # plain torch, which stands for the kernels here, is full of them
    with breaks("debug_switches", r"aten\._local_scalar_dense\.default ran inside a step"):
        made.generate(PROMPT, new_tokens(4))
    mode.setenv("EAGLE3_KV_DEBUG", "1")
    asked = engine_by_meaning(nano_pair, None)
    asked.promises.guards_steps = True
    asked.generate(PROMPT, new_tokens(4))


def test_copies_to_the_host_are_seen_and_work_on_the_device_is_not() -> None:
    on_device = torch.empty(2, device="meta")
    with NoHostReads():
        _ = on_device + 1, torch.ones(2).copy_(torch.zeros(2)), on_device.to(torch.float16)
        for read in (lambda: torch.empty(2).copy_(on_device), on_device.cpu, torch.ones(1).item):
            with breaks("debug_switches", "ran inside a step"):
                read()


def test_what_a_profile_saw_of_a_step_is_judged_by_the_same_name() -> None:
    performance_mode.check_quiet({"event_waits": 1, "copies": 0}, "step 4")
    with breaks("debug_switches", "step 4: 2 event_waits, 1 copies"):
        performance_mode.check_quiet({"event_waits": 2, "copies": 1, "allocations": 0}, "step 4")


# -- 7: greedy tokens


def test_runs_with_and_without_drafts_are_held_against_each_other(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, 2)
    first = tokens_of(made.generate(PROMPT, new_tokens(8)))
    assert tokens_of(made.generate(PROMPT, new_tokens(12)))[0][:8] == first[0]
    plain = engine_by_meaning(nano_pair, None)
    plain.runner.target = made.target  # one table of weights, as engines over one pair share it
    plain.generate(PROMPT, new_tokens(6))
    read = made.book._read

    def planted(request: Any, row: RowOutcome, *rest: Any) -> None:
        row.tokens[-1] ^= 1
        read(request, row, *rest)

    made.book._read = planted  # type: ignore[method-assign]
    with breaks("divergent_tokens", r"spec-2 has token \d+ at \d of request 0, spec-2, earlier"):
        made.generate(PROMPT, new_tokens(8))


def test_tokens_are_compared_as_far_as_both_go() -> None:
    performance_mode.check_same({"plain": [[1, 2, 3]], "spec-3": [[1, 2]], "again": [[1, 2, 3, 4]]})
    with breaks("divergent_tokens", "spec-3 has token 9 at 1 of request 1, plain 2"):
        performance_mode.check_same({"plain": [[1], [1, 2]], "spec-3": [[1], [1, 9]]})
    with breaks("divergent_tokens", "spec-3 answers 1 requests, plain 2"):
        performance_mode.check_same({"plain": [[1], [1, 2]], "spec-3": [[1]]})


def test_answers_are_remembered_a_target_and_forgotten_with_it() -> None:
    greedy, table = Greedy(), torch.zeros(2)
    for number in range(Greedy.MOST + 8):
        greedy.check(table, None, [number], [1], "plain decoding")
    assert len(greedy._known[table]) == Greedy.MOST
    greedy.check(torch.zeros(2), None, [70], [2], "another target")
    greedy.check(table, (2, 2), [70], [2], "another order of sums")
    with breaks("divergent_tokens", "spec-3 has token 2 at 0 of request 0, plain decoding, earlier 1"):
        greedy.check(table, None, [70], [2], "spec-3")


def test_a_run_ends_with_one_line_of_its_slots_and_acceptance(
    nano_pair: Pair, mode: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_by_meaning(nano_pair, 3)
    with caplog.at_level("INFO", logger="eagle3core"):
        responses = engine.generate([[1, 2, 3], [4, 5, 6]], [new_tokens(4), new_tokens(12)])
    [line] = [record.getMessage() for record in caplog.records if "active_count" in record.getMessage()]
    counts = engine.promises.counts
    assert line == f"[EAGLE][Active] {counts.line()}"
    assert counts.active[0] == 2, "both requests"
    assert counts.active[-1] == 1, "the short one has left"
    assert counts.n_left_out == sum(2 - n for n in counts.active) > 0
    infos = [response.req_metrics.spec_info for response in responses]
    assert counts.n_rows == sum(info.num_drafts for info in infos if info)
    assert counts.n_accepted == sum(info.num_draft_tokens - info.num_rewound_tokens for info in infos if info)


def test_nothing_is_checked_without_the_mode(nano_pair: Pair, mode: pytest.MonkeyPatch) -> None:
    mode.delenv(performance_mode.VARIABLE)
    made = engine_by_meaning(nano_pair, 2, trace=RecordingTrace())
    made.promises.guards_steps = True
    made.promises.speculation = SpeculationState(False, "for this test")
    assert made.backend.device == CPU
    made.generate(PROMPT, new_tokens(4))
