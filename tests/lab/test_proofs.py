"""Every proof holds for the kernels' path as its launches mean it, and each finds a mistake that is planted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import write_nano_pair
from proof_subjects import nano_subject, planted_subject, subject_on_disk
from tiny_engines import Pair, random_prompts

from eagle3core.decode.replay import EagerReplayer
from eagle3core.errors import KernelLimit
from lab import cli
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, EXIT_USAGE
from lab.pairs import shipped_pair
from lab.pairs.planted import find_geometry
from lab.parity.recording import PairUnderTest
from lab.proofs.check import Check, TimeLimit, Verdict, run_checks
from lab.proofs.command import conclude, prove
from lab.proofs.gpu_trace import COPIES, KERNELS, WINDOW, StepCounts, api_name, busy_of, steps_of, trace_of
from lab.proofs.identity import Identity, IdentityPlan, compare_bits, compare_tokens
from lab.proofs.kernel_parity import STAGES, KernelParity, ParityPlan
from lab.proofs.long import LongPlan, LongRuns, MemoryUse, judge_long
from lab.proofs.plans import PARTS, Plans, Proofs, needed_variants, planted_prompts, wide_pair
from lab.proofs.quiet import Quiet, QuietPlan, faults_of, is_found, judge_quiet
from lab.proofs.slots import FinishedSlots, Occupied, SlotsPlan, judge_rows, judge_time
from lab.proofs.subject import Subject
from lab.store import read_rows

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5)


@pytest.fixture(scope="module")
def nano(pair: Pair) -> Subject:
    return nano_subject(pair)


@pytest.fixture(scope="module")
def planted() -> Subject:
    return planted_subject()


def verdicts(checks: list[Check]) -> dict[str, Verdict]:
    """What each check found, by name."""
    with torch.no_grad():
        return {check.name: check.judge() for check in checks}


# ---- identity

PLAN = IdentityPlan((0, 1, 3), (1, 3), 16, 128, shuffled=2, logit_slots=(1, 2), logit_tokens=8)


def test_depth_company_and_order_change_neither_tokens_nor_logits(nano: Subject) -> None:
    found = verdicts(Identity(nano, random_prompts([3, 70, 9, 5], n_vocab=256), PLAN).checks())
    assert {name: one.detail for name, one in found.items() if not one.held} == {}
    assert set(found) == {
        *(f"nano spec-{k} x {n}" for k in (0, 1, 3) for n in (1, 3) if (k, n) != (0, 1)),
        *(f"nano spec-{k} x 2 shuffled" for k in (0, 1, 3)),
        *(f"nano logits spec-{k} x {n}" for k in (0, 1, 3) for n in (1, 2) if (k, n) != (0, 1)),
    }
    assert found["nano spec-3 x 3"].values == {"n_prompts": 4, "n_tokens": 64, "n_differing_prompts": 0}
    assert found["nano logits spec-3 x 2"].values == {"n_rows": 16, "n_differing_rows": 0}


def test_a_planted_pair_is_also_held_against_its_map(planted: Subject) -> None:
    assert planted.tokens is not None
    prompts = planted_prompts(planted.tokens, 2, 40)
    identity = Identity(planted, prompts, IdentityPlan((0, 2), (1,), 12, 128))
    assert {name: one.held for name, one in verdicts(identity.checks()).items()} == {
        "planted small the map": True, "planted small spec-2 x 1": True,
    }  # fmt: skip
    identity.baseline[1][5] += 1
    assert verdicts(identity.checks())["planted small the map"].values["first_token"] == 5


def test_a_row_whose_bits_depend_on_the_depth_is_found(nano: Subject) -> None:
    inner = nano.replayer
    assert isinstance(inner, EagerReplayer)
    execute = inner.execute

    def spoiled(launches: Any) -> None:
        execute(launches)
        for launch in launches:
            values = dict(zip([p.name for p in launch.variant.parameters], launch.values, strict=True))
            if "tiles" in values and values["third"] is not None and values["y"].shape == (4, 256):
                values["y"][1:, 3] += 0.5  # of logits of a step of four nodes alone

    wrong = dataclasses.replace(nano, replayer=EagerReplayer(spoiled))
    found = verdicts(Identity(wrong, random_prompts([3, 9], n_vocab=256), PLAN).checks())
    assert found["nano logits spec-1 x 1"].held
    broken = found["nano logits spec-3 x 1"]
    assert broken.held is False
    assert "first: prompt 0, row" in broken.detail


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


# ---- parity

PARITY = ParityPlan(k=3, steps=2)


def parity_of(pair: Pair, subject: Subject) -> KernelParity:
    prompts = random_prompts([9, 70], n_vocab=256)
    return KernelParity(PairUnderTest(*pair, "bfloat16", "cpu"), subject, prompts, PARITY)


def test_every_stage_of_the_kernels_agrees_with_hugging_face(pair: Pair, nano: Subject) -> None:
    proof = parity_of(pair, nano)
    found = verdicts(proof.checks())
    assert {name: one.detail for name, one in found.items() if not one.held} == {}
    assert len(found) == len(STAGES)
    assert found["nano draft.rope"].values["kinds"] == ["prefill", "extend", "chain1", "chain2", "after acceptance"]
    assert found["nano draft.norm"].values["kinds"] == ["extend", "chain1", "chain2", "after acceptance"]
    assert found["nano target.attn"].values["n_cells"] == 2 * 2 * 3  # prompts, layers, passes
    assert proof.report.passed


def test_random_layers_are_written_for_hugging_face_and_agree_with_it(tmp_path: Path) -> None:
    pair = wide_pair(tmp_path / "pair", find_geometry("nano"), torch.device("cpu"))
    prompts = random_prompts([9, 5], n_vocab=6144)
    found = verdicts(KernelParity(pair, subject_on_disk(pair), prompts, ParityPlan(k=2, steps=1)).checks())
    assert {name: one.detail for name, one in found.items() if not one.held} == {}
    assert found["on disk target.mlp"].values["n_cells"] == 2 * 2 * 2  # prompts, layers, passes


def scaled(subject: Subject, name: str) -> Subject:
    """The pair with one of the draft's tensors a little too large."""
    draft = subject.draft
    if name == "fc":
        fc = dataclasses.replace(draft.fc, weight=draft.fc.weight * 1.1)
        return dataclasses.replace(subject, draft=dataclasses.replace(draft, fc=fc))
    if name == "final_gain":
        return dataclasses.replace(subject, draft=dataclasses.replace(draft, final_gain=draft.final_gain * 1.2))
    map_ = getattr(draft.layer, name)
    layer = dataclasses.replace(draft.layer, **{name: dataclasses.replace(map_, weight=map_.weight * 1.1)})
    return dataclasses.replace(subject, draft=dataclasses.replace(draft, layer=layer))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("fc", "draft.fc"),
        ("qkv", "draft.qkv"),
        ("o", "draft.attn"),
        ("down", "draft.mlp"),
        ("final_gain", "draft.norm"),
    ],
)
def test_a_mistake_in_a_stage_is_named_at_that_stage(pair: Pair, nano: Subject, name: str, stage: str) -> None:
    proof = parity_of(pair, scaled(nano, name))
    found = verdicts(proof.checks())
    assert found[f"nano {stage}"].held is False
    first = proof.report.first_divergent
    assert first is not None
    assert first.stage == ("draft.feedback" if stage == "draft.mlp" else stage)
    for untouched in ("draft.taps", "target.head", "tree.tokens"):
        assert found[f"nano {untouched}"].held


def test_a_stage_that_nothing_recorded_is_missing(pair: Pair, nano: Subject) -> None:
    proof = parity_of(pair, nano)
    report = proof.report
    proof._report = dataclasses.replace(report, cells=[cell for cell in report.cells if cell.stage != "draft.rope"])
    found = verdicts(proof.checks())
    assert found["nano draft.rope"].held is None
    assert found["nano draft.qkv"].held


# ---- quiet


def event(cat: str, name: str, ts: float, dur: float = 1.0, correlation: int | None = None) -> dict[str, Any]:
    """A complete event of a profile."""
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def profile(n_steps: int, *extra: tuple[str, str], gap: float = 0.0) -> list[dict[str, Any]]:
    """Steps of 100 us: a graph launch, a copy of the results to pinned memory, a wait; then `extra` calls or copies."""
    events = []
    for i in range(n_steps):
        at = 100.0 * i
        events.append(event("user_annotation", WINDOW, at, 50))
        events.append(event("cuda_runtime", "cudaGraphLaunch", at + 1, correlation=10 * i + 1))
        events.append(event("cuda_runtime", "cudaMemcpyAsync", at + 2, correlation=10 * i + 2))
        events.append(event("cuda_runtime", "cudaEventRecord", at + 3))
        events.append(event("cuda_runtime", "cudaEventSynchronize", at + 4))
        # The GPU runs a step and a half behind.
        events.append(event(KERNELS[0], "gemm", at + 150, 60))
        events.append(event(KERNELS[0], "attention", at + 205, 45 - gap))
        events.append(event(COPIES[0], "Memcpy DtoH (Device -> Pinned)", at + 250, 2, correlation=10 * i + 2))
        for j, (cat, name) in enumerate(extra):
            number = 10 * i + 3 + j if cat == COPIES[0] else None
            if number is not None:
                events.append(event("cuda_runtime", "cudaMemcpyAsync", at + 5, correlation=number))
            events.append(event(cat, name, at + 6 if number is None else at + 253, correlation=number))
    return events


def test_a_profile_is_counted_by_the_step_that_asked() -> None:
    steps = steps_of(trace_of(profile(5)))
    assert steps == [StepCounts(copies=1, event_waits=1)] * 5
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


def test_a_profile_that_shows_no_copy_at_all_proves_nothing() -> None:
    blind = [one for one in profile(5) if one["cat"] not in COPIES]
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


def test_steps_of_the_real_engine_are_profiled_and_their_host_time_taken(planted: Subject) -> None:
    assert planted.tokens is not None
    [prompt] = planted_prompts(planted.tokens, 1, 5)
    quiet = Quiet(planted, prompt, QuietPlan(k=1, context=5, n_steps=3))
    tried = []
    trace = quiet.profile(3, lambda: tried.append(1))
    assert (len(trace.windows), len(tried)) == (3, 3)
    assert judge_quiet(steps_of(trace)).held is None, "a CPU copies nothing"
    slow = quiet._host_time()
    assert slow.held is False, "the references of a step take milliseconds"
    assert len(slow.values["host_us_samples"]) == 3
    follows = quiet._follows()
    assert follows.values["n_steps"] == 3
    assert 0.5 < follows.values["share"] <= 1.0


def test_faults_are_named_with_what_may_be() -> None:
    assert faults_of(StepCounts(copies=1, event_waits=1)) == []
    assert faults_of(StepCounts(copies=2, synchronises=1)) == [
        "2 copies where 1 may be",
        "1 synchronises where 0 may be",
    ]


# ---- slots


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


# ---- long


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


# ---- the command


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
        context=40, n_prompts=1, prompt_tokens=12, quiet=QuietPlan(k=1, context=9), slots=SlotsPlan(context=9),
        long=LongPlan((4,), 90, 16),
    )  # fmt: skip
    proofs = Proofs(plans, open_pair)
    listed = {part: list(proofs.checks(part)) for part in PARTS if part != "parity"}
    proofs.close()
    assert opened == ["shipped", "small"], "a pair is opened once"
    assert {part: len(checks) for part, checks in listed.items()} == {"identity": 3, "quiet": 8, "slots": 6, "long": 1}
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
    assert "no part 'quite'" in capsys.readouterr().err
    assert cli.main(["prove", "quiet", "--build", "cubins", "--share", "2/2"]) == EXIT_USAGE


def test_kernels_of_every_part_are_known_without_a_gpu() -> None:
    small = Plans(
        geometry="nano", shipped=IdentityPlan((0, 2), (1, 3), 8, 128), planted=IdentityPlan((1,), (1,), 8, 128),
        slots=SlotsPlan(context=64), long=LongPlan((4,), 128, 16),
    )  # fmt: skip
    by_part = {part: {v.name for v in needed_variants(small, [part], "sm_90a")} for part in PARTS}
    assert all(by_part.values())
    together = {variant.name for variant in needed_variants(small, PARTS, "sm_90a")}
    assert together == set().union(*by_part.values())
