"""First requests on a GPU: kernels compiled once, then found in the cache or in an archive."""

from __future__ import annotations

import pytest
import torch

from lab.probes.start.measure import ARCHIVE, EMPTY, KEPT, StartPlan, measure_starts
from lab.rows.maker import RowMaker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_start_compiles_what_it_launches_and_the_next_ones_nothing() -> None:
    plan = StartPlan("nano", (0, 3), 100, 1, 1, "bfloat16", "cuda")
    rows = measure_starts(plan, RowMaker("run", "start", "machine"), lambda row: None, print)
    assert [row.reason for row in rows] == [None] * 6
    for i, kernels in enumerate((EMPTY, KEPT, ARCHIVE) * 2):
        assert rows[i].parameters["kernels"] == kernels
        assert rows[i].values["path"] == "kernels"
        assert (rows[i].values["n_compiled"] == 0) == (kernels != EMPTY)
        assert rows[i].values["n_kernels"] == rows[i - i % 3].values["n_compiled"]
