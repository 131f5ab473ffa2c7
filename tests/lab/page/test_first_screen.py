"""What is wrong with a night, and what to do about it, stands on the first screen of a phone and of a desk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chromium import dom_of, framed, title_of
from nights_of_rows import GATE, decoded, page_of, row, stage

from lab.night.jobs import JOB_FILE
from lab.night.summary import conclude
from lab.page.report import render
from lab.rows.runs import SUMMARY_FILE
from lab.rows.store import Row

pytestmark = [pytest.mark.reference, pytest.mark.slow]

SCREENS = {390: 844, 1440: 900}  # widths and heights, pixels
# How far down the first cause ends, what to do about it, and what both say.
ASKING = """
const item = frame.contentDocument.querySelector('.found li'), remedy = item.querySelector('.remedy');
document.title = JSON.stringify([Math.ceil(remedy.getBoundingClientRect().bottom), item.textContent]);
"""
DRIFT = {"measured_length": 2.5, "golden_length": 3.05, "is_within": False}
LAMP = {
    "place": 0, "colour": "red", "said": "read with the rotary base 10000, the head accepts 2.79", "before": 2.37,
    "after": 2.79, "change": 'in config.json: "rope_theta": 10000.0',
}  # fmt: skip
BINDS = "time above the floor: takes 67.6 times its floor, most in target.attn (8016 us above 76 of bytes, run alone)"


def red(job: str, name: str, **more: Any) -> Row:
    return row(job, "gate", name, GATE | {"passed": False, "value": 1} | more)


# By fault: the rows of its night, and words of its cause and its remedy.
FAULTS: dict[str, tuple[list[Row], str, str]] = {
    "wrong tap": (
        [stage("target.taps", "prefill", 37255.0, 3.0), red("10_parity_stages", "stage parity")],
        "the draft reads other layers", "Mend the stage named first",
    ),
    "misread rotary base": (
        [row("33_doctor", "draft_lamp", "rope", LAMP), red("33_doctor", "no known cause of low acceptance")],
        "read with the rotary base 10000", 'In config.json: "rope_theta": 10000.0',
    ),
    "slow draft": (
        [decoded(0.58, 0.55, 0.61), row("31", "acceptance", "spec-3", {"acceptance_by_position": [0.0, 0.0]})],
        "refuses 100% of the first drafted tokens", "eagle3lab doctor draft",
    ),
    "drift": (
        [row("31", "golden_length", "chain-1", DRIFT), red("31", "golden acceptance lengths")],
        "already the first draft is refused", "find what changed it",
    ),
    "red perf gate": (
        [red("42", "micro: single baseline: share of its byte floor", threshold="at least 0.9", detail=BINDS)],
        "most in target.attn", "Find the stage furthest above its bytes",
    ),
    "notebook that crashes": ([row("30_decode", "decode", "x")], "KeyError: 'verify'", "run the same command with"),
}  # fmt: skip


def night_with(fault: str, folder: Path) -> Path:
    """The page of a night with that fault."""
    page_of(folder, [row("00_environment", "gate", "the lab can run here", GATE), *FAULTS[fault][0]])
    run = folder / "reports" / "r"
    if fault == "notebook that crashes":
        path = run / "jobs" / "30_decode" / JOB_FILE
        job = json.loads(path.read_text())
        job["outcome"] |= {"status": "raised", "passed": None, "error": "KeyError: 'verify'", "cell": 5}
        path.write_text(json.dumps(job))
        (run / SUMMARY_FILE).write_text(json.dumps(conclude(run, now="2026-11-21T10:05:00+00:00")))
    return render(run)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_screen_names_the_cause_and_what_to_do(tmp_path: Path, fault: str) -> None:
    page = night_with(fault, tmp_path)
    _, cause, remedy = FAULTS[fault]
    for width, height in SCREENS.items():
        end, told = json.loads(title_of(dom_of(framed(page, tmp_path, width, ASKING), tmp_path / "profile")))
        assert end <= height, f"at {width} pixels the remedy ends {end} pixels down"
        assert cause in told
        assert remedy in told.partition("What to do:")[2]
