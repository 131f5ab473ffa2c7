"""What runs under the sanitizers is every card's every case; a tool that misses a planted bug judges nothing."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels import cubins, registry
from eagle3core.kernels.card import Card
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.cubins import lookup
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from lab.options.kernels import SanitizeOptions
from lab.probes.sanitizer import command as sanitize
from lab.probes.sanitizer import processes as sanitize_processes
from lab.probes.sanitizer.plants import PLANTS, WRITTEN, plants_of, written_on
from lab.probes.sanitizer.report import CLEAN, CLEAN_IN_FORM, FAILED, FOUND, Outcome, Summary
from lab.probes.sanitizer.run import CPU, cases_of, known, seen_by, variants, watched
from lab.rows.store import read_rows

PAIRS = [pytest.param(tool, pair, id=pair[0].name) for tool, pairs in PLANTS.items() for pair in pairs]
COSTLY = ("planted_stage", "planted_turn", "planted_copy")  # to compile
REPAIRED = [undone for pairs in PLANTS.values() for _, undone in pairs]


@pytest.mark.emulated
@pytest.mark.parametrize("as_written", [True, False], ids=["written", "seen"])
@pytest.mark.parametrize(("tool", "pair"), PAIRS)
def test_a_planted_bug_is_one_and_the_kernel_without_it_is_right(tool: str, pair: tuple, as_written: bool) -> None:
    planted, undone = pair if as_written else (seen_by(tool, card) for card in pair)
    with pytest.raises(EmulationError, match="out of bounds" if tool == "memcheck" else "race|nobody has written"):
        watched(planted, "sm_90a", CPU, emulator.execute)
    found = watched(undone, "sm_90a", CPU, emulator.execute)
    assert (found.cases, found.launches, found.faults) == (1, 1, [])


@pytest.mark.emulated
def test_a_card_runs_every_case_under_every_setting_once() -> None:
    card = replace(registry()["accept"], settings=({}, {}))
    runs = []

    def execute(launches: list) -> None:
        runs.append(len(launches))
        emulator.execute(launches)

    found = watched(card, "sm_90a", CPU, execute)
    assert found.cases == len(cases_of(card)) == len(card.cases) + len(card.slow_cases)
    assert len(runs) == 2 * found.cases
    assert found.launches == sum(runs)
    assert found.faults == []


@pytest.mark.emulated
def test_wrong_numbers_and_bits_that_change_with_a_setting_are_faults() -> None:
    card = replace(REPAIRED[0], settings=({}, {}))
    runs = []

    def execute(launches: list) -> None:
        emulator.execute(launches)
        runs.append(launches)
        if len(runs) == 2:
            launches[0].values[1][3] += 1

    (changed,) = watched(card, "sm_90a", CPU, execute).faults
    assert "y: 1 elements change with the setting" in changed
    runs.append(None)  # from here on nothing is disturbed
    wrong = replace(card, reference=lambda case, inputs: {"y": 3 * inputs["x"]})
    (off,) = watched(wrong, "sm_90a", CPU, execute).faults
    assert "y: error" in off


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("tool", "pair"),
    [pytest.param(*each.values, id=each.id, marks=[pytest.mark.slow] * (each.id in COSTLY)) for each in PAIRS],
)
def test_a_plant_compiles_under_a_name_that_the_tools_are_told_to_watch(tool: str, pair: tuple[Card, Card]) -> None:
    for card in pair:
        for variant in variants([card, seen_by(tool, card)], "sm_90a"):
            made = compile_variant(variant, "sm_90a", disassemble=True)
            assert made.faults(variant) == []
            assert sanitize_processes.NAMED in made.entry
            waits = tool == "racecheck" and card is pair[1]  # those of planted_stage begin with a barrier, both
            assert bool(made.sass["BAR"]) == (waits or "stage" in card.name)


@pytest.mark.compiled
@pytest.mark.slow
def test_processes_side_by_side_compile_what_is_not_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cubins.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sanitize, "_wanted", lambda cards, arch: variants(REPAIRED, arch))
    assert not any(cubins.is_stored(variant, "sm_90a") for variant in variants(REPAIRED, "sm_90a"))
    sanitize._prepare([], "sm_90a", 2)
    assert all(cubins.is_stored(variant, "sm_90a") for variant in variants(REPAIRED, "sm_90a"))
    # Whatever was prepared is found under the tools, where nothing may be compiled.
    monkeypatch.setattr(lookup, "compile_variant", lambda *a: pytest.fail("compiled again"))
    capsys.readouterr()
    sanitize._prepare([], "sm_90a", 2)
    assert " 0 of them to be compiled first" in capsys.readouterr().out


@pytest.mark.reference
def test_no_two_plants_share_a_cubin() -> None:
    made = [
        variant for card in known().values() if card.name.startswith("planted") for variant in card.variants("sm_90a")
    ]
    digests = {cubins.digest(variant, "sm_90a") for variant in made}
    assert len(digests) == len({variant.name for variant in made})


@pytest.mark.reference
def test_every_kernel_of_every_case_is_known_before_the_tools_start() -> None:
    wanted = {cubins.digest(variant, "sm_90a") for variant in sanitize._wanted([*registry().values()], "sm_90a")}
    for card in known().values():
        case = card.cases[0]
        inputs = card.example(case, torch.Generator().manual_seed(0), CPU)
        for tool in sanitize.TOOLS:
            seen = seen_by(tool, card)
            for item in seen.launches("sm_90a", case, inputs, card.outputs(case, inputs), **card.settings[-1]):
                assert cubins.digest(item.variant, "sm_90a") in wanted


def outcomes(**verdicts: str) -> list[Outcome]:
    """Outcomes of both tools on all plants, good ones but for those named."""
    good = {card.name: FOUND for card in WRITTEN}
    good |= {planted.name: FOUND for pairs in PLANTS.values() for planted, _ in pairs}
    good |= {undone.name: CLEAN_IN_FORM if undone.name in ("planted_turn_undone",) else CLEAN for undone in REPAIRED}
    return [
        Outcome(card.name, tool, verdicts.get(card.name, good[card.name]), 1.0, 1, 1, 0, Summary(0))
        for card, tool in sanitize._planted("sm_90a")
    ]


@pytest.mark.reference
def test_a_tool_that_misses_its_plant_or_blames_the_kernel_without_it_judges_nothing() -> None:
    assert sanitize.missed_plants(outcomes(), PLANTS) == []
    for planted, undone in (pair for pairs in PLANTS.values() for pair in pairs):
        (words,) = sanitize.missed_plants(outcomes(**{planted.name: CLEAN}), PLANTS)
        assert f"missed the bug of {planted.name}" in words
        (words,) = sanitize.missed_plants(outcomes(**{undone.name: FOUND}), PLANTS)
        assert f"is not content with {undone.name}" in words
        assert sanitize.missed_plants(outcomes(**{planted.name: FAILED}), PLANTS)


@pytest.mark.reference
def test_what_racecheck_makes_of_right_kernels_as_they_are_written_is_said() -> None:
    turn, stage = sanitize.what_racecheck_misjudges(outcomes(planted_stage_as_written=CLEAN))
    assert "cannot follow planted_turn_as_written: it is right" in turn
    assert "follows planted_stage_as_written (clean)" in stage


@pytest.mark.reference
def test_a_tool_without_any_summary_does_not_work_on_this_machine() -> None:
    given = outcomes()
    given[2] = replace(given[2], verdict=FAILED, summary=None, reasons=["Device not supported"])
    with pytest.raises(BackendUnavailable, match="racecheck does not work on this machine: Device not supported"):
        sanitize.missed_plants(given, PLANTS)


@pytest.mark.reference
def test_plants_whose_instructions_an_architecture_lacks_are_left_out_there() -> None:
    assert plants_of("sm_90a") == PLANTS
    names = [planted.name for planted, _ in plants_of("sm_80")["racecheck"]]
    assert names == ["planted_race", "planted_copy", "planted_turn"]
    assert [card.name for card in written_on("sm_80")] == ["planted_turn_as_written"]


@pytest.mark.reference
@pytest.mark.parametrize(
    ("verdicts", "missed", "code"),
    [
        ((CLEAN, CLEAN), [], 0),
        ((CLEAN, CLEAN_IN_FORM), [], 0),
        ((CLEAN_IN_FORM, FOUND), [], 1),
        ((CLEAN, FOUND), [], 1),
        ((CLEAN, FAILED), [], 1),
        ((CLEAN, "incomplete"), [], 3),
        ((CLEAN,), [], 3),
        ((FOUND, "incomplete"), [], 1),
        ((), ["memcheck missed the bug"], 1),
    ],
)
def test_the_exit_code_is_0_only_if_all_is_clean(verdicts: tuple, missed: list, code: int) -> None:
    found = [Outcome("gemm", "memcheck", verdict, 1.0) for verdict in verdicts]
    assert sanitize._concluded(found, 2, missed) == code


@pytest.mark.reference
@pytest.mark.skipif(shutil.which(sanitize.SANITIZER) is not None, reason="compute-sanitizer is installed here")
def test_a_missing_tool_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if Path("/usr/local/cuda/bin", sanitize.SANITIZER).exists():
        pytest.skip("compute-sanitizer is installed here")
    assert sanitize.run(SanitizeOptions()) == 3
    words = capsys.readouterr().err
    assert "compute-sanitizer was not found" in words
    assert "do: install" in words


@pytest.mark.reference
def test_a_run_that_does_not_end_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    run = sanitize_processes.Run(sys.executable, tmp_path, time.monotonic() + 60, 1)
    late = "import sys, time; time.sleep(1.2); open(sys.argv[1], 'w')"
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    begun = time.monotonic()
    assert run._ended([sys.executable, "-c", nested, late, str(tmp_path / "late")], tmp_path / "out", 0.5) is None
    time.sleep(max(0.0, begun + 2.0 - time.monotonic()))
    assert not (tmp_path / "late").exists()
    assert run._ended([sys.executable, "-c", "print(7); raise SystemExit(3)"], tmp_path / "out", 30) == 3
    assert (tmp_path / "out").read_text() == "7\n"


@pytest.mark.reference
def test_runs_beside_each_other_listen_on_ports_of_their_own(tmp_path: Path) -> None:
    run = sanitize_processes.Run("tool", tmp_path, 0.0, 1)
    commands = [run.command(tool, tmp_path / "log") for tool in sanitize.TOOLS]
    ports = [int(command[command.index("--port") + 1]) for command in commands]
    assert abs(ports[0] - ports[1]) >= 10
    assert all(f"kns={sanitize_processes.NAMED}" in command for command in commands)


@pytest.mark.reference
def test_past_the_deadline_nothing_starts_and_the_run_counts_as_incomplete(tmp_path: Path) -> None:
    run = sanitize_processes.Run("no such tool", tmp_path, time.monotonic() - 1, 2)
    told: list[Outcome] = []
    (outcome,) = run.all_of([(REPAIRED[0], "memcheck")], told.append)
    assert told == [outcome]
    assert outcome.verdict == "incomplete"
    assert sanitize._concluded([outcome], 1, []) == 3


@pytest.mark.gpu
@pytest.mark.slow
def test_both_tools_find_their_plant_on_this_gpu_and_a_card_is_clean(gpu, tmp_path: Path) -> None:
    try:
        sanitize.located()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    out = tmp_path / "rows.jsonl"
    assert sanitize.run(SanitizeOptions(ops=("accept",), out=out, logs=tmp_path)) == 0
    rows = [row for row in read_rows(out) if row.kind == "sanitizer"]
    assert {(row.name, row.parameters["tool"], row.values["verdict"]) for row in rows} >= {
        ("planted_race", "racecheck", FOUND), ("planted_write", "memcheck", FOUND),
        ("accept", "racecheck", CLEAN), ("accept", "memcheck", CLEAN),
    }  # fmt: skip
