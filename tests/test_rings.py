"""The summary of a test run counts what ran and what did not, with the reason."""

from __future__ import annotations

from typing import Literal

import pytest
from rings import exhaustive_but, ring_counts, slow_but

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


def test_what_is_not_kept_in_a_ring_is_marked_and_nothing_is_lost() -> None:
    marked = slow_but([(1, "a")], [(1, "a"), (2, "b")])
    assert marked[0] == (1, "a")
    assert (marked[1].values, [mark.name for mark in marked[1].marks]) == ((2, "b"), ["slow"])
    [kept, left_out] = exhaustive_but(["x"], ["x", "y"])
    assert (kept, left_out.values, [mark.name for mark in left_out.marks]) == ("x", ("y",), ["exhaustive"])
    with pytest.raises(ValueError, match=r"kept are \[3\]"):
        slow_but([3], [1, 2])
