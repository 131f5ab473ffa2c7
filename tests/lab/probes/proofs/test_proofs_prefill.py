"""How long prompts take to be read: measured over a small pair, and judged from numbers that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from proof_subjects import planted_subject, verdicts

from eagle3core.step.run import DeviceRunner
from lab.pairs.planted import find_geometry
from lab.probes.proofs.check import Verdict
from lab.probes.proofs.plans import planted_prompts
from lab.probes.proofs.prefill import checks as prefill_checks
from lab.probes.proofs.prefill.bound import reading_bound
from lab.probes.proofs.prefill.checks import Load, Prefill, PrefillPlan
from lab.probes.proofs.prefill.judging import ReadingTimes, judge_bits, judge_load, judge_rate
from lab.probes.proofs.prefill.peer import TorchPrefill
from lab.probes.proofs.subject import Subject

pytestmark = pytest.mark.reference

PLAN = PrefillPlan(
    loads=(Load(1, 20, 1e6), Load(1, 100, 1e-6), Load(3, 60)), rated=Load(1, 100), least_rate=1e-6, chunk=128, k=1,
    rounds=1, sizes=(64, 128), lengths=(20, 70, 64), product=64, apart=(Load(3, 60),),
)  # fmt: skip
TIMES = ReadingTimes((6.0, 8.0, 5.0), (5.5, 5.0, 5.1), 1, 100, 4.0, 10**12, 12.0, "", Verdict(True, "right"))


@pytest.fixture(scope="module")
def planted() -> Subject:
    return planted_subject()


def proof_of(planted: Subject) -> Prefill:
    assert planted.tokens is not None
    tokens = planted.tokens
    return Prefill(planted, lambda n, length: planted_prompts(tokens, n, length), PLAN)


def test_loads_are_timed_in_the_fewest_passes_beside_their_bound_and_plain_torch(planted: Subject) -> None:
    found = verdicts(proof_of(planted).checks())
    assert list(found) == [
        *(f"planted small {name}" for name in ("1 x 20", "1 x 100", "3 x 60", "rate of 3 x 60", "bits of every size"))
    ]
    one, long, many, rate, bits = found.values()
    assert [verdict.held for verdict in (one, long, many, rate, bits)] == [True, False, True, True, True], found
    assert [verdict.values["n_passes"] for verdict in (one, long, many)] == [1, 1, 2], "of 128 rows: two spans"
    for verdict in (one, long, many):
        values = verdict.values
        assert 0 < values["device_ms"] <= values["first_token_ms"] * 1.5
        assert values["peer_ms"] > 0
        assert values["over_bound"] == values["first_token_ms"] / values["bound_ms"] > 0
    assert bits.values["n_sizes"] == 2


def test_the_stages_of_passes_are_told_without_those_of_steps(planted: Subject) -> None:
    found = verdicts(proof_of(planted).checks()[:3])
    whole, _, apart = found.values()
    assert not [name for name in whole.values if name.startswith("stage_ms.")]
    stages = {name: ms for name, ms in apart.values.items() if name.startswith("stage_ms.")}
    assert {f"stage_ms.{name}" for name in ("target.embed", "target.attn", "target.mlp", "draft.qkv")} <= stages.keys()
    assert all(ms > 0 for ms in stages.values())
    first, second = sorted(stages, key=stages.get, reverse=True)[:2]
    assert f"run one by one, {first.partition('.')[2]} {stages[first]:.1f}, {second.partition('.')[2]}" in apart.detail


def test_a_pass_size_that_leaves_other_bits_is_found(planted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    read_on = DeviceRunner.read_on

    def wrong(self: DeviceRunner, *given: object) -> int:
        rows = read_on(self, *given)  # type: ignore[arg-type]
        if rows == 128 and len(given[0]) == 3:
            self.state.k[0, self.tables.own_blocks(0)[0], 0, 3, 5] += 1.0
        return rows

    monkeypatch.setattr(prefill_checks.DeviceRunner, "read_on", wrong)
    [*_, bits] = proof_of(planted).checks()
    [found] = verdicts([bits]).values()
    assert found.held is False
    assert found.values["n_differing"] == 1
    assert "20 tokens, 3 prompts, passes of 128: 1 differ" in found.detail


def test_a_first_token_is_judged_by_the_median_and_wrong_tokens_fail() -> None:
    assert judge_load(TIMES, 6.0).held
    assert judge_load(TIMES, 5.9).held is False
    assert judge_load(TIMES, None).held
    assert judge_load(replace(TIMES, right=Verdict(False, "wrong")), None).held is False
    values = judge_load(TIMES, 6.0).values
    assert (values["over_bound"], values["over_peer"]) == (1.5, 0.5)
    assert values["tflop_per_s"] == pytest.approx(196.1, abs=0.1)
    alone = judge_load(replace(TIMES, peer_ms=None, peer_reason="out of memory"), None)
    assert "peer_ms" not in alone.values
    assert "did not run: out of memory" in alone.detail


def test_many_prompts_are_judged_by_their_share_of_one_long_prompts_rate() -> None:
    rated = replace(TIMES, n_tokens=250)
    assert judge_rate(TIMES, rated, 0.40).held
    assert judge_rate(TIMES, rated, 0.41).held is False
    assert judge_bits({}, 10, 2).held
    assert judge_bits({"20 tokens, passes of 64": 3}, 10, 2).values["n_differing"] == 3


def test_the_bound_is_that_counted_by_hand() -> None:
    target = find_geometry("llama-3.1-8b").target
    maps = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    found = reading_bound(target, 1, 64, 2)
    assert found.flops == 2 * maps * 64 + 32 * 4 * 4096 * (64 * 65 // 2) + 2 * 128256 * 4096
    norms = (2 * 32 + 1) * 4096
    assert found.n_bytes == 2 * (maps + norms + 128256 * 4096) + 64 * 131_072
    assert found.ms(690.0, 4578.0) == pytest.approx(3.28, abs=0.01)
    assert reading_bound(target, 1, 32768, 2).ms(690.0, 4578.0) == pytest.approx(1071, abs=5)
    four, one = (reading_bound(target, n, 16384, 2) for n in (4, 1))
    assert four.flops == 4 * one.flops
    assert four.n_bytes - one.n_bytes == 3 * 16384 * 131_072, (
        "the weights are read once, keys and values written by each"
    )
    tied = reading_bound(replace(target, tie_word_embeddings=True), 1, 64, 2)
    assert tied == found, "the table is the head there"


def test_engines_read_in_passes_of_the_plans_sizes() -> None:
    made = PrefillPlan().settings()
    assert [setting.chunk for setting in made] == [1536] * 7 + [64, 128, 256, 512, 1024, 1536, 2048]
    assert [(setting.batch, setting.session_len) for setting in made[5:8]] == [(4, 16400), (64, 116), (4, 1316)]


def test_the_peer_sees_earlier_tokens_alone() -> None:
    target = planted_subject().target.geometry
    torch.manual_seed(0)
    peer = TorchPrefill(target, torch.float64, torch.device("cpu"))
    x = torch.randn(2, 9, target.block.hidden_size, dtype=torch.float64)
    other = x.clone()
    other[1, 3] += 1.0
    before, after = peer._logits(x), peer._logits(other)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    shorter = peer._logits(x[:, :3])
    assert torch.allclose(shorter, peer._logits(other[:, :3]))
