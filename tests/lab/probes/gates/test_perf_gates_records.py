"""`eagle3lab gates check` on stored records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gate_rows import SPEC, by_name, rows

from lab import cli
from lab.errors import ExperimentError
from lab.probes.bench.record import record_of
from lab.probes.gates.config import GatesConfig, load_gates, packaged_gates
from lab.probes.gates.judging import judge_mode, outcome
from lab.probes.gates.records import rows_of
from lab.rows.store import Row

pytestmark = pytest.mark.reference


def main(options: list[str]) -> int:
    return cli.run(["gates", *options])


@pytest.fixture(scope="module")
def config() -> GatesConfig:
    return load_gates(packaged_gates())


def write_records(folder: Path, found: list[Row]) -> tuple[Path, Path]:
    paths = folder / "base.json", folder / "spec.json"
    for path, one in zip(paths, found, strict=True):
        path.write_text(json.dumps(record_of(one)), encoding="utf-8")
    return paths


def check(paths: tuple[Path, Path], mode: str = "single32k") -> int:
    return main(["check", *map(str, paths), "--mode", mode])


def test_records_are_judged_with_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(write_records(tmp_path, rows())) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["values"]["single32k spec: speed-up over our baseline, decoding only"] == pytest.approx(569.5 / 221.5)
    slow = rows(spec={"throughput_tokens_per_sec.mean": 420.0})
    assert check(write_records(tmp_path, slow)) == 1
    out = capsys.readouterr().out
    assert "fail    single32k spec: speed-up over our baseline, decoding only: 1.896 (at least 2)" in out


def test_ratios_are_those_of_the_two_records_given(config: GatesConfig, tmp_path: Path) -> None:
    faster = {"step_ms_median": 4.0, "throughput_tokens_per_sec.mean": 250.0}
    mode = config.find("single32k")
    _, spec = rows_of(*write_records(tmp_path, rows(base=faster)), mode)
    assert spec.values["step_over_base"] == pytest.approx(5.267 / 4.0)
    assert spec.values["speedup"] == pytest.approx(569.5 / 250.0)
    assert spec.values["speedup_at_dial"] == pytest.approx(2.57 * 1.167 / (5.267 / 4.0)), "the dial stays what it was"
    assert spec.values["step_over_base_bound"] == SPEC["step_over_base_bound"]


def test_of_several_runs_in_a_file_the_last_counts(config: GatesConfig, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    found = [*rows(), *rows({"step_ms_median": 5.0}, {"step_ms_median": 6.0})]
    path.write_text(json.dumps([record_of(one) for one in found]), encoding="utf-8")
    last = {one.name: one for one in rows_of(path, path, config.find("single32k"))}
    assert last["Speculative_Single_Context32K_3tokens"].values["step_over_base"] == pytest.approx(6.0 / 5.0)


def test_another_systems_records_are_judged_by_what_they_hold(config: GatesConfig, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"name": one.name, "throughput_tokens_per_sec": {"mean": mean}, "scenario": {"micro_run": True}}
        for one, mean in zip(rows(), (100.0, 210.0), strict=True)
    ]
    records[1]["eagle_speculation"] = {"mean_acceptance_length": 3.1}
    paths = tmp_path / "base.json", tmp_path / "spec.json"
    for path, record in zip(paths, records, strict=True):
        path.write_text(json.dumps(record), encoding="utf-8")
    mode = config.find("single32k")
    found = judge_mode(config, mode, "micro", rows_of(*paths, mode))
    assert by_name(found, "speed-up over our baseline").word == "pass"
    assert by_name(found, "spec: acceptance length").value == 3.1
    assert outcome(found) == "incomplete"


@pytest.mark.parametrize("nested", [2.2, 3.1])
def test_a_nested_acceptance_length_that_contradicts_the_flat_one_fails(
    tmp_path: Path, nested: float, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(spec={"eagle_speculation.mean_acceptance_length": nested})
    paths = write_records(tmp_path, found)
    assert cli.main(["gates", "check", *map(str, paths), "--mode", "single32k"]) == 1
    assert (
        f"acceptance_length 3.0003 and eagle_speculation.mean_acceptance_length {nested:g}" in capsys.readouterr().err
    )
    agreeing = rows(spec={"eagle_speculation.mean_acceptance_length": SPEC["acceptance_length"] * (1 + 1e-12)})
    assert check(write_records(tmp_path, agreeing)) == 0


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("flag", [None, False, "yes"])
def test_records_of_no_micro_run_are_refused(
    tmp_path: Path, side: int, flag: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: list[dict[str, Any]] = [{}, {}]
    changes[side] = {"scenario.micro_run": flag}
    with pytest.raises(ExperimentError, match=r"no true scenario\.micro_run"):
        check(write_records(tmp_path, rows(*changes)))
    assert capsys.readouterr().out == ""


def test_files_that_hold_no_such_record_are_refused(tmp_path: Path) -> None:
    base, spec = write_records(tmp_path, rows())
    with pytest.raises(ExperimentError, match=r"base\.json holds no record 'Baseline_Batch4_Context16K'"):
        check((base, spec), "batch4_16k")
    with pytest.raises(ExperimentError, match=r"spec\.json holds no record 'Baseline"):
        check((spec, base))
    for text in ("[1]", "{", '{"no": "name"}'):
        base.write_text(text, encoding="utf-8")
        with pytest.raises(ExperimentError, match=r"base\.json"):
            check((base, spec))
    with pytest.raises(ExperimentError, match="does not exist"):
        check((tmp_path / "absent.json", spec))


def test_records_with_values_of_another_kind_are_refused_with_the_files_name(tmp_path: Path) -> None:
    base, spec = write_records(tmp_path, rows())
    record = json.loads(spec.read_text(encoding="utf-8"))
    spec.write_text(json.dumps({**record, "step_ms_samples": [None] * 5}), encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"spec\.json"):
        check((base, spec))
    spec.write_text(json.dumps({**record, "parameters": 3}), encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"spec\.json"):
        check((base, spec))
