"""Golden acceptance lengths: what a pair gave on its prompts once, and whether it still does.

A file beside the pair holds one length for each shape of drafts, prompts, tokens a prompt and dtype, each with the
tolerance within which a later run counts as the same. Greedy text is the target's alone, so a length moves only where
drafts do, or where rounding decides a near-tie of the target otherwise; upwards is drift as well, since a draft that
sees what it must not see accepts more. `file` reads and writes the file. Source: derived here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.acceptance.golden.file import GOLDEN_FILE, GoldenLength, Measured, read_golden
from lab.acceptance.intervals import Interval
from lab.pairs.prompts import Prompt


@dataclass(frozen=True)
class Judgement:
    """One length beside what it is expected to be.

    Attributes:
        measured: of this run. golden: of the file; None: it holds none for this shape, prompts, tokens and dtype.
    """

    measured: Measured
    golden: GoldenLength | None

    @property
    def drift(self) -> float | None:
        """Tokens a step more than expected; None where either is not known."""
        if self.golden is None or self.measured.length is None:
            return None
        return self.measured.length - self.golden.length

    @property
    def is_within(self) -> bool | None:
        """Whether it is the expected length; None without one. A length that could not be measured is not."""
        if self.golden is None:
            return None
        return self.drift is not None and abs(self.drift) <= self.golden.tolerance

    @property
    def words(self) -> str:
        """The measured length, and what was expected."""
        length = "no complete step" if self.measured.length is None else f"{self.measured.length:.3f}"
        if self.golden is None:
            return f"{self.measured.shape} {length}, no golden length"
        outside = "" if self.is_within else " NOT"
        expected = f"{self.golden.length:.3f} +- {self.golden.tolerance:.3f}"
        return f"{self.measured.shape} {length},{outside} within {expected}"

    def row_values(self) -> dict[str, Any]:
        """What is stored; lengths have names of their own, which nights do not compare a second time."""
        return {
            **{f"measured_{name}": getattr(self.measured, name) for name in ("length", "low", "high")},
            "n_steps": self.measured.n_steps,
            "golden_length": None if self.golden is None else self.golden.length,
            "tolerance": None if self.golden is None else self.golden.tolerance,
            "drift": self.drift,
            "is_within": self.is_within,
        }


@dataclass(frozen=True)
class GoldenReport:
    """Every shape of a run beside its golden length."""

    judgements: tuple[Judgement, ...]
    file: str

    @property
    def judged(self) -> list[Judgement]:
        """Those that have a golden length."""
        return [judgement for judgement in self.judgements if judgement.golden is not None]

    @property
    def outside(self) -> list[Judgement]:
        """Those that are not what they were."""
        return [judgement for judgement in self.judged if not judgement.is_within]

    @property
    def passed(self) -> bool | None:
        """Whether every length is the expected one; None where there was none to hold anything against."""
        return not self.outside if self.judged else None

    @property
    def verdict(self) -> str:
        """One sentence; of drift the lengths that moved, and what to do."""
        if not self.judged:
            return (
                f"No golden length: {self.file} holds none of this pair for these prompts, tokens and dtype, so drift "
                "could not show. `eagle3lab golden RUN --out FILE` keeps this run's."
            )
        if not self.outside:
            return f"Golden lengths hold: {'; '.join(judgement.words for judgement in self.judged)}."
        return (
            f"Acceptance length has drifted: {'; '.join(judgement.words for judgement in self.outside)}. If the draft "
            "was changed on purpose, keep the new lengths with `eagle3lab golden`; else look for what changed."
        )


def judge_lengths(
    pair: tuple[Path, Path],
    prompts: Sequence[Prompt],
    lengths: Mapping[str, tuple[Interval, int]],
    *,
    file: str = "",
    dtype: str,
    max_new_tokens: int,
    ignore_eos: bool = False,
) -> GoldenReport:
    """Lengths of a run beside the golden ones.

    Args:
        pair: directories of target and draft.
        prompts: that were continued.
        lengths: by shape (`lab.acceptance.shapes`), each with its number of complete steps.
        file: of golden lengths; empty: `golden_lengths.json` in the folder that holds the draft's directory.
        dtype, max_new_tokens, ignore_eos: of the run.

    Raises:
        ExperimentError: a file that cannot be read, or one that was named and is not there.
    """
    path = Path(file) if file else pair[1].resolve().parent / GOLDEN_FILE
    known = {length.key(): length for length in read_golden(path, is_needed=bool(file))}
    name, asked = pair_name(*pair), prompts_id(prompts)
    judgements = []
    for shape, (length, n_steps) in lengths.items():
        measured = Measured(
            pair=name, shape=shape, prompts=asked, n_prompts=len(prompts), max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos, dtype=dtype, length=length.mean, low=length.low, high=length.high, n_steps=n_steps,
        )  # fmt: skip
        judgements.append(Judgement(measured, known.get(measured.key())))
    return GoldenReport(tuple(judgements), path.name)


def pair_name(target: Path, draft: Path) -> str:
    """The pair's name inside its file: its directories', which outlive a change of what lies in them."""
    return f"{target.resolve().name} + {draft.resolve().name}"


def prompts_id(prompts: Sequence[Prompt]) -> str:
    """Twelve hex digits over the tokens of the prompts, in their order."""
    return hashlib.sha256(json.dumps([list(prompt.ids) for prompt in prompts]).encode()).hexdigest()[:12]
