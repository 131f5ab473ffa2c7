"""What runs under the sanitizers is every card's every case; a tool that misses a planted bug judges nothing."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels import emulator, launch, registry, sanitize
from eagle3core.kernels.card import Card
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.machine import EmulationError
from eagle3core.kernels.sanitize_plants import PLANTS
from eagle3core.kernels.sanitize_report import CLEAN, FAILED, FOUND, Outcome, Summary
from eagle3core.kernels.sanitize_run import CPU, cases_of, known, variants, watched

REPAIRED = [undone for _, undone in PLANTS.values()]


@pytest.mark.emulated
@pytest.mark.parametrize(("tool", "message"), [("memcheck", "out of bounds"), ("racecheck", "race|nobody has written")])
def test_a_planted_bug_is_one_and_the_kernel_without_it_is_right(tool: str, message: str) -> None:
    planted, undone = PLANTS[tool]
    with pytest.raises(EmulationError, match=message):
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
@pytest.mark.parametrize("card", [card for pair in PLANTS.values() for card in pair], ids=lambda card: card.name)
def test_a_plant_compiles_under_a_name_that_the_tools_are_told_to_watch(card: Card) -> None:
    (variant,) = card.variants("sm_90a")
    made = compile_variant(variant, "sm_90a", disassemble=True)
    assert made.faults(variant) == []
    assert sanitize._NAMED in made.entry
    assert made.sass["BAR"] == (1 if card.name == "planted_race_undone" else 0)


@pytest.mark.compiled
@pytest.mark.slow
def test_processes_side_by_side_compile_what_is_not_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.CUBINS_VARIABLE, str(tmp_path))
    wanted = variants(REPAIRED, "sm_90a")
    assert [sanitize._is_at_hand(variant, "sm_90a") for variant in wanted] == [False, False]
    assert sanitize._compiled(wanted, "sm_90a", tmp_path, 2) == 2
    assert [sanitize._is_at_hand(variant, "sm_90a") for variant in wanted] == [True, True]
    assert sanitize._compiled([], "sm_90a", tmp_path, 2) == 0


@pytest.mark.reference
def test_every_kernel_of_every_case_is_known_before_the_tools_start() -> None:
    wanted = {launch.digest(variant, "sm_90a") for variant in variants([*known().values()], "sm_90a")}
    for card in known().values():
        case = card.cases[0]
        inputs = card.example(case, torch.Generator().manual_seed(0), CPU)
        for item in card.launches("sm_90a", case, inputs, card.outputs(case, inputs), **card.settings[-1]):
            assert launch.digest(item.variant, "sm_90a") in wanted


def outcomes(**verdicts: str) -> list[Outcome]:
    """Outcomes of both tools on both kernels of each plant, good ones but for those named."""
    made = []
    for tool, pair in PLANTS.items():
        for card, good in zip(pair, (FOUND, CLEAN), strict=True):
            made.append(Outcome(card.name, tool, verdicts.get(card.name, good), 1.0, 1, 1, Summary(0)))
    return made


@pytest.mark.reference
def test_a_tool_that_misses_its_plant_or_blames_the_kernel_without_it_judges_nothing() -> None:
    assert sanitize.missed_plants(outcomes()) == []
    (words,) = sanitize.missed_plants(outcomes(planted_race=CLEAN))
    assert "racecheck missed the bug of planted_race" in words
    (words,) = sanitize.missed_plants(outcomes(planted_write_undone=FOUND))
    assert "memcheck is not content" in words
    assert sanitize.missed_plants(outcomes(planted_write=FAILED))


@pytest.mark.reference
def test_a_tool_without_any_summary_does_not_work_on_this_machine() -> None:
    given = outcomes()
    given[2] = replace(given[2], verdict=FAILED, summary=None, reasons=["Device not supported"])
    with pytest.raises(BackendUnavailable, match="racecheck does not work on this machine: Device not supported"):
        sanitize.missed_plants(given)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("verdicts", "missed", "code"),
    [
        ((CLEAN, CLEAN), [], 0),
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
    assert sanitize.main([]) == 3
    words = capsys.readouterr().err
    assert "compute-sanitizer was not found" in words
    assert "do: install" in words


@pytest.mark.reference
def test_a_run_that_does_not_end_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    run = sanitize.Run(sys.executable, tmp_path, time.monotonic() + 60, 1)
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
    run = sanitize.Run("tool", tmp_path, 0.0, 1)
    commands = [run.command("gemm", tool, tmp_path / "log", tmp_path / "result") for tool in sanitize.TOOLS]
    ports = [int(command[command.index("--port") + 1]) for command in commands]
    assert abs(ports[0] - ports[1]) >= 10
    assert all(f"kns={sanitize._NAMED}" in command for command in commands)


@pytest.mark.reference
def test_past_the_deadline_nothing_starts_and_the_run_counts_as_incomplete(tmp_path: Path) -> None:
    run = sanitize.Run("no such tool", tmp_path, time.monotonic() - 1, 2)
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
    assert sanitize.main(["--ops", "accept", "--out", str(out), "--logs", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(row["op"], row["tool"], row["verdict"]) for row in rows} >= {
        ("planted_race", "racecheck", FOUND), ("planted_write", "memcheck", FOUND),
        ("accept", "racecheck", CLEAN), ("accept", "memcheck", CLEAN),
    }  # fmt: skip
