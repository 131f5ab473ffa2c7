"""A capture of steps is summed up by range, from torch's profiler on a real run and from one made by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import BY_MEANING, device_engine, engine_by_meaning
from profile_captures import N_STEPS, events, write_raw_page, write_sqlite
from proof_subjects import planted_subject
from tiny_engines import Pair, new_tokens, tokens_of

from eagle3core.kernels import proof, registry
from eagle3core.step.program import launches_of
from lab import cli
from lab.errors import ExperimentError, RunFailed
from lab.night.experiment import Experiment
from lab.probes.bench.floors import step_floor
from lab.probes.profiles import figures, records
from lab.probes.profiles.capture import PUBLIC, Capture, capture_of, chrome_trace, class_of, is_range, read_chrome_trace
from lab.probes.profiles.costs import declared_bytes, launch_bytes, program_bytes
from lab.probes.profiles.ranges import OUTSIDE, STEP, summed, union_us, values_of
from lab.probes.profiles.rows import FILE, TRACE, WATCHED, read_profile
from lab.probes.profiles.run import WatchedStages
from lab.probes.proofs.gpu_trace import WINDOW, GpuTrace, Span
from lab.probes.proofs.steps import WARM_STEPS
from lab.probes.proofs.subject import Setting
from lab.rows.environment import collect
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference


def main(options: list[str]) -> int:
    return cli.run(["profile", *options])


def test_kernels_belong_to_the_ranges_that_asked_for_them_however_late_they_run() -> None:
    profile = summed(capture_of(events()))
    found = values_of(profile, {"draft.fc": 1000, "target.attn": 6000}, on_gpu=True)
    assert (profile.n_steps, profile.n_unplaced) == (N_STEPS, 0)
    assert list(found) == [STEP, "EagleModule::forward", "draft.fc", "BASE_DECODE_STEP", "target.attn", OUTSIDE]
    attn = found["target.attn"]
    assert attn["calls"] == pytest.approx(2)
    assert attn["time_us"] == 2 * 60, "60 us of two overlapping kernels, in each of two layers"
    assert attn["host_us"] == 2 * 60
    assert attn["n_kernels"] == 4
    assert (attn["kernel_names"], attn["kernel_runs"]) == (["gemm", "attend"], [6, 6])
    assert attn["gb_per_s"] == pytest.approx(6000 / 120 / 1e3)
    assert found["BASE_DECODE_STEP"]["bytes"] == 6000
    assert found["BASE_DECODE_STEP"]["time_us"] == 120
    assert found["draft.fc"]["time_us"] == found["EagleModule::forward"]["time_us"] == 20
    assert found[STEP]["bytes"] == 7000
    assert found[STEP]["n_kernels"] == 5
    assert found[OUTSIDE]["n_kernels"] == 0


@pytest.mark.parametrize(
    ("call", "count"),
    [("cudaStreamSynchronize", "synchronises"), ("cudaEventSynchronize", "event_waits"), ("cudaMalloc", "allocations")],
)
def test_what_holds_a_step_up_is_counted_at_its_range(call: str, count: str) -> None:
    planted = {"ph": "X", "cat": "cuda_runtime", "name": call, "ts": 1330.0, "dur": 5.0, "args": {}}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "ts": 1331.0, "dur": 2.0}
    quiet = values_of(summed(capture_of(events())), {}, on_gpu=True)
    loud = values_of(summed(capture_of(events(planted, copy))), {}, on_gpu=True)
    key = f"n_{count}_all_steps"
    for name in ("target.attn", "BASE_DECODE_STEP"):
        assert (quiet[name][key], loud[name][key]) == (0, 1)
        assert (loud[name]["n_copies_all_steps"], loud[name]["n_pageable_all_steps"]) == (1, 1)
    assert loud["draft.fc"][key] == 0
    assert quiet[OUTSIDE]["n_event_waits_all_steps"] == N_STEPS, "the wait for the step before is the scheduler's"


def test_a_kernel_without_its_call_is_counted_and_belongs_to_nobody() -> None:
    lost = {"ph": "X", "cat": "kernel", "name": "lost", "ts": 1500.0, "dur": 5.0, "args": {"correlation": 999}}
    profile = summed(capture_of(events(lost)))
    assert profile.n_unplaced == 1
    assert "lost" not in profile.costs[0].kernels


def test_a_trace_is_read_again_as_it_was_written() -> None:
    capture = capture_of(events())
    again = capture_of(chrome_trace(capture)["traceEvents"])
    assert (again.ranges, again.trace) == (capture.ranges, capture.trace)


def test_a_capture_without_steps_is_refused() -> None:
    with pytest.raises(RunFailed, match="holds no steps"):
        summed(Capture("torch", (), GpuTrace((), (), (), ())))


def test_names_of_ranges_and_their_layers() -> None:
    assert all(map(is_range, (*PUBLIC, "target.31.mlp", "draft.fc", "accept", "tree.grow")))
    assert not is_range(WINDOW)
    assert [class_of(name) for name in ("target.31.mlp", "target.head", "commit")] == [
        "target.mlp", "target.head", "commit",
    ]  # fmt: skip
    assert union_us([Span("a", 0, 10), Span("b", 5, 12), Span("c", 20, 21)]) == 13


# -- bytes


def test_bytes_of_a_step_are_those_of_its_cards(nano_pair: Pair) -> None:
    engine = device_engine(nano_pair, 2, BY_MEANING)
    declared, by = declared_bytes(engine, 2, cached=100)
    assert by == "cards"
    block, weights = engine.target.geometry.block, 2
    ffn = 3 * block.hidden_size * block.intermediate_size * weights * engine.target.geometry.n_layers
    assert ffn < declared["target.mlp"] < 2 * ffn
    keys = 2 * 100 * block.n_kv_heads * block.head_dim * 2 * 2 * engine.target.geometry.n_layers
    more = declared_bytes(engine, 2, cached=200)[0]["target.attn"] - declared["target.attn"]
    assert more == pytest.approx(keys, rel=0.02), "a hundred more cached tokens of two sequences"
    assert declared["tree.grow"] < 20_000


def test_cards_ask_for_what_weights_and_cache_do_and_little_more() -> None:
    subject = planted_subject()
    runner = subject.runner(Setting(3, 2, 1024))
    declared = program_bytes(runner.programs[2], 500.0)
    floor = step_floor(subject.target.geometry, subject.draft.geometry, k=3, batch=2, cached=500.0, itemsize=2)
    for stage, n_bytes in floor.stages.items():
        assert 1.0 <= declared[stage] / n_bytes < 1.15, stage
    assert max(declared[stage] for stage in set(declared) - set(floor.stages)) < 20_000
    prefill = (stage for program in runner.reading for stage in program)
    for launch in launches_of(tuple(prefill)):
        assert 0 <= launch_bytes(launch, 64.0) < 40e6, launch.variant.name


PRODUCT = {"kind": "residual", "m": 3, "n": 32, "k": 512, "dtype": "bf16", "packed": True}
ATTENDED = {"dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "order": (2, 2), "prefix": (75,), "tokens": 3}


@pytest.mark.parametrize(
    ("op", "case"),
    [
        *(("gemm", {**PRODUCT, "fp8": form}) for form in (False, True, "blocks")),
        *(("attention", {**ATTENDED, "fp8": fp8, "window": window}) for fp8 in (False, True) for window in (0, 20)),
        *((op, case) for op in ("take_rows", "gather_rows") for case in registry()[op].cases),
    ],
)
def test_the_bytes_of_a_launch_are_those_of_its_card(op: str, case: dict[str, Any]) -> None:
    card, cpu = registry()[op], torch.device("cpu")
    inputs = card.example(case, proof.generator(6, cpu), cpu)
    first = card.launches("sm_90a", case, inputs, card.outputs(case, inputs))[0]
    assert launch_bytes(first, 75.0) == card.cost(case).bytes


# -- the command, on real steps


def test_steps_of_the_kernels_path_are_watched_stage_by_stage_and_change_no_token(
    nano_pair: Pair, tmp_path: Path
) -> None:
    prompts, generation = [list(range(1, 9)), list(range(30, 50))], new_tokens(30)
    expected = tokens_of(engine_by_meaning(nano_pair, 2).generate(prompts, generation))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    trace = WatchedStages(torch.device("cpu"), 2, profiler)
    assert tokens_of(engine_by_meaning(nano_pair, 2, trace=trace).generate(prompts, generation)) == expected
    assert trace.n_seen >= WARM_STEPS + 2
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    profile = summed(read_chrome_trace(tmp_path / "trace.json.gz"))
    calls = {cost.name: cost.calls for cost in profile.costs}
    assert profile.n_steps == 2
    assert set(PUBLIC) <= set(calls)
    assert (calls["draft.fc"], calls["draft.mlp"], calls["target.mlp"], calls["accept"]) == (1, 2, 2, 1)


def test_inside_another_tool_the_steps_run_bare_and_say_what_they_were(tmp_path: Path) -> None:
    assert main(["--at", "16x1", "--spec", "1", "--steps", "1", "--device", "cpu", "--bare", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / WATCHED).read_text())
    assert stored["watched"]["parameters"]["spec_k"] == 1
    assert stored["watched"]["declared"]["draft.mlp"] > 0
    assert [path.name for path in tmp_path.iterdir()] == [WATCHED]


def test_a_step_of_the_real_engine_is_profiled_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["--at", "16x1", "--spec", "2", "--steps", "2", "--device", "cpu", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "without dram bandwidth and occupancy by Nsight Compute: the steps run on a CPU" in said
    rows = read_profile(out / FILE)
    assert (rows.tool, rows.on_gpu, rows.n_steps) == ("torch", False, 2)
    assert set(rows.of("range")) == set(PUBLIC)
    assert rows.ranges["EAGLE_DRAFT_FFN"]["calls"] == 2
    assert 0.5 < sum(v["time_us"] for n, v in rows.of("range").items() if n in
                     ("EagleModule::forward", "BASE_DECODE_STEP")) / rows.ranges[STEP]["time_us"] < 1  # fmt: skip
    assert rows.ranges["BASE_DECODE_STEP"]["bytes"] > 1e6
    assert rows.ranges["EAGLE_ACCEPT"]["bytes"] is None
    capsys.readouterr()
    assert main(["--import", str(out / TRACE), "--out", str(tmp_path / "again")]) == 0
    again = read_profile(tmp_path / "again" / FILE)
    assert again.ranges["draft.fc"]["time_us"] == pytest.approx(rows.ranges["draft.fc"]["time_us"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--at", "16x1,32x1"], "16x1,32x1"), (["--spec", "0,3"], "--spec is 0,3"), (["--steps", "0"], "--steps is 0"),
        (["--share", "0.5", "--acceptance-length", "2"], "--share"),
    ],
)  # fmt: skip
def test_options_that_say_no_one_step_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    with pytest.raises(ExperimentError, match=words):
        main([*options, "--device", "cpu", "--out", str(tmp_path)])


def test_a_tool_asked_for_by_name_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="nsys was asked for: the steps run on a CPU"):
        main(["--tool", "nsys", "--device", "cpu", "--out", str(tmp_path)])


# -- what the notebook shows


@pytest.mark.usefixtures("page_style")
def test_pictures_and_words_of_a_profile_come_from_its_rows(tmp_path: Path) -> None:
    write_sqlite(tmp_path / "nsys.sqlite")
    write_raw_page(tmp_path / "ncu.csv")
    main(["--import", str(tmp_path / "nsys.sqlite"), str(tmp_path / "ncu.csv"), "--out", str(tmp_path / "out")])
    rows = read_profile(tmp_path / "out" / FILE)
    fig, table, *_ = figures.time_per_range(rows)
    assert [axes.get_title(loc="left") for axes in fig.axes] == ["public ranges", "stages"]
    assert list(table["range"]) == list(rows.ranges)
    assert "BASE_DECODE_STEP takes 86% of a step of 140 us (the GPU's time)" in figures.time_words(rows)
    drawn = figures.rates(rows)
    assert drawn is not None, "ncu's own rates are there, though no bytes are declared"
    assert list(drawn[1]["occupancy_ncu"]) == pytest.approx([0.8, 0.2])
    kernels = figures.kernel_table(rows)
    assert list(kernels[kernels["range"] == "target.attn"]["runs_a_step"]) == [2, 2]
    quiet = figures.quiet_table(rows).set_index("range")
    assert (quiet.loc["target.attn", "copies"], quiet.loc["draft.fc", "copies"]) == (1, 0)
    assert figures.quiet_words(rows).startswith("Loud ranges in 3 steps: BASE_DECODE_STEP: 1 copies")
    assert figures.n_loud(rows) == 2


def test_the_notebook_keeps_the_trace_and_judges_the_audit(tmp_path: Path) -> None:
    write_sqlite(tmp_path / "nsys.sqlite")
    main(["--import", str(tmp_path / "nsys.sqlite"), "--out", str(tmp_path / "stored")])
    rows = read_profile(tmp_path / "stored" / FILE)
    exp = Experiment("50_profile", "run", "by-hand", tmp_path / "out", {}, collect())
    records.write_ranges(exp, rows)
    assert f'href="{TRACE}"' in records.keep_trace(exp, rows)
    assert (exp.out / TRACE).read_bytes() == (tmp_path / "stored" / TRACE).read_bytes()
    records.write_gates(exp, rows)
    [gate] = exp.gates
    assert (gate["passed"], gate["value"]) == (False, 2), "a copy inside two public ranges' stages"
    records.write_ranges(exp, None)
    assert "No trace" in records.keep_trace(exp, None)
    exp.finish()
    kinds = [(row.kind, row.status) for row in read_rows(exp.out / "rows.jsonl")]
    assert kinds.count(("profile", "measured")) == len(rows.ranges)
    assert kinds.count(("profile", "missing")) == len(rows.missing) + 2
    assert kinds.count(("profile", "not asked")) == len(rows.not_asked) == 1


def test_what_nobody_asked_a_profiler_for_is_not_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sqlite(tmp_path / "nsys.sqlite")
    main(["--import", str(tmp_path / "nsys.sqlite"), "--out", str(tmp_path / "stored")])
    assert "not asked: dram bandwidth and occupancy by Nsight Compute: none was imported" in capsys.readouterr().out
    rows = read_profile(tmp_path / "stored" / FILE)
    assert not [what for what in rows.missing if "occupancy" in what]
    timed = replace(rows, ranges={"draft.fc": {"gb_per_s": 3000.0, "level": "stage"}})
    assert figures.rate_words(timed).endswith("Occupancy was not asked for: none was imported.")


@pytest.mark.parametrize("damaged", [lambda whole: whole[:-12], lambda whole: whole[:20] + b"xxxxxxxx" + whole[28:]])
def test_a_compressed_trace_that_was_cut_or_damaged_is_refused_with_the_reason(
    tmp_path: Path, damaged: Callable[[bytes], bytes]
) -> None:
    text = json.dumps({"traceEvents": [{"name": f"event {number}"} for number in range(500)]})
    (tmp_path / "cut.json.gz").write_bytes(damaged(gzip.compress(text.encode())))
    with pytest.raises(ExperimentError, match=r"cut\.json\.gz is no trace: \w+: \w+"):
        read_chrome_trace(tmp_path / "cut.json.gz")
