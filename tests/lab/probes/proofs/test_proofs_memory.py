"""The whole engine under memcheck: what runs there checks its tokens, and a tool that misses its plant has no say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from proof_subjects import planted_subject, verdicts

from eagle3core.errors import BackendUnavailable
from eagle3core.step.replay import EagerReplayer
from lab.probes.proofs.check import Check, TimeLimit, run_checks
from lab.probes.proofs.memory_access import MemoryAccess
from lab.probes.proofs.plans import planted_prompts
from lab.probes.proofs.subject import Subject
from lab.probes.proofs.watched_run import Watched, WatchedPlan, stray, watched
from lab.probes.sanitizer.report import CLEAN, FAILED, FOUND, INCOMPLETE, Outcome, Summary

pytestmark = pytest.mark.reference
PLAN = WatchedPlan(k=2, slots=2, n_prompts=3, prompt_tokens=9, n_tokens=5)


@pytest.fixture(scope="module")
def planted() -> Subject:
    return planted_subject()


def prompts_of(subject: Subject) -> list[list[int]]:
    assert subject.tokens is not None
    return planted_prompts(subject.tokens, PLAN.n_prompts, PLAN.prompt_tokens)


def run(subject: Subject) -> Watched:
    with torch.no_grad():
        return watched(subject, prompts_of(subject), PLAN)


def test_both_engines_run_and_agree(planted: Subject) -> None:
    found = run(planted)
    assert (found.cases, found.faults) == (2, [])
    assert found.launches > 50


def test_a_depth_that_changes_tokens_is_a_fault(planted: Subject) -> None:
    inner = planted.replayer
    assert isinstance(inner, EagerReplayer)
    execute = inner.execute

    def spoiled(calls: Any) -> None:
        for call in calls:
            execute([call])
            if call.op == "argmax_of_partials" and call.operands["ids"].numel() > PLAN.slots:
                call.operands["ids"][0] = (call.operands["ids"][0] + 1) % 7  # of a verify's first row

    found = run(dataclasses.replace(planted, replayer=EagerReplayer(spoiled)))
    assert "plain decoding" in found.faults[0]


def test_the_plant_is_a_slot_that_does_not_exist(planted: Subject) -> None:
    with pytest.raises(IndexError, match="index 2 is out of bounds"):
        stray(planted, PLAN)


def outcome(verdict: str, errors: int = 0) -> Outcome:
    return Outcome(
        "engine", "memcheck", verdict, 1.0, cases=2, launches=300, summary=Summary(errors),
        reasons=["Invalid __global__ read"] * errors,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("planted_outcome", "own", "held"),
    [
        (outcome(FOUND, 2), outcome(CLEAN), [True, True]),
        (outcome(FOUND, 2), outcome(FOUND, 1), [True, False]),
        (outcome(FOUND, 2), outcome(FAILED), [True, False]),
        (outcome(FOUND, 2), outcome(INCOMPLETE), [True, None]),
        (outcome(CLEAN), outcome(CLEAN), [False, None]),
    ],
)
def test_only_a_tool_that_found_its_plant_judges(planted_outcome: Outcome, own: Outcome, held: list[Any]) -> None:
    def watch(arguments: tuple[str, ...]) -> Outcome:
        return planted_outcome if arguments == ("--plant",) else own

    assert [one.held for one in verdicts(MemoryAccess(watch).checks()).values()] == held


def test_without_the_tool_both_checks_are_missing() -> None:
    def watch(arguments: tuple[str, ...]) -> Outcome:
        raise BackendUnavailable("compute-sanitizer was not found", "a toolkit", "install one")

    checks: list[Check] = MemoryAccess(watch).checks()
    findings = run_checks(checks, TimeLimit(60), lambda finding: None)
    assert [one.word for one in findings] == ["missing", "missing"]
