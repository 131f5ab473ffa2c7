"""What a step asks of a GPU is counted from its profile, and whatever may hold it up is found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from proof_subjects import planted_subject

from lab.probes.proofs import quiet as quiet_part
from lab.probes.proofs.gpu_trace import COPIES, KERNELS, WINDOW, StepCounts, api_name, busy_of, steps_of, trace_of
from lab.probes.proofs.plans import planted_prompts
from lab.probes.proofs.quiet import Quiet, QuietPlan, faults_of, is_found, judge_quiet
from lab.probes.proofs.subject import Subject

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def planted() -> Subject:
    return planted_subject()


def event(cat: str, name: str, ts: float, dur: float = 1.0, correlation: int | None = None) -> dict[str, Any]:
    """A complete event of a profile."""
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def profile(n_steps: int, *extra: tuple[str, str], gap: float = 0.0) -> list[dict[str, Any]]:
    """Steps of 100 us: a graph launch, a wait; then `extra` calls or copies."""
    events = []
    for i in range(n_steps):
        at = 100.0 * i
        events.append(event("user_annotation", WINDOW, at, 50))
        events.append(event("cuda_runtime", "cudaGraphLaunch", at + 1, correlation=10 * i + 1))
        events.append(event("cuda_runtime", "cudaEventRecord", at + 3))
        events.append(event("cuda_runtime", "cudaEventSynchronize", at + 4))
        # The GPU runs a step and a half behind.
        events.append(event(KERNELS[0], "gemm", at + 150, 60))
        events.append(event(KERNELS[0], "attention", at + 205, 45 - gap))
        for j, (cat, name) in enumerate(extra):
            number = 10 * i + 3 + j if cat == COPIES[0] else None
            if number is not None:
                events.append(event("cuda_runtime", "cudaMemcpyAsync", at + 5, correlation=number))
            events.append(event(cat, name, at + 6 if number is None else at + 253, correlation=number))
    return events


def test_a_profile_is_counted_by_the_step_that_asked() -> None:
    steps = steps_of(trace_of(profile(5)))
    assert steps == [StepCounts(event_waits=1)] * 5
    assert judge_quiet(steps).held


@pytest.mark.parametrize(
    ("extra", "count"),
    [
        (("cuda_runtime", "cudaStreamSynchronize"), "synchronises"),
        (("cuda_driver", "cuCtxSynchronize"), "synchronises"),
        (("cuda_runtime", "cudaMemcpy"), "synchronises"),
        (("cuda_driver", "cuMemcpyDtoH_v2"), "synchronises"),
        (("cuda_runtime", "cudaEventSynchronize"), "event_waits"),
        (("cuda_runtime", "cudaEventQuery"), "event_waits"),
        (("cuda_runtime", "cudaMalloc"), "allocations"),
        ((COPIES[0], "Memcpy DtoH (Device -> Pinned)"), "copies"),
        ((COPIES[0], "Memcpy DtoH (Device -> Pageable)"), "pageable"),
    ],
)
def test_whatever_else_a_step_does_is_found_under_its_count(extra: tuple[str, str], count: str) -> None:
    steps = steps_of(trace_of(profile(6, extra)))
    assert is_found(steps, count)
    found = judge_quiet(steps)
    assert found.held is False
    assert count in found.detail
    assert found.values["n_loud_steps"] == 6
    assert not is_found(steps_of(trace_of(profile(6))), count)


def test_a_call_of_the_driver_inside_the_runtimes_own_is_one_call() -> None:
    both = [*profile(4), *(event("cuda_driver", "cuEventSynchronize", 100.0 * i + 4.2, 0.5) for i in range(4))]
    assert judge_quiet(steps_of(trace_of(both))).held


def test_copies_to_the_device_and_on_it_are_quiet() -> None:
    extra = ((COPIES[0], "Memcpy HtoD (Pinned -> Device)"), (COPIES[0], "Memcpy DtoD (Device -> Device)"))
    assert judge_quiet(steps_of(trace_of(profile(4, *extra)))).held


def test_a_profile_that_shows_no_wait_at_all_proves_nothing() -> None:
    blind = [one for one in profile(5) if one["name"] != "cudaEventSynchronize"]
    assert judge_quiet(steps_of(trace_of(blind))).held is None
    assert judge_quiet([]).held is None


def test_apis_and_versions_of_a_call_are_one_name() -> None:
    assert {api_name(n) for n in ("cudaEventQuery", "cuEventQuery", "cudaEventQuery_v3020", "cuEventQuery_ptsz")} == {
        "EventQuery"
    }


def test_busy_is_the_union_of_kernels_between_the_first_and_the_last_step() -> None:
    whole = busy_of(trace_of(profile(10)))
    assert whole is not None
    assert whole.share == pytest.approx(1.0)
    holes = busy_of(trace_of(profile(10, gap=10.0)))
    assert holes is not None
    assert holes.share == pytest.approx(0.9, abs=0.02)
    assert holes.longest_gap_us == pytest.approx(10.0)
    assert busy_of(trace_of(profile(2))) is None


def test_the_audit_refuses_while_a_plant_is_untried_or_was_missed(planted: Subject) -> None:
    quiet = Quiet(planted, [1, 2, 3], QuietPlan(k=1, context=3, n_steps=4))
    quiet._trace = trace_of(profile(5))
    assert quiet._is_quiet().held is None
    quiet._found = dict.fromkeys(("item", "event synchronise", "stream synchronise", "copy to the host"), True)
    assert quiet._is_quiet().held is True
    quiet._found["item"] = False
    refused = quiet._is_quiet()
    assert refused.held is None
    assert refused.detail == "the audit did not find a planted item"


@pytest.mark.slow
def test_steps_of_the_real_engine_are_profiled_and_their_host_time_taken(
    planted: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planted.tokens is not None
    [prompt] = planted_prompts(planted.tokens, 1, 5)
    quiet = Quiet(planted, prompt, QuietPlan(k=1, context=5, n_steps=3))
    tried = []
    trace = quiet.profile(3, lambda: tried.append(1))
    assert (len(trace.windows), len(tried)) == (3, 3)
    assert judge_quiet(steps_of(trace)).held is None, "a CPU waits for no event"
    monkeypatch.setattr(quiet_part, "loop_us", lambda: 28.0)
    slow = quiet._host_time()
    assert slow.held is False, "the references of a step take milliseconds"
    assert len(slow.values["host_us_samples"]) == 3, "one run is enough where nothing was slowed"
    loops = itertools.chain([28.0] * 12, itertools.cycle([28.0, 45.0]))  # a loop on either side of every step
    monkeypatch.setattr(quiet_part, "loop_us", lambda: next(loops))
    monkeypatch.setattr(quiet_part, "undisturbed", lambda steps: [])
    assert len(quiet._host_time().values["host_us_samples"]) == 3 * quiet_part.HOST_RUNS, "and no more than so many"
    follows = quiet._follows()
    assert follows.values["n_steps"] == 3
    assert 0.5 < follows.values["share"] <= 1.0


def test_faults_are_named_with_what_may_be() -> None:
    assert faults_of(StepCounts(event_waits=1)) == []
    assert faults_of(StepCounts(copies=2, synchronises=1)) == [
        "2 copies where 0 may be",
        "1 synchronises where 0 may be",
    ]
