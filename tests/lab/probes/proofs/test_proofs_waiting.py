"""What reading prompts costs others: measured over a small pair, and judged from numbers that are known."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from proof_subjects import planted_subject, verdicts

from lab.probes.proofs.check import Verdict
from lab.probes.proofs.plans import planted_prompts
from lab.probes.proofs.subject import Subject
from lab.probes.proofs.timed import CollectorClock
from lab.probes.proofs.waiting import (
    Arrivals,
    BesideReading,
    Waiting,
    WaitingPlan,
    judge_passes,
    judge_speed,
    judge_wait,
)

pytestmark = pytest.mark.reference

RIGHT = Verdict(True, "5 prompts, 9 tokens equal", {"n_tokens": 9})
WRONG = Verdict(False, "1 of 5 prompts differ")
PLAN = WaitingPlan(running=2, context=9, k=2, n_steps=4, long=200, n_short=5, short=60)


@pytest.fixture(scope="module")
def planted() -> Subject:
    return planted_subject()


def waiting(planted: Subject, chunk: int, plan: WaitingPlan = PLAN) -> Waiting:
    """The proof over passes of `chunk` rows."""
    assert planted.tokens is not None
    tokens, settings = planted.tokens, {**planted.settings, "prefill_chunk": chunk}
    return Waiting(replace(planted, settings=settings), lambda n, length: planted_prompts(tokens, n, length), plan)


def test_requests_run_on_while_a_long_prompt_is_read_in_passes_between_their_steps(planted: Subject) -> None:
    proof = waiting(planted, 64)
    found = verdicts(proof.checks()[:2])
    assert proof.beside.right.held, proof.beside.right.detail
    assert proof.beside.n_passes == 4, "200 tokens in passes of 64"
    # A pass of 64 rows owes one step, and the last wait is counted too: each request waits five times at the least.
    assert len(proof.beside.waits_ms) >= 2 * 4
    assert min(proof.beside.waits_ms) > 0
    assert {"longest_wait_ms", "reading_s"} <= found["planted small longest wait"].values.keys()
    assert found["planted small speed kept"].values["speed_ratio"] > 0


def test_short_prompts_that_come_together_share_passes(planted: Subject) -> None:
    proof = waiting(planted, 128)
    [found] = verdicts(proof.checks()[2:]).values()
    assert proof.arrivals.right.held, proof.arrivals.right.detail
    assert (found.values["n_passes"], found.values["one_by_one_passes"]) == (3, 5)
    assert list(proof.arrivals.alone_s) == sorted(proof.arrivals.alone_s)


def test_prompts_that_do_not_fit_side_by_side_share_none(planted: Subject) -> None:
    proof = waiting(planted, 64)
    assert (proof.arrivals.n_passes, proof.arrivals.least_passes) == (5, 5)


@pytest.mark.parametrize(("longest", "held"), [(59.0, True), (61.0, False)])
def test_the_longest_wait_is_judged(longest: float, held: bool) -> None:
    found = BesideReading((4.0, longest, 5.0), 100.0, 60.0, 2.0, 64, RIGHT)
    assert judge_wait(found).held is held
    assert judge_wait(replace(found, right=WRONG)).held is False
    assert judge_wait(found).values["median_wait_ms"] == 5.0


@pytest.mark.parametrize(("during", "held"), [(45.1, True), (44.9, False)])
def test_the_speed_that_is_kept_is_judged(during: float, held: bool) -> None:
    found = BesideReading((4.0,), 100.0, during, 2.0, 64, RIGHT)
    assert judge_speed(found).held is held
    assert judge_speed(replace(found, right=Verdict(None, "no tokens"))).held is None


def test_passes_are_as_few_as_hold_the_prompts_and_sooner_over() -> None:
    found = Arrivals(3, 20, 3, (0.1, 0.12), (0.1, 0.2), RIGHT)
    assert judge_passes(found).held
    assert judge_passes(replace(found, n_passes=4)).held is False
    assert judge_passes(replace(found, first_s=(0.1, 0.3))).held is False
    assert judge_passes(replace(found, right=WRONG)).held is False
    assert judge_passes(found).values["mean_first_token_ms"] == pytest.approx(110.0)


def test_a_garbage_collection_that_first_tokens_waited_for_is_told() -> None:
    found = Arrivals(3, 20, 3, (0.1, 0.3), (0.1, 0.2), RIGHT, 180.0)
    verdict = judge_passes(found)
    assert verdict.held is False
    assert verdict.values["collected_ms"] == 180.0
    assert verdict.detail.endswith("; garbage collections took 180 ms of them")
    assert "garbage" not in judge_passes(replace(found, collected_ms=0.4)).detail


def test_collections_are_timed_while_the_block_runs() -> None:
    times = iter([1.0, 1.25, 2.0, 2.5])
    gc.disable()
    try:
        with CollectorClock(lambda: next(times)) as clock:
            gc.collect()
            gc.collect(0)
        gc.collect()
    finally:
        gc.enable()
    assert (clock.ms, clock.n_full) == (750.0, 1)


def test_engines_are_made_for_the_requests_that_meet() -> None:
    beside, together = WaitingPlan().settings()
    assert (beside.batch, beside.session_len, together.batch) == (5, 32784, 20)
