"""From groups, a number of cases and a seed to findings."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.errors import RunFailed
from lab.probes.fuzz.child import Case, outcome_of, remove
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.outcomes import WORDS, Finding, Outcome, gathered


@dataclass
class Tally:
    """What came of a group's cases; `slowest_s` and `most_bytes` are of those that came to an end by themselves."""

    group: str
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest_s: float = 0.0
    most_bytes: int = 0

    def add(self, outcome: Outcome) -> None:
        """One more case."""
        self.counts[outcome.word] += 1
        self.slowest_s = max(self.slowest_s, outcome.cpu_s)
        self.most_bytes = max(self.most_bytes, outcome.more_bytes)

    @property
    def line(self) -> str:
        """The counts in a line, every word in its place."""
        words = ", ".join(f"{self.counts[word]} {word}" for word in WORDS if self.counts[word])
        most = f"slowest {self.slowest_s:.2f} s of a processor, largest {self.most_bytes / 1e6:.0f} MB"
        return f"{self.group}: {sum(self.counts.values())} cases in {self.seconds:.1f} s: {words}; {most}"


def fuzz(
    groups: Sequence[Group],
    numbers: Sequence[int],
    seed: int,
    *,
    tell: Callable[[str], None] = lambda line: None,
    keep: Path | None = None,
) -> tuple[list[Tally], list[Finding]]:
    """Counts of outcomes for each group, and the findings.

    Args:
        groups: what is damaged. numbers: of the cases that are run of each group. seed: of all.
        tell: gets a line a group. keep: the input of the first case of every finding is copied there.

    Raises:
        RunFailed: no Linux, or a group that cannot make its inputs.
    """
    if not sys.platform.startswith("linux"):
        raise RunFailed(f"cases on {sys.platform}", "Linux, whose limits hold for a process", "run it there")
    tallies, found = [], list[tuple[str, int, Outcome]]()
    with tempfile.TemporaryDirectory(prefix="eagle3lab-fuzz-") as name:
        for group in groups:
            tally, outcomes = _one_group(group, numbers, seed, Path(name).resolve(), keep)
            tell(tally.line)
            tallies.append(tally)
            found += outcomes
    return tallies, gathered(found)


def _one_group(
    group: Group, numbers: Sequence[int], seed: int, base: Path, keep: Path | None
) -> tuple[Tally, list[tuple[str, int, Outcome]]]:
    folder = base / group.name
    (folder / "prepared").mkdir(parents=True)
    prepared = group.prepare(folder / "prepared")
    tally, found = Tally(group.name), list[tuple[str, int, Outcome]]()
    kept: set[tuple[str, str, str]] = set()
    begun = time.perf_counter()
    for number in numbers:
        place = folder / f"case-{number}"
        outcome = outcome_of(Case(group, seed, number), prepared, place)
        tally.add(outcome)
        found.append((group.name, number, outcome))
        like = (outcome.word, outcome.error, outcome.frame)
        if keep is not None and outcome.is_finding and like not in kept:
            kept.add(like)
            shutil.copytree(place, keep / f"{group.name}-{number}", symlinks=True, dirs_exist_ok=True)
        remove(place)
    tally.seconds = time.perf_counter() - begun
    return tally, found


def quiet_libraries() -> None:
    """One thread a process, so that a fork finds no lock held; nothing is looked for in a network.

    To be called before torch is imported, which reads this once.
    """
    os.environ.update(OMP_NUM_THREADS="1", RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
