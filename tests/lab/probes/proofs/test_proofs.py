"""Finished slots, long runs, and the command over all proofs: a row each, the worst verdict as exit code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from proof_subjects import planted_subject, subject_on_disk, verdicts

from eagle3core.errors import BackendUnavailable, ConfigError, KernelLimit
from lab import cli
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, EXIT_USAGE, ExperimentError
from lab.options.speed import SpeedOptions
from lab.pairs import shipped_pair
from lab.parity.recording import PairUnderTest
from lab.probes.proofs.check import Check, TimeLimit, Verdict, run_checks
from lab.probes.proofs.command import conclude, prove
from lab.probes.proofs.identity import IdentityPlan
from lab.probes.proofs.long import LongPlan, LongRuns, MemoryUse, judge_long
from lab.probes.proofs.plans import PARTS, Plans, Proofs, needed_variants, planted_prompts
from lab.probes.proofs.quiet import QuietPlan
from lab.probes.proofs.slots import FinishedSlots, Occupied, SlotsPlan, judge_rows, judge_time
from lab.probes.proofs.subject import Subject
from lab.probes.speed.command import SpeedPlans, scenario_of
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def planted() -> Subject:
    return planted_subject()


def test_finished_slots_leave_the_draft_and_attention(planted: Subject) -> None:
    assert planted.tokens is not None
    plan = SlotsPlan(slots=4, k=2, context=9, n_steps=3)
    proof = FinishedSlots(planted, planted_prompts(planted.tokens, 4, 9), plan)
    found = verdicts([check for check in proof.checks() if "rows" in check.name])
    assert set(proof.states) == {1, 2, 3, 4}
    assert [proof.states[n].attended for n in (4, 3, 2, 1)] == [12, 9, 6, 3], "two passes and a layer, a sequence each"
    for n_finished in (2, 3):
        assert found[f"planted small {n_finished} of 4 finished: rows"].held, found
    full, now = (found["planted small 2 of 4 finished: rows"].values[f"{name}drafted_rows"] for name in ("full_", ""))
    assert (full, now) == (16, 8)


def occupied(n: int, step_us: float, attended: int | None = None) -> Occupied:
    return Occupied(n, n, 4 * n, 3 * n if attended is None else attended, 4 * n, step_us, 9)


def test_rows_out_of_proportion_and_steps_that_do_not_get_faster_fail() -> None:
    states = {n: occupied(n, 10.0 * n) for n in (1, 2, 3, 4)}
    assert [judge_rows(states, 4, n).held for n in (1, 2, 3)] == [True] * 3
    assert [judge_time(states, 4, n).held for n in (1, 2, 3)] == [True] * 3
    states[3] = occupied(3, 41.0, attended=12)
    assert judge_rows(states, 4, 1).held is False
    assert judge_time(states, 4, 1).held is False
    del states[2]
    assert judge_rows(states, 4, 2).held is None
    assert judge_time(states, 4, 3).held is None


def test_a_long_run_follows_the_map(planted: Subject) -> None:
    assert planted.tokens is not None
    [prompt] = planted_prompts(planted.tokens, 1, 150)
    found = verdicts(LongRuns(planted, prompt, LongPlan((2, 5), 150, 60)).checks())
    assert {name: one.held for name, one in found.items()} == {
        "planted small spec-2": True,
        "planted small spec-5": True,
    }


def test_growing_memory_and_wrong_tokens_fail() -> None:
    before = MemoryUse(100, 200, 300, 7)
    right, wrong = Verdict(True, "right"), Verdict(False, "wrong")
    assert judge_long(right, before, before, 1.0).held is True
    assert judge_long(wrong, before, before, 1.0).held is False
    for name in ("allocated", "reserved", "n_allocations"):
        after = dataclasses.replace(before, **{name: 1000})
        grown = judge_long(right, before, after, 1.0)
        assert grown.held is False
        assert "memory grew" in grown.detail
    freed = dataclasses.replace(before, allocated=0)
    assert judge_long(right, before, freed, 1.0).held is True


def check(name: str, judge: Callable[[], Verdict]) -> Check:
    return Check("identity", name, {"spec_k": 3}, judge)


def test_rows_are_written_one_by_one_and_the_exit_code_is_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    on_disk: list[int] = []

    def held() -> Verdict:
        on_disk.append(len(out.read_text().splitlines()))
        return Verdict(True, "fine", {"n_rows": 3})

    def unable() -> Verdict:
        raise KernelLimit("a size", "another size", "change it")

    def broken() -> Verdict:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for judges, code in (
        ([held], EXIT_PASSED), ([held, unable], EXIT_COULD_NOT_RUN), ([held, unable, broken], EXIT_GATE_FAILED)
    ):  # fmt: skip
        out.unlink(missing_ok=True)
        checks = [check(f"number {i}", judge) for i, judge in enumerate(judges)]
        findings = prove(["identity"], {"identity": checks}.__getitem__, TimeLimit(60), out)
        assert conclude(findings) == code
    rows = {row.name: row for row in read_rows(out)}
    assert on_disk == [1, 1, 1], "the row that the part was opened is there before its first check"
    assert rows["identity/number 0"].values["n_rows"] == 3
    assert rows["identity/number 1"].status == "missing"
    assert rows["identity/number 2"].values["held"] is False
    assert "illegal memory access" in str(rows["identity/number 2"].values["detail"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["parts"] == {"identity": {"held": 2, "FAILED": 1, "missing": 1}}
    assert last["failed"] == ["identity/number 2"]


@pytest.mark.parametrize("kind", [BackendUnavailable, ConfigError, KernelLimit, ExperimentError])
def test_what_cannot_run_here_is_missing_with_its_reason_and_not_failed(kind: type[Exception]) -> None:
    def unable() -> Verdict:
        raise kind("no such thing", "another", "change it")

    def without_room() -> Verdict:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = run_checks([check("a", unable), check("b", without_room)], TimeLimit(60), lambda _: None)
    assert [(one.word, one.verdict.detail) for one in found] == [
        ("missing", "no such thing"),
        ("missing", "CUDA out of memory"),
    ]


def test_a_time_limit_is_over_when_its_seconds_are() -> None:
    now = [3.0]
    limit = TimeLimit(5.0, lambda: now[0])
    assert not limit.is_over
    now[0] = 8.0
    assert limit.is_over


def test_where_nothing_was_judged_nothing_has_passed() -> None:
    assert conclude([]) == EXIT_COULD_NOT_RUN


def test_what_a_part_listed_before_it_broke_is_still_judged() -> None:
    def listed(part: str) -> Iterator[Check]:
        yield check("first", lambda: Verdict(True, "fine"))
        raise KernelLimit("no room for the second pair", "room", "make it")

    findings = prove(["identity"], listed, TimeLimit(60), None)
    assert [(one.check.name, one.word) for one in findings] == [("opened", "missing"), ("first", "held")]


def test_parts_list_their_checks_over_the_pairs_they_need(planted: Subject) -> None:
    shipped = PairUnderTest(shipped_pair().target, shipped_pair().draft, "bfloat16", "cpu")
    opened: list[str] = []

    def open_pair(name: str) -> Subject:
        opened.append(name)
        return subject_on_disk(shipped) if name == "shipped" else planted

    plans = Plans(
        geometry="small", shipped=IdentityPlan((0, 2), (1,), 3, 128), planted=IdentityPlan((1,), (1,), 8, 128),
        company=IdentityPlan((2,), (2,), 4, 64), company_context=12, context=40,
        n_prompts=1, prompt_tokens=12, quiet=QuietPlan(k=1, context=9), slots=SlotsPlan(context=9),
        long=LongPlan((4,), 90, 16),
    )  # fmt: skip
    proofs = Proofs(plans, open_pair)
    listed = {part: list(proofs.checks(part)) for part in PARTS if part != "parity"}
    proofs.close()
    assert opened == ["shipped", "small"], "a pair is opened once"
    assert {part: len(checks) for part, checks in listed.items()} == {
        "identity": 5,
        "quiet": 8,
        "slots": 6,
        "long": 1,
        "memory": 2,
        "trees": 10,
        "waiting": 3,
        "prefill": 9,
        "serving": 4,
        "adaptive": 16,
    }
    for one in (*listed["identity"], *listed["long"]):
        assert verdicts([one])[one.name].held, one.name


def test_checks_past_the_time_limit_are_missing() -> None:
    now = [0.0]

    def slow() -> Verdict:
        now[0] += 6
        return Verdict(True, "fine")

    told: list[str] = []
    limit = TimeLimit(10, clock=lambda: now[0])
    findings = run_checks([check(str(i), slow) for i in range(4)], limit, lambda finding: told.append(finding.word))
    assert told == ["held", "held", "missing", "missing"]
    assert findings[-1].verdict.detail == "the time limit of 10 s was reached before it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_every_part_is_missing_and_the_command_exits_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert cli.main(["prove", "--out", str(out)]) == EXIT_COULD_NOT_RUN
    rows = read_rows(out)
    assert [row.name for row in rows] == [f"{part}/opened" for part in PARTS]
    assert {row.status for row in rows} == {"missing"}
    assert "torch sees none" in capsys.readouterr().out


def test_unknown_parts_and_shares_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prove", "quite"]) == EXIT_USAGE
    assert "PART is quite (did you mean quiet?)" in capsys.readouterr().err
    assert cli.main(["prove", "quiet", "--build", "cubins", "--share", "0/2"]) == EXIT_USAGE


@pytest.mark.slow
def test_kernels_over_caches_in_fp8_are_known_without_a_gpu() -> None:
    small = SpeedPlans(
        geometry="llama-3.1-8b", formats={"cache_dtype": "fp8", "draft_cache_dtype": "fp8"},
        scenario=scenario_of(SpeedOptions(geometry="nano", at="512x1", spec="0,3", device="cpu")),
    )  # fmt: skip
    names = {variant.name for variant in needed_variants(small, ("speed",), "sm_90a")}
    cached = {name for name in names if name.startswith("attention") or "_qkv_" in name}
    assert len(cached) > 6
    assert all("e4m3" in name for name in cached)


@pytest.mark.slow
def test_kernels_of_every_part_are_known_without_a_gpu() -> None:
    small = Plans(
        geometry="nano", shipped=IdentityPlan((0, 2), (1, 3), 8, 128), planted=IdentityPlan((1,), (1,), 8, 128),
        company=IdentityPlan((2,), (2,), 4, 64), slots=SlotsPlan(context=64), long=LongPlan((4,), 128, 16),
    )  # fmt: skip
    by_part = {part: {v.name for v in needed_variants(small, [part], "sm_90a")} for part in PARTS}
    assert all(by_part.values())
    two = PARTS[-2:]
    together = {variant.name for variant in needed_variants(small, two, "sm_90a")}
    assert together == set().union(*(by_part[part] for part in two))
