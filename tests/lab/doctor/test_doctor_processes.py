"""Lamps side by side: they find what they find one after the other, and what becomes of one is no other's matter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from broken_engines import broken_engine
from planted_causes import PLANTS
from random_pairs import write_random_pair

from lab.doctor.draft import examine as examining
from lab.doctor.draft import look as looking
from lab.doctor.draft.case import Case
from lab.doctor.draft.conditions import RESTS_ON, Conditions
from lab.doctor.draft.examine import Diagnosis, examine
from lab.doctor.draft.forked import Job, Outcome, outcomes
from lab.doctor.draft.lamp import Finding, Lamp
from lab.doctor.draft.lamps import LAMPS
from lab.doctor.draft.lamps.wiring import WIRING
from lab.doctor.draft.look import Judged, Limit, look_at, processes_of
from lab.pairs import shipped_pair
from lab.pairs.prompts import prompts_for

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(sys.platform != "linux", reason="processes part from one another on Linux alone"),
]
# A few of every kind: other readings, files, the run of another lamp, one of its own.
SOME = ("norms", "vocabulary_map", "method", "own_states", "greedy_text", "as_distribution", "slower")


def end_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise ValueError("no such thing\nand more")


def test_each_job_has_its_outcome_and_one_that_dies_or_fails_costs_no_other_its_value() -> None:
    jobs = [
        Job("killed", end_itself), Job("refused", refuse), Job("unsent", lambda: lambda: 0),
        Job("ended", lambda: os._exit(7)), Job("tensor", lambda: torch.arange(3)), Job("pid", os.getpid),
    ]  # fmt: skip
    found = {outcome.name: outcome for outcome in outcomes(jobs, 2)}
    assert found["killed"].failure.startswith("its process was ended by signal 9, SIGKILL")
    assert found["refused"] == Outcome("refused", None, "ValueError: no such thing")
    assert "pickle" in found["unsent"].failure
    assert found["ended"].failure == "its process ended with exit code 7"
    assert torch.equal(found["tensor"].value, torch.arange(3))
    assert found["pid"].value != os.getpid()
    assert len(found) == len(jobs)


def test_a_job_sees_what_became_of_those_that_it_needs() -> None:
    kept = dict[str, int]()
    jobs = [
        Job("sum", lambda: kept["one"] + kept["two"], frozenset({"one", "two"})),
        Job("two", lambda: kept["one"] + 1, frozenset({"one", "none of these"})), Job("one", lambda: 1),
    ]  # fmt: skip
    for outcome in outcomes(jobs, 3):
        kept[outcome.name] = outcome.value
    assert kept == {"one": 1, "two": 2, "sum": 3}


def test_a_job_is_told_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (found,) = outcomes([Job("asked", lambda: torch.cuda.is_available())], 1)
    assert found == Outcome("asked", False)
    assert torch.cuda.is_available(), "the process that they part from is left as it was"


@pytest.mark.gpu
def test_an_optimizer_steps_in_a_process_whose_first_one_has_looked_for_a_gpu() -> None:
    def step() -> float:
        weight = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0)
        weight.sum().backward()
        optimizer.step()
        return weight.item()

    assert torch.cuda.device_count() > 0
    assert torch.cuda.is_available()
    (found,) = outcomes([Job("step", step)], 1)
    assert found.failure == ""
    assert found.value == pytest.approx(0.5)


def test_no_job_is_begun_once_none_may_be() -> None:
    begun = iter([True, True, False, False, False])
    assert len(list(outcomes([Job(str(i), os.getpid) for i in range(4)], 2, lambda: next(begun)))) == 2


def gone(pids: list[int]) -> bool:
    """Whether processes come to their end in time."""
    end = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def begin_long(folder: Path, name: str) -> Callable[[], None]:
    """A job that says who it is, and goes on for a minute."""

    def work() -> None:
        (folder / name).write_text(str(os.getpid()))
        time.sleep(60)

    return work


def pids_in(folder: Path, n: int) -> list[int]:
    """Who has begun, once `n` have."""
    end = time.monotonic() + 60
    while len(pids := [path.read_text() for path in folder.iterdir()]) < n or not all(pids):
        assert time.monotonic() < end, "they have not begun"
        time.sleep(0.02)
    return [int(pid) for pid in pids]


def test_jobs_that_run_when_the_caller_leaves_are_ended(tmp_path: Path) -> None:
    jobs = [Job(name, begin_long(tmp_path, name)) for name in "ab"]
    running = outcomes([*jobs, Job("quick", lambda: pids_in(tmp_path, 2))], 3)
    pids = next(running).value
    running.close()
    assert gone(pids)


PROGRAM = """
    import os, signal, sys, time
    from pathlib import Path
    from lab.doctor.draft.forked import Job, outcomes
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what runs behind a shell's back
    def work(name):
        (Path(sys.argv[1]) / name).write_text(str(os.getpid()))
        time.sleep(60)
    list(outcomes([Job(name, lambda name=name: work(name)) for name in "ab"], 2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_goes_on_behind_a_program_that_is_interrupted_or_killed(number: int, tmp_path: Path) -> None:
    script, begun = tmp_path / "script.py", tmp_path / "begun"
    begun.mkdir()
    script.write_text(textwrap.dedent(PROGRAM))
    running = subprocess.Popen(
        [sys.executable, str(script), str(begun)], stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(examining.__file__).parents[3])},
    )  # fmt: skip
    pids = pids_in(begun, 2)
    if number == signal.SIGINT:
        os.killpg(running.pid, number)  # as a terminal sends it: to all of them
    else:
        running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert errors.count("Traceback") == (number == signal.SIGINT), errors
    assert gone(pids)


def records_of(diagnosis: Diagnosis) -> list[str]:
    """All that is stored, to the last bit, but for how long it took; in words, where NaN is NaN."""
    return [
        repr((kind, name, {key: value for key, value in values.items() if key != "took_s"}, reason))
        for kind, name, values, reason in diagnosis.records()
    ]


def test_some_lamps_find_the_same_in_one_and_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "LAMPS", tuple(lamp for lamp in LAMPS if lamp.name in SOME))
    case, heard = random_case(tmp_path), list[Judged]()
    alone, beside = (examine(replace(case), processes=n, on_lamp=heard.append) for n in (1, 2))
    assert records_of(alone) == records_of(beside)
    assert beside.comparison == alone.comparison
    assert not beside.failed
    assert [each.lamp.name for each in heard[: len(SOME)]] == [lamp.name for lamp in LAMPS if lamp.name in SOME]
    assert sorted(each.lamp.name for each in heard[len(SOME) :]) == sorted(SOME)


@pytest.mark.slow
def test_all_lamps_find_the_same_in_one_and_in_two_processes() -> None:
    case = broken_engine("", n_prompts=4, max_new_tokens=24)
    alone, beside = examine(replace(case)), examine(replace(case), processes=2)
    assert records_of(alone) == records_of(beside)
    assert len(beside.judged) == len(LAMPS)
    assert not beside.failed


@pytest.mark.slow
@pytest.mark.exhaustive  # of a healthy pair: the test above
def test_red_lamps_and_those_that_make_up_for_them_are_the_same_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "LAMPS", WIRING)
    case = PLANTS["tap_layers"](tmp_path).case
    alone, beside = examine(replace(case)), examine(replace(case), processes=2)
    assert records_of(alone) == records_of(beside)
    assert beside.judged[0].lamp.name == "tap_layers"
    assert beside.judged[0].finding.mended is not None, "the reading came back with the finding"
    reds = [Judged(each.lamp, replace(beside.judged[0].finding, lamp=each.lamp.name), 0.0) for each in beside.judged]
    assert reds[0].finding.repair is not None
    lesser = replace(reds[0].finding.repair, after=reds[0].finding.repair.before)
    reds[1:] = [replace(each, finding=replace(each.finding, repair=lesser)) for each in reds[1:]]
    explained = [examining.explained(case, reds, n) for n in (1, 2)]
    assert repr(explained[0]) == repr(explained[1])
    assert [each.finding.colour for each in explained[0]] == ["red"] + ["green"] * (len(WIRING) - 1)


def random_case(folder: Path) -> Case:
    target, draft = write_random_pair(folder)
    prompts, _ = prompts_for(target, limit=4, max_tokens=24)
    return Case(target, draft, tuple(prompts), max_new_tokens=8, device="cpu")


def tiny_case() -> Case:
    pair = shipped_pair()
    prompts, _ = prompts_for(pair.target, limit=2, max_tokens=40)
    return Case(pair.target, pair.draft, tuple(prompts), max_new_tokens=8, device="cpu")


@pytest.mark.slow
def test_lamps_name_every_run_that_they_read_and_none_that_is_not_there() -> None:
    names = {name for lamp in LAMPS for name in lamp.reads}
    assert names <= {*vars(Conditions)}
    assert {*RESTS_ON, *RESTS_ON.values()} <= names
    whole = tiny_case()
    assert whole.text.n_texts == 2
    for lamp in (lamp for lamp in LAMPS if lamp.reads):
        case = whole.read_as(whole.reading)  # with the text that was read, and runs of its own
        lamp.look(case)
        made = {*vars(case.conditions)} & names
        assert made <= {*lamp.reads}, lamp.name


def killed(case: Case) -> Finding:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it goes on behind its end")


def test_a_lamp_whose_process_is_killed_cannot_tell_and_the_others_tell_all_the_same() -> None:
    lamps = [Lamp("killed", "?", killed), *(lamp for lamp in LAMPS if lamp.name in ("method", "sliding_window"))]
    case = tiny_case()
    first, *others = look_at(case, lamps, n_processes=2, limit=Limit())
    assert (first.lamp.name, first.finding.colour, first.finding.failed) == ("killed", "unknown", True)
    assert "it failed: its process was ended by signal 9" in first.finding.said
    assert [each.finding.colour for each in others] == ["green", "green"]
    assert {"plain", "text", "base", "by_engine"} <= {*vars(case)}, "what lamps share was brought back"


def test_what_lamps_share_and_cannot_be_made_is_told_by_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(case: Case, *given: object) -> None:
        raise RuntimeError("the target is gone")

    monkeypatch.setattr(Case, "answers", lost)
    lamps = [lamp for lamp in LAMPS if lamp.name in ("norms", "own_states", "method")]
    judged = {each.lamp.name: each.finding for each in look_at(tiny_case(), lamps, n_processes=2, limit=Limit())}
    assert judged["method"].colour == "green"
    assert "RuntimeError: the target is gone (test_doctor_processes.py" in judged["norms"].said


def test_lamps_side_by_side_that_a_limit_leaves_out_say_so() -> None:
    judged = look_at(tiny_case(), LAMPS, n_processes=2, limit=Limit(0.0))
    assert [each.lamp for each in judged] == list(LAMPS)
    assert {each.finding.said for each in judged} == {"not looked at: the limit of 0 s was over"}


def test_small_targets_on_a_core_alone_are_examined_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "processes_for", lambda n, size: 7 if (n, size >= 2**30) == (26, True) else 0)
    case = tiny_case()
    assert [processes_of(case, asked, 26) for asked in (0, 1, 3, 99)] == [7, 1, 3, 26]
    monkeypatch.setattr("lab.doctor.draft.case.FEW_PARAMETERS", 1000)
    assert processes_of(tiny_case(), 3, 26) == 1
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert processes_of(tiny_case(), 3, 26) == 1
