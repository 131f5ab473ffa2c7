"""How many distinct experts the passes of a run chose, counted layer by layer, beside what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from eagle3core.geometry import ExpertsGeometry
from eagle3core.trace import Trace
from lab.probes.bench.floors import Routing
from lab.probes.bench.rounds import Work

CHOICE = ".experts"  # how the tap of a layer's choice ends


class ExpertCount(Trace):
    """Distinct experts of every layer in passes of decode steps over `n_rows` rows; others are left out.

    Attributes:
        n_passes: passes of layers, and n_distinct: their distinct experts together.
    """

    is_detailed = True

    def __init__(self, n_rows: int) -> None:
        self.n_rows, self.n_passes, self.n_distinct = n_rows, 0, 0
        self._in_step = False

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        is_step = name.startswith("step")
        self._in_step |= is_step
        yield
        self._in_step &= not is_step

    def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
        if not (self._in_step and name.startswith("target.") and name.endswith(CHOICE)):
            return
        rows = value.reshape(-1, value.shape[-1]) if valid is None else value[valid]
        if len(rows) == self.n_rows:
            self.n_passes += 1
            self.n_distinct += len(set(rows.flatten().tolist()))

    @property
    def mean(self) -> float | None:
        """Distinct experts a layer and pass; None without such a pass."""
        return self.n_distinct / self.n_passes if self.n_passes else None


def count_experts(work: Work, k: int) -> float | None:
    """Distinct experts a layer and verify pass of `k` drafts with every slot in use, in one more pass over the work."""
    count = ExpertCount((k + 1) * work.engine.config.max_batch_size)
    kept = work.responses
    work.decode(count)
    work.responses = kept
    return count.mean


def routing_values(experts: ExpertsGeometry, routing: Routing, k: int, batch: int) -> dict[str, float | None]:
    """Row values: distinct experts a layer and step, as counted and as expected."""
    return {
        "experts_read": routing.measured.get(k + 1),
        "experts_expected": Routing(routing.repeated).n_read(experts, k + 1, batch),
        "experts_in_a_layer": float(experts.n),
    }
