"""Bits do not depend on depth or company, and a row whose bits do is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from proof_subjects import planted_subject, verdicts
from tiny_engines import random_prompts

from eagle3core import ConfigError, EngineConfig, ForcedAcceptance, RelaxedAcceptance
from eagle3core.acceptance import AcceptanceRule
from eagle3core.step.replay import EagerReplayer
from lab.probes.proofs.identity import Identity, IdentityPlan, compare_bits, compare_tokens
from lab.probes.proofs.plans import planted_prompts
from lab.probes.proofs.subject import Setting, Subject

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def planted() -> Subject:
    return planted_subject()


PLAN = IdentityPlan((0, 1, 3), (1, 3), 16, 128, shuffled=2, logit_slots=(1, 2), logit_tokens=8)


def test_depth_company_and_order_change_neither_tokens_nor_logits(nano_kernels: Subject) -> None:
    found = verdicts(Identity(nano_kernels, random_prompts([3, 70, 9, 5], n_vocab=256), PLAN).checks())
    assert {name: one.detail for name, one in found.items() if not one.held} == {}
    assert set(found) == {
        *(f"nano spec-{k} x {n}" for k in (0, 1, 3) for n in (1, 3) if (k, n) != (0, 1)),
        *(f"nano spec-{k} x 2 shuffled" for k in (0, 1, 3)),
        *(f"nano logits spec-{k} x {n}" for k in (0, 1, 3) for n in (1, 2) if (k, n) != (0, 1)),
    }
    assert found["nano spec-3 x 3"].values == {"n_prompts": 4, "n_tokens": 64, "n_differing_prompts": 0}
    assert found["nano logits spec-3 x 2"].values == {"n_rows": 16, "n_differing_rows": 0}


@pytest.mark.slow
def test_requests_that_wait_again_and_texts_that_were_kept_are_compared_and_have_to_occur(
    nano_kernels: Subject,
) -> None:
    prompts = random_prompts([70, 9], n_vocab=256)
    plan = IdentityPlan((), (), 80, 256, crowded_ks=(0, 2), crowded_slots=2, crowded_blocks=4)
    found = verdicts(Identity(nano_kernels, prompts, plan).checks())
    assert {name: one.detail for name, one in found.items() if not one.held} == {}
    assert set(found) == {"nano spec-0 x 2 crowded", "nano spec-2 x 2 crowded"}
    assert all(one.values["n_put_back"] > 0 and one.values["n_found_tokens"] > 0 for one in found.values())
    roomy = dataclasses.replace(plan, crowded_ks=(0,), crowded_blocks=20)
    [one] = verdicts(Identity(nano_kernels, prompts, roomy).checks()).values()
    assert one.held is None, "nobody was put back, so nothing was asked"


def test_a_planted_pair_is_also_held_against_its_map(planted: Subject) -> None:
    assert planted.tokens is not None
    prompts = planted_prompts(planted.tokens, 2, 40)
    identity = Identity(planted, prompts, IdentityPlan((0, 2), (1,), 12, 128))
    assert {name: one.held for name, one in verdicts(identity.checks()).items()} == {
        "planted small the map": True, "planted small spec-2 x 1": True,
    }  # fmt: skip
    identity.baseline[1][5] += 1
    assert verdicts(identity.checks())["planted small the map"].values["first_token"] == 5


def test_a_row_whose_bits_depend_on_the_depth_is_found(nano_kernels: Subject) -> None:
    inner = nano_kernels.replayer
    assert isinstance(inner, EagerReplayer)
    execute = inner.execute

    def spoiled(calls: Any) -> None:
        execute(calls)
        for call in calls:
            if call.op == "gemm" and "third" in call.operands and call.operands["y"].shape == (4, 256):
                call.operands["y"][1:, 3] += 0.5  # of logits of a step of four nodes alone

    wrong = dataclasses.replace(nano_kernels, replayer=EagerReplayer(spoiled))
    found = verdicts(Identity(wrong, random_prompts([3, 9], n_vocab=256), PLAN).checks())
    assert found["nano logits spec-1 x 1"].held
    broken = found["nano logits spec-3 x 1"]
    assert broken.held is False
    assert "first: prompt 0, row" in broken.detail


@pytest.mark.parametrize("rule", [ForcedAcceptance(length=1), RelaxedAcceptance(1, 0.0)])
def test_answers_that_are_not_the_targets_own_are_never_proven_identical(
    nano_kernels: Subject, rule: AcceptanceRule
) -> None:
    """Not even by rules so strict that every token would be equal."""

    class Lossy(Subject):
        def config(self, setting: Setting) -> EngineConfig:
            config = super().config(setting)
            spec = config.speculative_config
            accepted = spec and dataclasses.replace(spec, acceptance=rule)
            return dataclasses.replace(config, speculative_config=accepted)

    fields = {field.name: getattr(nano_kernels, field.name) for field in dataclasses.fields(Subject)}
    checks = Identity(Lossy(**fields), random_prompts([3], n_vocab=256), IdentityPlan((2,), (1,), 4, 128)).checks()
    with pytest.raises(ConfigError, match="tokens are not the target's own"):  # which a run writes as its reason
        checks[0].judge()


def test_first_differences_are_named() -> None:
    found = compare_tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]])
    assert (found.held, found.values["first_prompt"], found.values["first_token"]) == (False, 1, 1)
    assert compare_tokens([[1, 2]], [[1, 2, 3]]).held is False
    assert compare_tokens([], []).held is None
    rows = torch.zeros(3, 5, dtype=torch.int16)
    other = rows.clone()
    other[2, 1] = 1
    assert compare_bits([rows], [rows]).held is True
    assert compare_bits([rows], [other]).values == {"n_rows": 3, "n_differing_rows": 1}
    assert compare_bits([rows[:2]], [rows]).held is False
    assert compare_bits([], []).held is None
