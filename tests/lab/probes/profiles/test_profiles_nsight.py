"""Captures of Nsight are read, its tools are called for the watched steps alone, and what is missing is said.

No tool of Nsight is at hand where this was written: its captures are made by hand (`profile_captures`), with the
columns that its documentation names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from profile_captures import N_STEPS, PROJECTED, events, write_raw_page, write_sqlite

from lab import cli
from lab.errors import ExperimentError, NotComparable, RunFailed
from lab.probes.profiles import command, tools
from lab.probes.profiles.capture import capture_of
from lab.probes.profiles.ncu import kernels_of
from lab.probes.profiles.nsys import read_sqlite
from lab.probes.profiles.ranges import OUTSIDE, STEP, summed, values_of
from lab.probes.profiles.rows import FILE, read_profile
from lab.probes.proofs.gpu_trace import WINDOW

pytestmark = pytest.mark.reference


def main(options: list[str]) -> int:
    return cli.run(["profile", *options])


# -- Nsight Systems


def test_an_export_of_nsight_systems_gives_what_the_same_events_give(tmp_path: Path) -> None:
    capture = read_sqlite(write_sqlite(tmp_path / "nsys.sqlite"))
    expected = values_of(summed(capture_of(events())), {}, on_gpu=True)
    found = values_of(summed(capture), {}, on_gpu=True)
    for name, values in expected.items():
        for key in ("time_us", "host_us", "calls", "n_kernels", "kernel_names", "n_event_waits_all_steps"):
            assert found[name][key] == pytest.approx(values[key]), (name, key)
    assert found["target.attn"]["n_pageable_all_steps"] == 1


def test_an_export_that_lacks_a_table_or_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="has no table NVTX_EVENTS"):
        read_sqlite(write_sqlite(tmp_path / "a.sqlite", without="NVTX_EVENTS"))
    (tmp_path / "b.sqlite").write_text("this is no data base, whatever its name says" * 40)
    with pytest.raises(ExperimentError, match="cannot be read"):
        read_sqlite(tmp_path / "b.sqlite")
    without = read_sqlite(write_sqlite(tmp_path / "c.sqlite", without="CUPTI_ACTIVITY_KIND_MEMCPY"))
    assert without.trace.copies == ()


def test_sums_of_nsys_stats_are_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "proj.csv").write_text(PROJECTED)
    assert main(["--import", str(tmp_path / "proj.csv"), "--out", str(tmp_path / "out")]) == 0
    assert "no watched.json beside the capture" in capsys.readouterr().out
    rows = read_profile(tmp_path / "out" / FILE)
    assert rows.tool == "nsys"
    assert rows.ranges[STEP]["time_us"] == 450
    assert rows.ranges["target.attn"]["time_us"] == 250
    assert rows.ranges["target.attn"]["n_kernels"] == 4
    assert rows.ranges["EagleModule::forward"]["level"] == "range"
    (tmp_path / "proj.csv").write_text(PROJECTED.replace("Total GPU Ops", "GPU Ops"))
    with pytest.raises(ExperimentError, match="has the columns"):
        main(["--import", str(tmp_path / "proj.csv"), "--out", str(tmp_path / "out")])


# -- Nsight Compute


def test_counters_of_nsight_compute_are_averaged_by_time(tmp_path: Path) -> None:
    counters = kernels_of(write_raw_page(tmp_path / "ncu.csv").read_text().splitlines())
    assert [one.ranges for one in counters] == [
        ("BASE_DECODE_STEP", "target.0.attn"), ("BASE_DECODE_STEP", "target.31.attn"),
        ("EagleModule::forward", "draft.fc"),
    ]  # fmt: skip
    found = values_of(summed(capture_of(events())), {}, counters, on_gpu=True)
    for name in ("target.attn", "BASE_DECODE_STEP"):
        assert found[name]["dram_gb_per_s"] == pytest.approx(500e6 / 400e-6 / 1e9)
        assert found[name]["occupancy"] == pytest.approx((0.5 * 100 + 0.1 * 300) / 400)
    assert found["draft.fc"]["dram_gb_per_s"] == pytest.approx(4000)
    assert found[STEP]["ncu_kernels"] == 3
    assert found[OUTSIDE]["occupancy"] is None


def test_a_raw_page_in_other_units_is_scaled_or_refused(tmp_path: Path) -> None:
    kernels = kernels_of(write_raw_page(tmp_path / "a.csv", unit="Gbyte").read_text().splitlines())
    assert kernels[0].dram_bytes == 400e9
    with pytest.raises(ExperimentError, match="'sector'"):
        kernels_of(write_raw_page(tmp_path / "b.csv", unit="sector").read_text().splitlines())
    with pytest.raises(ExperimentError, match="no raw page"):
        kernels_of(["==WARNING== No kernels were profiled."])


def test_stored_captures_of_both_tools_make_one_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sqlite(tmp_path / "nsys.sqlite")
    write_raw_page(tmp_path / "ncu.csv")
    told = {
        "machine": "abc", "gpu": "a GPU", "watched": {
            "parameters": {"geometry": "nano", "pair": "planted", "context": 24, "batch": 1, "spec_k": 3,
                           "dtype": "bfloat16", "device": "cuda", "path": "kernels"},
            "n_steps": 3, "cached": 40.0, "declared": {"target.attn": 6000}, "bytes_by": "cards"},
    }  # fmt: skip
    (tmp_path / "watched.json").write_text(json.dumps(told))
    files = [str(tmp_path / "nsys.sqlite"), str(tmp_path / "ncu.csv")]
    assert main(["--import", *files, "--out", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missing"] == {}
    rows = read_profile(tmp_path / "out" / FILE)
    assert "planted nano, 24x1, spec-3" in rows.line()
    assert (rows.machine, rows.on_gpu, rows.n_steps) == ("a GPU", True, N_STEPS)
    assert rows.ranges["target.attn"]["gb_per_s"] == pytest.approx(0.05)
    assert rows.ranges["target.attn"]["occupancy"] == pytest.approx(0.2)
    assert rows.trace is not None
    assert list(rows.of("range")) == ["EagleModule::forward", "BASE_DECODE_STEP"]
    two = (tmp_path / "out" / FILE).read_text()
    (tmp_path / "two.jsonl").write_text(two + two.replace('"spec_k":3', '"spec_k":2'))
    with pytest.raises(NotComparable, match="spec-3, bfloat16, path kernels and "):
        read_profile(tmp_path / "two.jsonl")


def test_files_that_nobody_reads_and_reports_without_their_tool_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "a.json").write_text("[]")
    for name, words in (
        ("a.csv", "no capture that can be read"),
        ("a.json", "no trace"),
        ("b.json", "b.json.*does not exist"),
    ):
        with pytest.raises(ExperimentError, match=words):
            main(["--import", str(tmp_path / name), "--out", str(tmp_path / "out")])
    for name in ("a.nsys-rep", "a.ncu-rep"):
        (tmp_path / name).write_text("")
        with pytest.raises(RunFailed, match=f"{name[2:6].strip('-')} is not in PATH"):
            main(["--import", str(tmp_path / name), "--out", str(tmp_path / "out")])


# -- the tools' own commands, with scripts in their place


def script(folder: Path, name: str, text: str) -> None:
    """An executable in `folder`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nsight_is_called_with_the_watched_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "out"
    folder.mkdir()
    script(tmp_path, "nsys", f'echo "$@" >> {tmp_path}/calls')
    script(tmp_path, "ncu", f'echo "$@" >> {tmp_path}/calls; case "$1" in --import) echo the raw page;; esac')
    assert tools.take_sqlite(folder, ["python", "-m", "lab"]) == folder / "nsys.sqlite"
    assert tools.take_raw_page(folder, ["python", "-m", "lab"]).read_text() == "the raw page\n"
    profiled, exported, counted, printed = (tmp_path / "calls").read_text().splitlines()
    assert "--capture-range=cudaProfilerApi" in profiled
    assert "-t cuda,nvtx" in profiled
    assert profiled.endswith("python -m lab")
    assert exported.startswith("export --type sqlite")
    assert f"--nvtx --nvtx-include eagle3core@{WINDOW}/ --clock-control none --profile-from-start off" in counted
    assert printed.endswith("--page raw --csv")


def test_a_tool_that_fails_or_may_not_read_counters_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    script(tmp_path, "ncu", "echo ==ERROR== ERR_NVGPUCTRPERM - no permission; exit 1")
    with pytest.raises(RunFailed, match="lets this user read no counters"):
        tools.take_raw_page(tmp_path, ["true"])
    script(tmp_path, "ncu", "echo it broke >&2; exit 3")
    with pytest.raises(RunFailed, match="ncu exited 3: it broke"):
        tools.take_raw_page(tmp_path, ["true"])
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert tools.why_none("nsys") == "nsys is not in PATH"


def test_what_nsight_gives_is_taken_and_torch_stands_in_for_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_why_not", lambda tool, scenario: tools.why_none(tool))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    out, options = tmp_path / "out", ["--at", "16x1", "--spec", "1", "--steps", "1", "--device", "cpu"]
    page, base = write_raw_page(tmp_path / "page.csv"), write_sqlite(tmp_path / "made.sqlite")
    script(tmp_path, "ncu", f'case "$1" in --import) cat {page};; esac')
    script(tmp_path, "nsys", "echo cannot trace >&2; exit 1")
    assert main([*options, "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["tool"] == "torch"
    assert said["missing"] == {"a capture by Nsight Systems": "nsys exited 1: cannot trace"}
    assert read_profile(out / FILE).ranges["draft.fc"]["occupancy"] == pytest.approx(0.8)
    script(tmp_path, "nsys", f"cp {base} {out}/nsys.sqlite")
    script(tmp_path, "ncu", "echo ==WARNING== No kernels were profiled.")
    assert main([*options, "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["tool"] == "nsys"
    assert said["missing"] == {
        "dram bandwidth and occupancy by Nsight Compute": "ncu.csv has no raw page with gpu__time_duration.sum"
    }
    with pytest.raises(RunFailed, match=r"ncu was asked for: ncu\.csv has no raw page"):
        main([*options, "--tool", "ncu", "--out", str(out)])
