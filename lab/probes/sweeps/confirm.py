"""The best of a sweep in the engine itself: micro runs of the default and of the five best, taking turns.

A contender is a whole tuned file: in each regime of the sweep the setting of its rank there. Its engine is built with
that file named by the environment, the way any engine finds one; engines of all contenders are alive together, so that
rounds take turns. Tokens must be the planted ones under every contender, since no entry may change a bit.
Source: docs/requirements.md R-110, R-111.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from eagle3core.config import GenerationConfig
from eagle3core.kernels import tuned
from lab.probes.bench.rounds import Round, Work, acceptance_length, interleave
from lab.probes.bench.run import free
from lab.probes.bench.scenario import Point, Scenario
from lab.probes.bench.source import HEADROOM, PairSource, open_pair
from lab.probes.sweeps.choose import Setting, over_default
from lab.probes.sweeps.measure import Tell
from lab.probes.sweeps.rows import MICRO, SCREEN, Cell, SweepWriter
from lab.rows.configuration import variable

BEST = 5
OTHER = {"gemm": "attention", "attention": "gemm"}


@dataclass(frozen=True)
class Contender:
    """One tuned file; rank 0 is the default."""

    rank: int
    content: dict[str, Any]

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank}" if self.rank else "default"


def ranked(rows: Sequence[Cell]) -> list[Setting]:
    """One regime's settings, the default first, then the others from the fastest; equal bits only."""
    by_setting: dict[str, list[Cell]] = {}
    for row in rows:
        if row["phase"] == SCREEN and row["bits_equal"]:
            by_setting.setdefault(str(row["setting"]), []).append(row)
    default = next(own[0]["setting"] for own in by_setting.values() if own[0]["is_default"])
    others = sorted((own for own in by_setting.values() if not own[0]["is_default"]), key=over_default)
    return [default, *(own[0]["setting"] for own in others)]


def contenders(rows: Sequence[Cell], op: str, gpu: str, arch: str) -> list[Contender]:
    """The default and the best five of a sweep, each as a tuned file; the other operation's entries stay."""
    regimes: dict[str, list[Cell]] = {}
    for row in rows:
        if row["op"] == op and row["phase"] == SCREEN:
            regimes.setdefault(row["regime"], []).append(row)
    orders = {name: ranked(own) for name, own in regimes.items()}
    n_ranks = min(BEST, max((len(order) - 1 for order in orders.values()), default=0))
    kept = entries_of(OTHER[op], gpu)
    made = []
    for rank in range(n_ranks + 1):
        entries = [
            {"key": regimes[name][0]["key"], "setting": order[min(rank, len(order) - 1)], "rows": "contender",
             "baked_us": 0, "best_us": 0, "default_us": 0}
            for name, order in orders.items()
        ]  # fmt: skip
        made.append(Contender(rank, {"schema": tuned.SCHEMA, "gpu": gpu, "arch": arch, op: entries, OTHER[op]: kept}))
    return made


def entries_of(op: str, gpu: str) -> list[Any]:
    """Entries of the tuned file that counts for a GPU now; none where the rule decides."""
    named = os.environ.get(tuned.TUNED_VARIABLE, "")
    for path in [Path(named)] if named.endswith(".json") else sorted(tuned.FOLDER.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("gpu") == gpu:
            return list(content.get(op, []))
    return []


@dataclass
class MicroRuns:
    """Micro runs of contenders.

    Attributes:
        scenario: geometry, points, the depth (the last of `ks`), tokens, rounds.
    """

    writer: SweepWriter
    op: str
    arch: str
    scenario: Scenario
    tell: Tell = print

    def run(self) -> None:
        """Rows of every contender at every point that has none."""
        found = contenders(self.writer.cells, self.op, self.writer.gpu, self.arch)
        source: PairSource | None = None
        for point in self.scenario.points:
            missing = [one for one in found if not self.writer.has(self._cell(point, one))]
            if not missing:
                continue
            source = source or open_pair(self.scenario)
            with torch.no_grad():
                self._measure(source, point, found)
            free(torch.device(self.scenario.device))

    def _measure(self, source: PairSource, point: Point, found: Sequence[Contender]) -> None:
        works = {one.rank: self._work(source, point, one) for one in found}
        measured = interleave(
            {rank: work.run for rank, work in works.items()}, rounds=self.scenario.rounds, warmup=self.scenario.warmup
        )
        for one in found:
            cell = self._cell(point, one)
            if self.writer.has(cell):  # of a run that was stopped; it took its turn beside the others once more
                continue
            values = self._values(source, works[one.rank], measured[one.rank])
            self.writer.write(cell, is_default=one.rank == 0, **values)
            rate, length = values["tokens_per_s"], values["acceptance_length"]
            self.tell(
                f"{self.op} {point} {one.name}: {values['time_us'] / 1e3:.3f} ms a step, {rate:.1f} tokens/s, "
                f"acceptance length {length:.3f}, {values['n_wrong']} wrong"
            )

    def _work(self, source: PairSource, point: Point, one: Contender) -> Work:
        prompts = source.prompts(point.batch, point.context, self.scenario.seed)
        session = point.context + self.scenario.tokens + HEADROOM
        with named_file(one.content):
            engine = source.engine(self.scenario.ks[-1], batch=point.batch, session_len=session)
            engine.runner.prepare()
        return Work(engine, prompts, GenerationConfig(self.scenario.tokens, ignore_eos=True))

    def _values(self, source: PairSource, work: Work, rounds: Sequence[Round]) -> dict[str, Any]:
        steps = [(one.full.step_ms if one.full else one.step_ms) * 1e3 for one in rounds]
        rates = [one.full.tokens_per_s if one.full else one.decode_tokens_per_s for one in rounds]
        return {
            "time_us": median(steps), "time_us_samples": steps, "tokens_per_s": median(rates),
            "acceptance_length": acceptance_length(work.responses) or 1.0,
            "n_wrong": source.n_wrong(work.prompts, work.tokens) or 0,
        }  # fmt: skip

    def _cell(self, point: Point, one: Contender) -> dict[str, Any]:
        scenario = self.scenario
        shape = {"geometry": scenario.geometry, "context": point.context, "batch": point.batch, "k": scenario.ks[-1]}
        return {
            "op": self.op, "phase": MICRO, "regime": point.name(scenario.ks[-1]), "key": {}, "shape": shape,
            "setting": {"rank": one.rank},
        }  # fmt: skip


@contextmanager
def named_file(content: dict[str, Any]) -> Iterator[None]:
    """Inside, engines are built with these tuned settings."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "contender.json")
        path.write_text(json.dumps(content), encoding="utf-8")
        with variable(tuned.TUNED_VARIABLE, str(path)):
            yield
