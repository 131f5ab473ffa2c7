"""What a doctor may be sure of: loops count once, little text is said, a lamp that fails costs no other its finding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from broken_engines import broken_engine
from healthy_pairs import healthy_pair

from lab.cli import run
from lab.doctor.draft import examine as examining
from lab.doctor.draft.case import Case
from lab.doctor.draft.given import case_of
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.lamps import LAMPS
from lab.doctor.draft.lamps.reach import look_at_length
from lab.doctor.draft.lamps.serving import adaptive_engine, look_at_speed, measured_costs
from lab.doctor.draft.lamps.vocabulary import look_at_map
from lab.doctor.draft.look import Judged
from lab.doctor.draft.measure import LEAST_GROUPS, Measurement, doubt, errors_above_zero, is_certain_gain
from lab.doctor.draft.refit import refit
from lab.doctor.draft.text import BLOCK, Text
from lab.pairs import shipped_pair
from lab.pairs.prompts import joined_prompts, prompts_for, prompts_from_ids
from lab.pairs.random_ids import random_prompts

pytestmark = pytest.mark.reference
SHIPPED = shipped_pair()


def text_of(*answers: list[int]) -> Text:
    """Answers to a prompt of one token, whose states nobody reads."""
    starts = [0]
    for answer in answers:
        starts.append(starts[-1] + 1 + len(answer))
    empty = torch.zeros(0)
    tokens = torch.tensor([token for answer in answers for token in (0, *answer)])
    return Text(((0,),) * len(answers), tuple(map(tuple, answers)), tuple(starts), tokens, *[empty] * 5)


def test_a_loop_is_one_piece_of_evidence_wherever_it_runs_and_fresh_text_one_a_block() -> None:
    fresh, loop = list(range(100, 100 + 4 * BLOCK)), [7, 8] * 40
    once, twice = text_of(fresh, loop).groups(), text_of(fresh, loop, loop[1:]).groups()
    assert len(once) == len(fresh) + len(loop) - 2
    looped, again = once[-60:].unique(), twice[-60:].unique()
    assert len(looped) == 1
    assert torch.equal(looped, again)
    assert 4 <= len(once[: len(fresh) - 1].unique()) <= 5
    assert set(twice.tolist()) == set(range(int(twice.max()) + 1))


def test_a_gain_inside_one_loop_alone_is_none_that_is_sure() -> None:
    groups = torch.cat([torch.zeros(900, dtype=torch.int64), 1 + torch.arange(LEAST_GROUPS)])
    gains = (groups == 0).double()
    assert errors_above_zero(gains, groups) < 1.5
    assert errors_above_zero(gains, torch.arange(len(gains)) // BLOCK) > 4
    few = torch.arange(900) * (LEAST_GROUPS - 1) // 900
    assert errors_above_zero(torch.ones(900, dtype=torch.double), few) == 0.0


@cache
def measured(n_prompts: int, new: int = 40) -> tuple[Measurement, Measurement]:
    """The shipped head with its residual taken on the wrong side, and as it is: 4 % more."""
    prompts, _ = prompts_for(SHIPPED.target, limit=n_prompts, max_tokens=64)
    case = Case(SHIPPED.target, SHIPPED.draft, tuple(prompts), max_new_tokens=new, device="cpu")
    return case.measured(case.reading.with_variant(normed_residual=True)), case.base


def test_a_gain_of_weight_that_little_text_cannot_show_is_doubted_and_says_how_much_would() -> None:
    worse, right = measured(4)
    assert not is_certain_gain(worse, right)
    little = replace(right, length=1.1 * worse.length)
    assert "prompts would tell" in doubt(worse, little, 4)
    assert doubt(worse, replace(right, length=worse.length), 4) == ""


def test_a_small_gain_is_none_that_is_sure_unless_the_text_grew_likelier_too() -> None:
    _, own = measured(4)
    right = replace(own, groups=torch.arange(len(own.groups)) * 2 * LEAST_GROUPS // len(own.groups))
    more = replace(right, accepted=right.accepted + 1, length=1.07 * right.length)
    assert not is_certain_gain(right, more)
    assert is_certain_gain(right, replace(more, likelihood=right.likelihood + 0.1))
    assert is_certain_gain(right, replace(more, length=1.2 * right.length))


def refused(case: Case) -> Finding:
    raise RuntimeError("no such device")


def test_a_lamp_that_fails_cannot_tell_and_the_others_tell_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Lamp("broken", "?", refused, is_fast=True)
    monkeypatch.setattr(examining, "LAMPS", (broken, *LAMPS))
    case, _ = case_of(fast=True, device="cpu")
    diagnosis = examining.examine(case, fast=True)
    assert [each.lamp.name for each in diagnosis.failed] == ["broken"]
    assert "RuntimeError: no such device (test_doctor_certainty.py, line" in diagnosis.failed[0].finding.said
    assert {"method", "random_tensors"} <= {each.lamp.name for each in diagnosis.of("green")}
    assert run(["doctor", "draft", str(SHIPPED.draft), "--target", str(SHIPPED.target), "--fast"]) == 3
    assert "1 lamp failed" in capsys.readouterr().out


def test_figures_that_cannot_be_taken_cost_no_lamp_its_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*given: object) -> None:
        raise RuntimeError("the device is gone")

    quick = tuple(lamp for lamp in LAMPS if lamp.name in ("method", "sliding_window"))
    monkeypatch.setattr(examining, "LAMPS", quick)
    monkeypatch.setattr(examining, "compare_with_controls", lost)
    diagnosis = examining.examine(broken_engine("", n_prompts=1, max_new_tokens=6))
    assert len(diagnosis.of("green")) == len(quick)
    assert "the device is gone" in diagnosis.reason
    assert ("draft_acceptance", "figures", {}, diagnosis.reason) in list(diagnosis.records())


def test_lamps_that_a_limit_of_time_leaves_out_cannot_tell_and_say_so() -> None:
    case, _ = case_of(fast=True, device="cpu")
    diagnosis = examining.examine(case, fast=True, limit_s=0.0)
    assert {each.finding.said for each in diagnosis.judged} == {"not looked at: the limit of 0 s was over"}
    assert len(diagnosis.of("unknown")) == len(LAMPS)


def test_the_engine_that_a_gpu_times_for_the_lamp_of_speed_can_be_made() -> None:
    case = broken_engine("", n_prompts=2, max_new_tokens=8)
    spec = adaptive_engine(case).config.speculative_config
    assert spec is not None
    assert spec.adaptive
    assert measured_costs(case)[0] == {}
    assert look_at_speed(case).colour == "unknown"


def test_a_lamp_that_does_without_the_head_stands_behind_those_that_mend_it() -> None:
    def judged(name: str, after: float, *, is_substitute: bool = False) -> Judged:
        finding = Finding(name, "red", name, Repair("do it", 1.0, after), is_substitute=is_substitute)
        return Judged(Lamp(name, "?", lambda _: finding), finding, 0.0)

    lamps = [judged("dead_head", 2.5, is_substitute=True), judged("rope", 1.2), judged("norms", 1.6)]
    assert [each.lamp.name for each in sorted(lamps, key=examining._order)] == ["norms", "rope", "dead_head"]


@pytest.mark.slow
def test_a_fall_with_length_on_too_little_text_is_no_matter_of_the_text() -> None:
    prompts = prompts_from_ids(joined_prompts(SHIPPED.target, 3, 700))
    found = look_at_length(Case(SHIPPED.target, SHIPPED.draft, tuple(prompts), max_new_tokens=24, device="cpu"))
    assert found.colour == "unknown", found.said
    assert "from position" in found.said
    assert "would tell" in found.said


def test_a_refit_of_some_rows_leaves_everything_else_of_the_head() -> None:
    prompts, _ = prompts_for(SHIPPED.target, limit=2, max_tokens=32)
    case = Case(SHIPPED.target, SHIPPED.draft, tuple(prompts), max_new_tokens=12, device="cpu")
    rows = torch.tensor([3, 17, 200])
    fitted = refit(case.reading, case.text, 2, rows=rows).weights
    own = case.reading.weights
    assert all(torch.equal(fitted[name], own[name]) for name in own if name != "lm_head.weight")
    changed = (fitted["lm_head.weight"] != own["lm_head.weight"]).any(dim=1).nonzero().flatten()
    assert set(changed.tolist()) == {3, 17, 200}


@pytest.mark.slow
def test_ids_in_no_order_among_right_ones_are_no_lost_map(tmp_path: Path) -> None:
    """The planted pair drafts wrong tokens after a fifth of all, which other ids for these rows would put right."""
    pair = healthy_pair("planted", tmp_path)
    prompts = prompts_from_ids(random_prompts(pair.target, 8, 32).ids)
    found = look_at_map(Case(pair.target, pair.draft, tuple(prompts), max_new_tokens=64, device="cpu"))
    assert found.colour == "unknown"
    assert "in no order" in found.said
