"""The clock gives every sample, in order, with percentiles that mean what they say."""

from __future__ import annotations

import time

import pytest

from lab.errors import ExperimentError
from lab.rows.clock import METHOD, Timing, measure, quantile

pytestmark = pytest.mark.reference


def test_every_call_is_a_sample_and_warm_up_calls_are_not() -> None:
    calls: list[float] = []
    timing = measure(lambda: calls.append(time.monotonic()), warmup=2, repeats=5)
    assert (len(calls), timing.repeats, timing.warmup) == (7, 5, 2)
    assert timing.timer == f"perf_counter_ns/{METHOD}"


def test_a_known_wait_is_measured_in_microseconds() -> None:
    timing = measure(lambda: time.sleep(0.01), warmup=0, repeats=3)
    assert min(timing.samples_us) >= 10_000
    assert timing.median_us < 1_000_000


def test_the_row_values_hold_median_percentiles_and_samples() -> None:
    timing = Timing(tuple(float(i) for i in range(11)), "t", 0)
    assert timing.values("step") == {
        "step_us": 5.0,
        "step_us_p10": 1.0,
        "step_us_p90": 9.0,
        "step_us_samples": [float(i) for i in range(11)],
    }
    assert quantile([2.0, 1.0], 0.5) == 1.5


def test_no_repeat_and_an_unknown_device_are_refused() -> None:
    with pytest.raises(ExperimentError, match="0 repeats"):
        measure(lambda: None, repeats=0)
    with pytest.raises(ExperimentError, match="no timer for device 'tpu'"):
        measure(lambda: None, device="tpu")
