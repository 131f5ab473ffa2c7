"""A broken invariant and a step that breaks off leave right tokens, a clear message and a usable engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import pytest
from device_engines import engine_by_meaning, without_blocks
from rings import slow_but
from tiny_engines import Pair, new_tokens, random_prompts, tokens_of

from eagle3core import InvariantViolated
from eagle3core.kernels.card import Call
from eagle3core.kernels.slots.slot_state import RUNNING
from eagle3core.performance import PERF_MODE_VARIABLE
from eagle3core.step.replay import EagerReplayer
from eagle3core.step.run import DeviceRunner

pytestmark = pytest.mark.reference


def broken(runner: DeviceRunner, name: str, value: int) -> None:
    """Make the next step's acceptance wrong, or take blocks away."""
    if name == "n_accepted":
        program = runner.programs[runner.n_slots]
        stages = [dataclasses.replace(s, calls=s.calls[:-1]) if s.name == "accept" else s for s in program]
        runner.state.step.accepted["n_accepted"].fill_(value)
        runner.state.step.accepted["path"].zero_()
        runner.programs[runner.n_slots] = tuple(stages)
    else:
        without_blocks(runner, 0, value)


@pytest.mark.parametrize(("what", "value"), [("n_accepted", 9), ("n_accepted", -3), ("tables", 1)])
def test_a_broken_invariant_gives_the_baselines_tokens_and_a_clear_message(
    nano_pair: Pair, caplog: pytest.LogCaptureFixture, what: str, value: int
) -> None:
    prompt = random_prompts([62], n_vocab=256)
    n = 4 if what == "n_accepted" else 1  # with one block alone, only the rows of this one fit
    expected = tokens_of(engine_by_meaning(nano_pair, None, n_slots=1).generate(prompt, new_tokens(n)))
    made = engine_by_meaning(nano_pair, 3, n_slots=1)
    broken(made.runner, what, value)
    assert tokens_of(made.generate(prompt, new_tokens(n))) == expected
    if n > 1:
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert errors
        assert errors[0].startswith("[EAGLE] slot 0 goes on without its drafts: slot 0 reports fault 1")


def test_a_row_without_a_block_stops_the_run_rather_than_giving_wrong_tokens(nano_pair: Pair) -> None:
    made = engine_by_meaning(nano_pair, 3, n_slots=1)
    broken(made.runner, "tables", 1)
    with pytest.raises(InvariantViolated, match="fault 6"):
        made.generate(random_prompts([64], n_vocab=256), new_tokens(9))


def test_a_broken_invariant_is_fatal_in_performance_mode(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PERF_MODE_VARIABLE, "1")
    made = engine_by_meaning(nano_pair, 3, n_slots=1)
    broken(made.runner, "n_accepted", 9)
    with pytest.raises(InvariantViolated, match="slot 0 reports fault 1"):
        made.generate(random_prompts([5], n_vocab=256), new_tokens(9))


class BreaksOff:
    """Computes calls by their meaning and raises once, at the n-th."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.left, self.error = at, error

    def __call__(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.left -= 1
            if self.left == 0:
                raise self.error("broken off")
            call.meaning()


@pytest.mark.parametrize(
    ("at", "error"),
    slow_but(
        [(5, KeyboardInterrupt), (40, RuntimeError), (60, KeyboardInterrupt), (90, RuntimeError), (100, RuntimeError)],
        [(at, error) for at in (5, 40, 60, 90, 100) for error in (KeyboardInterrupt, RuntimeError)],
    ),
)
def test_a_step_that_breaks_off_half_way_leaves_the_engine_usable(
    nano_pair: Pair, at: int, error: type[BaseException]
) -> None:
    prompts = random_prompts([5, 20, 3], n_vocab=256)
    expected = tokens_of(engine_by_meaning(nano_pair, 3).generate(prompts, new_tokens(9)))
    engine = engine_by_meaning(nano_pair, 3)
    runner = engine.runner
    breaking = BreaksOff(at, error)
    runner.replay_by(EagerReplayer(breaking))
    with pytest.raises(error, match="broken off"):
        engine.generate(prompts, new_tokens(9))
    assert breaking.left == 0
    assert not runner.state.state[RUNNING].any()
    assert tokens_of(engine.generate(prompts, new_tokens(9))) == expected
