"""A step row gives its share against two ceilings, and steps without a rest beside rested ones, or why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.options.values import Point
from lab.probes.bench import clocks
from lab.probes.bench.clocks import PhaseClock
from lab.probes.bench.results import line_of
from lab.probes.bench.rounds import tokens_to_sustain
from lab.probes.bench.run import Bench
from lab.probes.bench.scenario import Scenario
from lab.rows.history import better_of

pytestmark = pytest.mark.reference

SCENARIO = Scenario(
    geometry="nano", pair="planted", points=(Point(20, 2),), ks=(0, 3), share=0.8, tokens=24, rounds=1, warmup=0,
    dtype="float32", peers=(), sustained=40,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_step_row_has_both_shares_and_the_steps_without_a_rest() -> None:
    rows = Bench(SCENARIO, tell=lambda _: None).run().rows
    for row, k in zip(rows, (0, 3), strict=True):
        values: dict[str, Any] = dict(row.values)
        by_run = values["share_of_floor"] * values["ceiling_gb_per_s"] / values["ceiling_of_run_gb_per_s"]
        assert values["share_of_run_ceiling"] == pytest.approx(by_run)
        assert values["sustained.n_steps"] >= SCENARIO.sustained
        assert values["sustained.n_tokens"] == tokens_to_sustain(SCENARIO.sustained, k)
        assert values["sustained.step_ms_mean"] > 0
        ratio = values["sustained.share_of_floor"] / values["share_of_floor"]
        assert values["sustained.over_rested_share"] == pytest.approx(ratio)
        # The longer cache has more bytes, so the same time is a larger share.
        longer = values["sustained.share_of_floor"] * values["sustained.step_ms_mean"]
        assert longer > values["floor_ms"]
        text = line_of(row.name, values)
        assert f"over {values['sustained.n_steps']} steps without a rest" in text
        assert "at this run's" in text
        assert not [name for name in values if name.startswith("clocks_")], "a CPU has no clocks to tell"
    compared = [name for name in rows[0].values if "ceiling" in name and better_of(name)]
    assert compared == [], "a ceiling is what numbers are held against"


def test_a_session_that_is_too_long_is_missing_with_its_reason_and_the_rest_is_measured() -> None:
    [row] = Bench(replace(SCENARIO, ks=(0,), sustained=10**6), tell=lambda _: None).run().rows
    assert row.status == "measured"
    assert "a session of" in str(row.values["sustained.missing"])
    assert "sustained.share_of_floor" not in row.values


def test_without_rests_no_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[torch.device] = []

    def note(device: torch.device) -> float:
        rests.append(device)
        return 0.25

    monkeypatch.setattr(clocks, "rest", note)
    for does_rest, seconds in ((True, 0.25), (False, 0.0)):
        clock = PhaseClock(torch.device("cpu"), rests=does_rest)
        for name in ("prefill", "step", "step"):
            with clock.scope(name):
                pass
        assert clock.rest_s == seconds
        assert clock.n_steps == 2
    assert len(rests) == 1
