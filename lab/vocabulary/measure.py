"""What a smaller draft vocabulary gives: the head cut to size after size, run as any head, its acceptance counted.

Each size is a checkpoint of its own, written and loaded as `eagle3lab draft-vocab` writes it. Two lists of frequencies
can be held against each other: a text's, and that of the target's own answers to other prompts than those measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3core.checkpoint import convert_draft, fitting_format
from lab.acceptance.counts import DepthAcceptance
from lab.acceptance.formats import length_change
from lab.acceptance.intervals import Interval
from lab.acceptance.measure import measure_acceptance
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt
from lab.vocabulary.choose import Candidates, choose_vocabulary
from lab.vocabulary.counts import TokenCounts

KEPT_SHARE = 0.95  # of the whole head's acceptance length; the smallest size that keeps it is named


@dataclass(frozen=True)
class SizeAcceptance:
    """Acceptance of a head that chooses among `size` tokens.

    Attributes:
        counted: which list of frequencies they are of; empty of the whole head.
        counted_coverage: share of what was counted that they cover; None of the whole head.
        change: of the acceptance length, a share of the whole head's, its interval over prompts in pairs.
        n_different: prompts whose answers differ from the whole head's, which only a near tie may bring about.
    """

    size: int
    counted: str
    measured: DepthAcceptance
    counted_coverage: float | None
    change: Interval
    n_different: int

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.size}/{self.counted}" if self.counted else f"{self.size}"

    def row_values(self) -> dict[str, Any]:
        """What is stored; lengths have names of their own, which nights do not compare."""
        measured = self.measured
        return {
            "size": self.size, "counted": self.counted, **measured.length.values("vocabulary_length"),
            **measured.outside_loops.values("vocabulary_length_outside_loops"), **self.change.values("length_change"),
            "answers_coverage": measured.coverage, "counted_coverage": self.counted_coverage,
            "acceptance_by_position": list(measured.by_position), "n_steps": measured.n_steps,
            "n_different": self.n_different,
        }  # fmt: skip


@dataclass(frozen=True)
class VocabularyReport:
    """The whole head, and what is left of it at each size.

    Attributes:
        left_out: sizes that a list could not fill, by row name, each with the reason.
    """

    whole: SizeAcceptance
    sizes: tuple[SizeAcceptance, ...]
    left_out: dict[str, str]

    def of(self, counted: str) -> list[SizeAcceptance]:
        """The sizes of one list of frequencies, ascending, the whole head last."""
        return [*sorted((one for one in self.sizes if one.counted == counted), key=lambda one: one.size), self.whole]

    @property
    def lists(self) -> list[str]:
        """The lists of frequencies, in order."""
        return list(dict.fromkeys(one.counted for one in self.sizes))

    @property
    def n_different(self) -> int:
        """Answers that are not the whole head's, over all sizes."""
        return sum(one.n_different for one in self.sizes)

    def verdict(self, counted: str) -> str:
        """One sentence about a list."""
        length = self.whole.measured.length.mean
        if length is None:
            return "No step is complete, so there is no acceptance length to compare."
        kept = [one for one in self.of(counted) if (one.measured.length.mean or 0.0) >= KEPT_SHARE * length]
        least = kept[0]
        return (
            f"Of {self.whole.size} tokens, counted over {counted}, {least.size} keep {KEPT_SHARE:.0%} of the "
            f"acceptance length: {least.measured.length.mean:.3f} of {length:.3f} tokens a step of spec-"
            f"{least.measured.k}, and they cover {least.measured.coverage:.1%} of the answers."
        )


def measure_sizes(
    pair: tuple[Path, Path],
    prompts: Sequence[Prompt],
    lists: Mapping[str, TokenCounts],
    sizes: Sequence[int],
    candidates: Candidates,
    *,
    k: int,
    norm_output: str = "",
    on_size: Callable[[str], None] = lambda name: None,
    **how: Any,
) -> VocabularyReport:
    """Acceptance at depth `k` of the whole head and of every size by every list.

    Args:
        pair: target and draft. prompts: what is measured. lists: counts by name.
        sizes: of the vocabulary; those of the draft's own or more are left out.
        how: as of `measure_acceptance`. on_size: told of each size before it is measured.

    Raises:
        ExperimentError: as `measure_acceptance`.
    """
    n_own, form = len(candidates.own), fitting_format(pair[1], pair[0], norm_output=norm_output or None)
    how |= {"norm_output": norm_output}
    on_size(f"{n_own}, the whole head")
    stored = measure_acceptance(*pair, prompts, [k], **how).at(k)
    found, left_out = [], dict[str, str]()
    for counted, counts in lists.items():
        for size in sorted(size for size in set(sizes) if size < n_own):
            try:
                [ids] = choose_vocabulary(counts, [size], candidates.own, candidates.always)
            except ExperimentError as reason:
                left_out[f"{size}/{counted}"] = reason.what
                continue
            on_size(f"{size}, by {counted}")
            with tempfile.TemporaryDirectory(prefix="eagle3lab-") as folder:
                cut = Path(folder) / "draft"
                convert_draft(pair[1], cut, form, target=pair[0], kept=ids, norm_output=norm_output or None)
                measured = measure_acceptance(pair[0], cut, prompts, [k], **how).at(k)
            found.append(_beside(size, counted, measured, counts.coverage(ids), stored))
    return VocabularyReport(_beside(n_own, "", stored, None, stored), tuple(found), left_out)


def _beside(
    size: int, counted: str, measured: DepthAcceptance, coverage: float | None, stored: DepthAcceptance
) -> SizeAcceptance:
    pairs = zip(stored.responses, measured.responses, strict=True)
    n_different = sum(a.token_ids != b.token_ids for a, b in pairs)
    change = length_change(stored.responses, measured.responses)
    return SizeAcceptance(size, counted, measured, coverage, change, n_different)
