"""On a GPU: the audit sees what is planted, steps are quiet, and the shipped pair's bits and stages hold."""

from __future__ import annotations

import pytest
import torch

from lab.pairs import shipped_pair
from lab.pairs.prompts import prompts_for
from lab.parity.recording import PairUnderTest
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.identity import Identity, IdentityPlan
from lab.probes.proofs.kernel_parity import KernelParity, ParityPlan
from lab.probes.proofs.long import LongPlan, LongRuns
from lab.probes.proofs.plans import planted_prompts
from lab.probes.proofs.quiet import Quiet, QuietPlan
from lab.probes.proofs.slots import FinishedSlots, SlotsPlan
from lab.probes.proofs.subject import Subject, open_subject

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def nano() -> Subject:
    return open_subject("nano")


@pytest.fixture(scope="module")
def shipped() -> Subject:
    return open_subject("shipped")


def trained_prompts(n: int) -> list[list[int]]:
    return [list(prompt.ids) for prompt in prompts_for(shipped_pair().target, limit=n, max_tokens=96)[0]]


def prompts_of(subject: Subject, n: int, length: int) -> list[list[int]]:
    assert subject.tokens is not None
    return planted_prompts(subject.tokens, n, length)


def unheld(checks: list[Check]) -> dict[str, str]:
    """Details of checks that do not hold, by name."""
    with torch.no_grad():
        found: dict[str, Verdict] = {check.name: check.judge() for check in checks}
    return {name: one.detail for name, one in found.items() if not one.held}


def test_the_audit_finds_every_plant_and_steps_are_quiet(nano: Subject) -> None:
    [prompt] = prompts_of(nano, 1, 100)
    checks = Quiet(nano, prompt, QuietPlan(k=3, context=100, n_steps=20)).checks()
    timed = ("busy", "follows", "host time")  # a matter of the pair's size, and of who else is on the machine
    assert unheld([check for check in checks if not any(name in check.name for name in timed)]) == {}


def test_bits_of_the_shipped_pair_do_not_depend_on_depth_and_company(shipped: Subject) -> None:
    plan = IdentityPlan((0, 3), (1, 3), 32, 256, shuffled=2, logit_slots=(1, 2), logit_tokens=16)
    assert unheld(Identity(shipped, trained_prompts(4), plan).checks()) == {}


def test_every_stage_of_the_shipped_pair_agrees_with_hugging_face(shipped: Subject) -> None:
    pair = PairUnderTest(shipped_pair().target, shipped_pair().draft, "bfloat16", "cuda")
    prompts = [prompt[:40] for prompt in trained_prompts(2)]
    assert unheld(KernelParity(pair, shipped, prompts, ParityPlan(k=3, steps=2)).checks()) == {}


def test_sequences_attended_fall_with_the_slots_that_run(nano: Subject) -> None:
    proof = FinishedSlots(nano, prompts_of(nano, 4, 64), SlotsPlan(slots=4, k=2, context=64, n_steps=8))
    with torch.no_grad():
        states = proof.states
    assert [states[n].attended for n in (4, 3, 2, 1)] == [12, 9, 6, 3]


def test_a_run_takes_no_memory_and_follows_the_map(nano: Subject) -> None:
    [prompt] = prompts_of(nano, 1, 2000)
    assert unheld(LongRuns(nano, prompt, LongPlan((5,), 2000, 200)).checks()) == {}
