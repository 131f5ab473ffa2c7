"""The summary of a test run counts what ran and what did not, with the reason."""

from __future__ import annotations

from typing import Literal

import pytest
from rings import ring_counts

pytestmark = pytest.mark.reference


def report(
    ring: str, outcome: Literal["passed", "failed", "skipped"], longrepr: tuple[str, int, str] | None = None
) -> pytest.TestReport:
    """A finished test of `ring`, or of several with spaces between them."""
    return pytest.TestReport(
        nodeid="a",
        location=("a", 1, "a"),
        keywords=dict.fromkeys(ring.split(), 1),
        outcome=outcome,
        longrepr=longrepr,
        when="call",
    )


def test_rings_are_counted_with_the_reason_of_every_skip() -> None:
    skipped = [report("gpu", "skipped", ("f", 1, "Skipped: no CUDA device"))] * 2
    passed = [report("reference", "passed"), report("reference", "passed"), report("emulated", "passed")]
    counts = ring_counts({"passed": passed, "skipped": skipped, "failed": [report("reference", "failed")]})
    assert counts == ["reference 3 run", "emulated 1 run", "gpu 2 not run (no CUDA device)"]


def test_a_test_outside_the_rings_is_counted_as_such() -> None:
    assert ring_counts({"passed": [report("other", "passed")]}) == ["no ring 1 run"]


def test_a_gpu_test_in_a_file_of_the_reference_ring_counts_as_one_of_the_gpu_ring() -> None:
    both = report("reference gpu", "skipped", ("f", 1, "Skipped: no CUDA device"))
    assert ring_counts({"skipped": [both]}) == ["gpu 1 not run (no CUDA device)"]
