"""What cannot work is refused before anything decodes, and a failure leaves the engine as it was."""

from __future__ import annotations

import logging
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_trace import Broken
from random_pairs import rewrite_config
from rings import slow_but
from tiny_engines import (
    Pair,
    engine_config,
    is_empty,
    letter_tokenizer,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
)

from eagle3core import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    Engine,
    EngineConfig,
    GenerationConfig,
    SpeculativeConfig,
)
from eagle3core.backend import Backend
from eagle3core.checkpoint import load_target
from eagle3core.errors import shown
from eagle3core.loading import choose_path
from eagle3core.trace import Trace

pytestmark = pytest.mark.reference

PLACES = [("target.embed", 1), ("target.embed", 4), ("draft.fc", 2), ("draft.fc", 9), ("accept.tokens", 2)]

GOOD = [[1, 2, 3]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty\n  allowed: at least one token\n  do: give it a token, such as BOS"),
        ([1] * 64, "prompt 1 has 64 tokens with session_len 64\n  allowed: at most 63, so that one token can follow"),
        ([1, 6], "prompt 1 holds token 6\n  allowed: ids of 0..5\n  do: use the target's own tokenizer"),
        ([-1], "prompt 1 holds token -1\n  allowed: ids of 0..5"),
        ([1.5], "prompt 1 holds token 1.5\n  allowed: ids of 0..5"),
        (["1"], "prompt 1 holds token '1'\n  allowed: ids of 0..5"),
        ([True], "prompt 1 holds token True\n  allowed: ids of 0..5"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_number_before_the_good_ones_are_decoded(
    pair: Pair, prompt: list[Any], message: str
) -> None:
    engine = tiny_engine(pair, 2, trace=Broken("prompt_ids", 1, AssertionError))
    with pytest.raises(ConfigError) as caught:
        engine.generate([*GOOD, prompt], new_tokens(4))
    assert message in str(caught.value)
    assert is_empty(engine)
    engine.trace = Trace()
    assert len(engine.generate(GOOD, new_tokens(4))[0].token_ids) == 4


def test_tokens_of_any_integer_type_are_told_from_what_is_none(pair: Pair) -> None:
    engine, draw = tiny_engine(pair, None), random.Random(0)
    tokens, others = [0, 5, np.int64(3), torch.tensor(2)], [6, -1, True, False, 1.5, "1", None, np.int64(6), 1 << 70]
    for _ in range(200):
        prompt = draw.choices(tokens, k=draw.randint(1, 4))
        engine.check_request(prompt, new_tokens(4))
        other = draw.choice(others)
        words = re.escape(f"prompt 0 holds token {shown(other)}\n  allowed: ids of 0..5")
        with pytest.raises(ConfigError, match=words):
            engine.check_request([*prompt, other, *draw.choices(tokens + others, k=2)], new_tokens(4))
    assert tokens_of(engine.generate([tokens], new_tokens(4))) == plain_tokens(pair, [[0, 5, 3, 2]], 4)


def test_the_longest_prompt_leaves_room_for_one_token(pair: Pair) -> None:
    for k in (None, 8):
        assert len(tiny_engine(pair, k).generate([[1] * 63], new_tokens(9))[0].token_ids) == 1


def test_stop_words_without_a_tokenizer_are_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="on an engine without a tokenizer"):
        tiny_engine(pair, 2).generate(GOOD, GenerationConfig(stop_words=("end",)))
    tiny_engine(pair, 2, tokenizer=letter_tokenizer()).generate(GOOD, new_tokens(2, stop_words=("end",)))


def test_as_many_settings_as_prompts_are_wanted(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="2 generation configurations for 1 prompts"):
        tiny_engine(pair, 2).generate(GOOD, [new_tokens(2), new_tokens(3)])


def test_no_prompts_give_no_responses(pair: Pair) -> None:
    assert tiny_engine(pair, 2).generate([], new_tokens(3)) == []


@pytest.mark.parametrize(
    ("tap", "n", "error"),
    slow_but(
        [("target.embed", 1, KeyboardInterrupt), ("target.embed", 4, RuntimeError), ("draft.fc", 2, RuntimeError),
         ("draft.fc", 9, KeyboardInterrupt), ("accept.tokens", 2, RuntimeError)],
        [(*at, error) for at in PLACES for error in (KeyboardInterrupt, RuntimeError)],
    ),
)  # fmt: skip
def test_an_interrupted_run_leaves_the_engine_usable(pair: Pair, tap: str, n: int, error: type[BaseException]) -> None:
    prompts = random_prompts([5, 20, 3, 7, 1])
    expected = tokens_of(tiny_engine(pair, 3).generate(prompts, new_tokens(9)))
    engine = tiny_engine(pair, 3, max_batch_size=2, trace=Broken(tap, n, error))
    with pytest.raises(error):
        engine.generate(prompts, new_tokens(9))
    assert is_empty(engine)
    assert tokens_of(engine.generate(prompts, new_tokens(9))) == expected


def test_an_interrupt_empties_the_book_even_if_the_runner_fails_on_the_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(pair, 3, max_batch_size=2, trace=Broken("draft.fc", 2, KeyboardInterrupt))

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "abandon", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.generate(random_prompts([5, 20, 3]), new_tokens(9))
    assert engine.book.is_empty


@pytest.fixture
def damaged(pair: Pair, tmp_path: Path) -> Pair:
    """The pair with a draft whose configuration no longer fits its weights."""
    draft = Path(shutil.copytree(pair[1], tmp_path / "draft"))
    rewrite_config(draft, intermediate_size=40)
    return pair[0], draft


def test_a_draft_that_cannot_be_loaded_ends_the_run_by_default(damaged: Pair) -> None:
    with pytest.raises(CheckpointError, match="gate_proj"):
        tiny_engine(damaged, 3)


def test_a_missing_draft_directory_is_named(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        tiny_engine((pair[0], tmp_path / "nowhere"), 3)


def test_the_baseline_takes_over_when_asked_to_with_one_warning_and_the_reason(
    pair: Pair, damaged: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = random_prompts([5, 12])
    expected = plain_tokens(pair, prompts, 9)
    caplog.clear()
    engine = tiny_engine(damaged, 3, on_draft_failure="baseline", collect_draft_ranks=True)
    responses = engine.generate(prompts, new_tokens(9))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert tokens_of(responses) == expected
    assert len(warnings) == 1
    assert warnings[0].startswith("[EAGLE] decoding without the draft, which could not be loaded: ")
    assert "gate_proj" in warnings[0]
    assert not engine.speculation.enabled
    assert engine.speculation.reason.startswith("the draft could not be loaded: ")
    assert "gate_proj" in engine.speculation.reason
    assert all(response.req_metrics.spec_info is None for response in responses)
    assert (engine.draft, engine.runner.state.draft, engine.memory_plan.draft_kv_bytes) == (None, None, 0)


def test_the_baseline_does_not_hide_a_broken_target(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        tiny_engine((tmp_path / "nowhere", pair[1]), 3, on_draft_failure="baseline")


def test_the_engine_says_whether_and_why_it_speculates(pair: Pair) -> None:
    on, off = tiny_engine(pair, 3).speculation, tiny_engine(pair, None).speculation
    assert (on.enabled, on.reason) == (True, "eagle3 with 3 drafted tokens a step")
    assert (off.enabled, off.reason) == (False, "no speculative_config was given")


def test_a_session_longer_than_the_target_was_built_for_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="session_len is 4096\n  allowed: at most 2048, the target's positions"):
        tiny_engine(pair, None, session_len=4096)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device whose absence is tested")
def test_a_device_that_is_not_there_is_named_with_the_reason(pair: Pair) -> None:
    with pytest.raises(BackendUnavailable, match="device is 'cuda' and torch"):
        tiny_engine(pair, None, device="cuda")


def test_the_chosen_device_comes_with_its_reason(pair: Pair) -> None:
    assert tiny_engine(pair, None, device="cpu").backend.reason == "device='cpu' was asked for"
    chosen = tiny_engine(pair, None, device="auto").backend
    assert chosen.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert chosen.reason


def test_plain_torch_takes_over_on_a_gpu_that_the_kernels_have_no_target_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (11, 0))
    config, geometry = engine_config(pair, None), load_target(pair[0]).geometry
    chosen = choose_path(Backend(torch.device("cuda"), "a test"), geometry, None, config, torch.bfloat16)
    assert chosen.path == "torch"
    assert chosen.path_reason == "compute capability is 11.0; the kernels take one of 8.x, 9.x, 10.x, 12.x"


def messages(caplog: pytest.LogCaptureFixture, pair: Pair, **flags: bool) -> list[str]:
    """What a short run logs with `flags` in its draft configuration."""
    wanted: dict[str, Any] = {"model": str(pair[1]), "num_speculative_tokens": 3, **flags}
    spec = SpeculativeConfig(**wanted)
    settings: dict[str, Any] = {"session_len": 64, "dtype": "float64", "device": "cpu"}
    caplog.set_level(logging.INFO, "eagle3core")
    caplog.clear()
    Engine.from_pretrained(pair[0], EngineConfig(**settings, speculative_config=spec)).generate(
        [random_prompts([9])[0]], new_tokens(8)
    )
    return caplog.messages


def test_settings_and_memory_are_logged_once_at_the_start(caplog: pytest.LogCaptureFixture, pair: Pair) -> None:
    taps, *logged = messages(caplog, pair)
    assert "taps: inputs of layers [0, 1, 2]" in taps
    assert len(logged) == 2
    assert logged[0].startswith("[EAGLE] eagle3 with 3 drafted tokens a step; weights ")
    assert "16 blocks in each, up to 2 a sequence" in logged[0]
    for setting in ("method='eagle3'", "max_path_len=5", "max_decoding_tokens=6", "mode multi-token"):
        assert setting in logged[1]


def test_debug_flags_log_drafts_acceptances_and_counters_of_every_step(
    caplog: pytest.LogCaptureFixture, pair: Pair
) -> None:
    engine = tiny_engine(pair, 3)
    response = engine.generate([random_prompts([9])[0]], new_tokens(8))[0]
    steps = response.req_metrics.steps
    traces = [line for line in messages(caplog, pair, eagle_debug=True) if " drafted [" in line]
    assert len(traces) == len(steps)
    for r, (line, step) in enumerate(zip(traces, steps, strict=True)):
        committed = response.token_ids[step.start : step.start + step.n_committed]
        assert line.startswith(f"[EAGLE] slot 0 step {r} drafted [")
        assert line.endswith(f" committed {committed}")
    counters = [line for line in messages(caplog, pair, eagle_metrics_debug=True) if "[Metrics]" in line]
    assert counters == [
        f"[EAGLE][Metrics] slot 0 drafted 3 accepted {step.n_accepted} committed {step.n_committed}" for step in steps
    ]


def test_threads_on_one_engine_wait_for_their_turn_and_a_call_from_within_a_call_is_refused(pair: Pair) -> None:
    engine = tiny_engine(pair, 2)
    prompts = [random_prompts([4, 9, 2], seed=seed) for seed in range(6)]
    expected = [tokens_of(engine.generate(several, new_tokens(12))) for several in prompts]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda several: tokens_of(engine.generate(several, new_tokens(12))), prompts))
    assert found == expected

    class Nested(Trace):
        def tap(self, name: str, value: torch.Tensor, valid: torch.Tensor | None = None) -> None:
            engine.generate(GOOD, new_tokens(1))

    engine.trace = Nested()
    with pytest.raises(ConfigError, match="from within a call"):
        engine.generate(GOOD, new_tokens(4))
    engine.trace = Trace()
    assert tokens_of(engine.generate(prompts[0], new_tokens(12))) == expected[0]
