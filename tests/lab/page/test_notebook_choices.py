"""What notebooks offer to choose from: runs, GPUs, acceptance; and the way from a symptom to a notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib as mpl
import pytest
from places import ROOT

from lab.night.experiment import Experiment
from lab.page import picked_runs, start_here
from lab.page.start_here import SYMPTOMS
from lab.probes.kernels import other_gpus
from lab.probes.kernels.roofline import PASS_US
from lab.probes.kernels.rows import read_bench
from lab.probes.speed import figures
from lab.probes.speed.rows import read_speed
from lab.rows import environment
from lab.rows.runs import Runs, committed_runs
from lab.widgets import Picker, Slider, starts

pytestmark = pytest.mark.reference

H200 = ROOT / "reports" / "reference" / "h200"


def test_every_notebook_is_led_to_by_a_symptom_and_every_link_is_a_notebook() -> None:
    assert start_here.unanswered() == []
    linked = re.findall(r'href="([^"]+)"', start_here.symptoms_html(links=True) + start_here.questions_html(links=True))
    assert {Path(link).stem for link in linked} == set(start_here.notebook_names())
    assert all((ROOT / "notebooks" / link).is_file() for link in linked)
    assert "href" not in start_here.symptoms_html(links=False)
    assert len({each.seen for each in SYMPTOMS}) == len(SYMPTOMS)


def test_runs_are_listed_newest_first_with_their_sentence_or_it_is_said_how_to_make_one() -> None:
    old, new = (Path(name) for name in ("old", "new"))
    table = start_here.runs_html(Runs([(old, {"sentence": "Failed: <1>."}), (new, {"sentence": "Passed."})], {}))
    assert table.index("new") < table.index("old")
    assert "Failed: &lt;1&gt;." in table
    assert "eagle3lab nightly" in start_here.runs_html(Runs([], {}))


def newest(runs: set[Path]) -> Path:
    return max(runs, key=lambda run: str(json.loads((run / "run.json").read_text())["started_at"]))


def test_committed_runs_can_be_picked_and_two_runs_are_laid_over_each_other() -> None:
    mpl.use("agg")
    night, night_8b = H200 / "night", H200 / "night-8b"
    assert {path for path, _ in committed_runs()} >= {night, night_8b}
    runs = picked_runs.known_runs(night_8b)
    controls = picked_runs.run_controls(runs, None, night_8b)
    names = {path: name for name, path in runs.items()}
    assert names[night] == "h200/night", "another machine has a run of that name"
    assert starts(controls) == {"before": names[newest(set(names) - {night_8b})], "after": "night-8b"}
    assert picked_runs.run_controls({"night": night}, None, night) == {}
    assert "share no curve" in picked_runs.overlaid_html(runs, before=names[night], after="night-8b")
    assert "same run" in picked_runs.overlaid_html(runs, before=names[night], after=names[night])
    again = {"one": night, "two": night}
    drawn = picked_runs.overlaid_html(again, before="one", after="two")
    assert drawn.count("<figure") == 2
    assert "one dashed, two with a full line" in drawn


def test_a_gpu_without_rows_is_told_by_its_memory_and_never_as_measured() -> None:
    mpl.use("agg")
    bench = read_bench(H200 / "kernels.jsonl")
    benches = other_gpus.known_benches(bench)
    [control] = other_gpus.gpu_controls(benches, bench).values()
    assert isinstance(control, Picker)
    assert control.start == "NVIDIA H200, measured"
    assert "B200, not measured" in control.options
    assert "H200, not measured" not in control.options, "of that one there are rows"
    assert "on NVIDIA H200" in other_gpus.roofline_of(benches, bench, gpu="NVIDIA H200, measured").alt
    drawing = other_gpus.roofline_of(benches, bench, gpu="A100 SXM 80 GB, not measured")
    assert drawing.caption.startswith("Nothing was measured on A100 SXM 80 GB")
    row = drawing.table.iloc[0]
    passes = (row["least_us"] - row["bytes"] / 2039e3) / PASS_US
    assert passes == pytest.approx(round(passes)), "bytes at the stated rate, and whole passes"
    assert (drawing.table["expected_gb_per_s"] < 2039).all()


def test_the_share_that_is_chosen_is_told_at_the_depth_that_is_chosen() -> None:
    mpl.use("agg")
    speed = read_speed(H200 / "speed.jsonl")
    point = speed.points[0]
    controls = figures.curve_controls(point, 3)
    assert isinstance(controls["k"], Picker)
    assert isinstance(controls["share"], Slider)
    assert starts(controls) == {"k": 3, "share": round(point.share or 0, 2)}
    never = figures.speed_curve(point, k=3, share=0.0, source="stored")
    assert "With 0% of drafts accepted, the best there is plain decoding; spec-3 commits 1.00 tokens" in never.caption
    always = figures.speed_curve(point, k=3, share=1.0, source="stored")
    fastest = 4 / point.over_base[3]
    assert f"spec-3 commits 4.00 tokens a step, {fastest:.2f} times as fast" in always.caption
    [ring] = [line for line in always.fig.axes[0].lines if str(line.get_label()).startswith("100%")]
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == pytest.approx((4.0, fastest))  # type: ignore[index]


def test_rows_of_another_machine_carry_a_banner_and_own_or_fresh_ones_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("lab.figures.show", shown.append)
    machine = environment.collect()
    exp = Experiment("40_speed", "run", "job", tmp_path, {}, machine)
    exp.show_source("speed.jsonl", "NVIDIA <H9000>", measured=True)
    exp.show_source("speed.jsonl", str(machine.cpu), measured=False)
    assert shown == []
    exp.show_source("speed.jsonl", "NVIDIA <H9000>", measured=False)
    [banner] = shown
    assert "<strong>Not of this machine.</strong> These rows were measured on NVIDIA &lt;H9000&gt;" in banner
    assert "set measure = True" in banner
    said = [json.loads(line)["text"] for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert said == ["speed.jsonl"] * 3
