"""Families of debug lines: off by default, each asked for by its own variable, each saying what the step did."""

from __future__ import annotations

import logging

import pytest
from tiny_engines import Pair, new_tokens, random_prompts, tiny_engine

from eagle3core.batching.step_log import ACCEPT_DEBUG_VARIABLE, ALIGN_DEBUG_VARIABLE, SPAN_DEBUG_VARIABLE
from eagle3core.request import Response

pytestmark = pytest.mark.reference

N_PROMPT, N_NEW = 9, 8


def logged(
    pair: Pair, k: int | None, variables: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> tuple[list[str], Response]:
    """The lines of a short run under `variables`, and its response."""
    engine = tiny_engine(pair, k)
    caplog.set_level(logging.INFO, "eagle3core")
    caplog.clear()
    for variable in variables:
        monkeypatch.setenv(variable, "1")
    response = engine.generate([random_prompts([N_PROMPT])[0]], new_tokens(N_NEW))[0]
    for variable in variables:
        monkeypatch.delenv(variable)
    return caplog.messages, response


def test_nothing_is_logged_unless_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines, _ = logged(pair, 3, [], monkeypatch, caplog)
    assert lines == []


@pytest.mark.parametrize(
    ("variable", "family"),
    [(ALIGN_DEBUG_VARIABLE, "Align"), (ACCEPT_DEBUG_VARIABLE, "Accept"), (SPAN_DEBUG_VARIABLE, "Span")],
)
def test_a_variable_asks_for_its_own_family_one_line_a_step(
    variable: str, family: str, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines, response = logged(pair, 3, [variable], monkeypatch, caplog)
    assert len(lines) == len(response.req_metrics.steps)
    assert all(line.startswith(f"[EAGLE][{family}] slot 0 step {i} ") for i, line in enumerate(lines))


def test_the_lines_say_what_the_steps_did(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [ALIGN_DEBUG_VARIABLE, ACCEPT_DEBUG_VARIABLE, SPAN_DEBUG_VARIABLE]
    lines, response = logged(pair, 3, wanted, monkeypatch, caplog)
    position = N_PROMPT + 1  # the prompt, and the token that its prefill gave
    for step, (align, accept, span) in zip(
        response.req_metrics.steps, zip(*[iter(lines)] * 3, strict=True), strict=True
    ):
        committed = response.token_ids[step.start : step.start + step.n_committed]
        assert align.endswith(f" target {committed} agree {step.n_accepted}")
        cut = ", cut at the end" if step.cut else ""
        assert accept.endswith(f" accepted {step.n_accepted} of 3, committed {step.n_committed}{cut}")
        assert span.endswith(f" positions {position}..{position + step.n_committed - 1}")
        position += step.n_committed
    assert position == N_PROMPT + N_NEW


def test_plain_decoding_has_positions_and_nothing_to_agree_with(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines, _ = logged(pair, None, [ALIGN_DEBUG_VARIABLE, SPAN_DEBUG_VARIABLE], monkeypatch, caplog)
    assert len(lines) == N_NEW - 1
    assert all("[Span]" in line for line in lines)
