"""Acceptance of one reading over finished texts, and when a difference of two readings is certain.

Greedy speculation changes no text, so what an engine's steps would have accepted is a walk over the texts: from the
first root take the drafts that agree, go on behind the bonus token, and so forth (`lab.acceptance.controls`). The
length reported is that of the walk, which is the engine's own number on these prompts; conditional acceptance and the
test between two readings use every root, of which there are some three times as many as steps.
Source: docs/requirements.md 1.X-19 (counting); derived here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.metrics import StepRecord
from lab.acceptance.controls import replayed_steps
from lab.acceptance.counts import acceptance_interval, outside_loops
from lab.acceptance.intervals import Interval
from lab.acceptance.loops import looped_tokens
from lab.doctor.draft.text import Text

# A large gain is certain where its mean over roots is so many standard errors above 0. Errors are over groups of roots
# (`Text.groups`): neighbours and loops are not independent. A doctor tries some hundred readings of a pair, so 4: one
# false alarm in 300 pairs by chance alone. Below `LEAST_SHARE` of the length as it is a gain is of no weight.
STANDARD_ERRORS, LARGE_SHARE, LEAST_SHARE = 4.0, 0.10, 0.03
# A small gain is believed where the text itself grew likelier as well: a head gives its best to the very inputs it was
# trained with, and of a text's every token it says how likely it was, not only whether it was the first choice. Of a
# head of random weights another wiring may well accept more, steadily, without that; each misreading that was planted
# in the shipped pair costs 4.6 errors of likelihood or more on 16 prompts.
SMALL_ERRORS, LIKELIHOOD_ERRORS, LEAST_SMALL_SHARE = 2.0, 4.0, 0.005
LEAST_ERRORS = 1.5  # from which an uncertain gain is a suspicion: the best of a lamp's readings is often above one
LEAST_GROUPS = 12  # for a standard error that can be trusted


@dataclass(frozen=True, eq=False)
class Measurement:
    """What one reading's drafts were worth.

    Attributes:
        k: drafts a step.
        length: mean acceptance length of the walk, bonus included, 1..k+1, over complete steps; 1 where there is none.
        steps: the walk of each text; cut ones are there, and left out of means.
        accepted: `[M]` int64 drafts that agree before the first that does not, at every root.
        is_whole: `[M]` bool: the text goes on for k + 1 tokens, so that nothing cut `accepted` short.
        self_fed: by level, acceptance among roots whose earlier levels agreed; NaN where none did.
        forced: beside it, acceptance of the first level from that same place, with the true token and state.
        groups: `[M]` int64 roots that stand for one piece of evidence together.
        likelihood: `[M, k]` log-probability of the text's own tokens (`lab.doctor.draft.forward.likelihoods`).
    """

    k: int
    length: float
    steps: tuple[tuple[StepRecord, ...], ...]
    accepted: Tensor
    is_whole: Tensor
    self_fed: tuple[float, ...]
    forced: tuple[float, ...]
    groups: Tensor
    likelihood: Tensor

    @property
    def n_steps(self) -> int:
        """Complete steps of the walk."""
        return sum(not step.cut for own in self.steps for step in own)

    @property
    def first(self) -> float:
        """Acceptance of the first draft over all roots, 0..1."""
        return self.self_fed[0]

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts at a root, over all whole ones: another weighting than the walk's, with less noise."""
        return float(self.accepted[self.is_whole].double().mean()) if bool(self.is_whole.any()) else 0.0


class _Drafts:
    """Proposals at every root of one text, as a look-up that the walk reads."""

    def __init__(self, proposals: Sequence[Sequence[int]], n_prompt: int) -> None:
        self._proposals, self._n_prompt, self._n_tokens = proposals, n_prompt, 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._n_tokens += len(tokens)

    def propose(self, n: int) -> list[int]:
        return list(self._proposals[self._n_tokens - self._n_prompt - 1][:n])


def measure(proposals: Tensor, likelihood: Tensor, text: Text) -> Measurement:
    """Acceptance of `proposals: [M, k]` at the roots of `text`, beside `likelihood: [M, k]` of its own tokens."""
    proposals, k = proposals.cpu(), proposals.shape[1]
    agrees, exists = _agreement(proposals, text)
    accepted, is_whole = agrees.cumprod(dim=1).sum(dim=1), exists[:, -1]
    walks, begin = list[tuple[StepRecord, ...]](), 0
    for prompt, answer in zip(text.prompts, text.answers, strict=True):
        n = max(len(answer) - 1, 0)
        drafts = _Drafts(proposals[begin : begin + n].tolist(), len(prompt))
        walks.append(tuple(replayed_steps(drafts, prompt, answer, k)))
        begin += n
    complete = [step for walk in walks for step in walk if not step.cut]
    length = sum(step.n_committed for step in complete) / len(complete) if complete else 1.0
    self_fed, forced = _by_level(agrees, exists, text)
    return Measurement(k, length, tuple(walks), accepted, is_whole, self_fed, forced, text.groups(), likelihood)


def gain_errors(before: Measurement, after: Measurement) -> float:
    """How many standard errors the paired gain in accepted drafts over all whole roots is above 0."""
    both = before.is_whole & after.is_whole
    return errors_above_zero((after.accepted - before.accepted)[both].double(), before.groups[both])


def length_outside_loops(measured: Measurement, text: Text) -> Interval:
    """Acceptance length of the walk's steps that no loop has a token of, with its interval over prompts."""
    complete = [[step for step in walk if not step.cut] for walk in measured.steps]
    loops = [looped_tokens(prompt, answer) for prompt, answer in zip(text.prompts, text.answers, strict=True)]
    return acceptance_interval(outside_loops(complete, loops))


def likelihood_errors(before: Measurement, after: Measurement) -> float:
    """The same of the paired gain in log-probability of the text, over all roots and levels."""
    gains = (after.likelihood - before.likelihood).double().nanmean(dim=1).nan_to_num()
    return errors_above_zero(gains, before.groups)


def errors_above_zero(gains: Tensor, groups: Tensor) -> float:
    """How many standard errors the mean of `gains: [M]` is above 0, a group of `groups: [M]` counting once; 0 where
    there are too few groups, or no difference."""
    sizes = groups.bincount()
    n = int((sizes > 0).sum())
    if n < LEAST_GROUPS or not bool(gains.any()):
        return 0.0
    sums = torch.zeros(len(sizes), dtype=gains.dtype).index_add_(0, groups, gains)
    means = sums[sizes > 0] / sizes[sizes > 0]
    error, mean = float(means.std() / math.sqrt(n)), float(means.mean())
    return mean / error if error else math.copysign(math.inf, mean)


def is_certain_gain(before: Measurement, after: Measurement) -> bool:
    """The one rule for a red lamp: the gain is large and certain; or small, and the text itself says so."""
    share, errors = after.length / before.length - 1, gain_errors(before, after)
    if share > LARGE_SHARE and errors > STANDARD_ERRORS:
        return True
    is_small = share > LEAST_SMALL_SHARE and errors > SMALL_ERRORS
    return is_small and likelihood_errors(before, after) > LIKELIHOOD_ERRORS


def doubt(before: Measurement, after: Measurement, n_prompts: int, least_share: float = LEAST_SHARE) -> str:
    """Why a gain of weight is not certain, and about how many prompts would tell; empty where there is no such gain.

    A standard error shrinks with the root of the text.
    """
    share = after.length / before.length - 1
    if share <= least_share or is_certain_gain(before, after):
        return ""
    n_groups = int(before.groups.max()) + 1
    if n_groups < LEAST_GROUPS:
        more = math.ceil(n_prompts * LEAST_GROUPS / n_groups) if n_groups > LEAST_GROUPS // 2 else 0
        why = f"this text repeats itself: it holds {n_groups} independent pieces where {LEAST_GROUPS} are needed"
        return f"{why}; " + (f"about {more} prompts would tell" if more else "prompts of other kinds would tell")
    errors = max(gain_errors(before, after), likelihood_errors(before, after) * STANDARD_ERRORS / LIKELIHOOD_ERRORS)
    if errors < LEAST_ERRORS:
        return ""
    more = math.ceil(n_prompts * max(1.25, (STANDARD_ERRORS / errors) ** 2))
    return f"{n_prompts} prompts are too little text to be sure of it; about {more} would tell"


def _agreement(proposals: Tensor, text: Text) -> tuple[Tensor, Tensor]:
    """`[M, k]` bool each: the draft is the text's token, and the text goes on behind that token.

    Of a text's last token nothing is known that a step could go on with, as in the counts of the engine.
    """
    roots, k = text.roots(), proposals.shape[1]
    ends = text.ends()
    at = roots[:, None] + torch.arange(1, k + 1)
    is_inside = at < ends[:, None]
    follows = text.tokens.cpu()[at.clamp(max=len(text.tokens) - 1)]
    return (proposals == follows) & is_inside, (at + 1) < ends[:, None]


def _by_level(agrees: Tensor, exists: Tensor, text: Text) -> tuple[tuple[float, ...], tuple[float, ...]]:
    reached, self_fed, forced = torch.ones(len(agrees), dtype=torch.bool), list[float](), list[float]()
    roots = text.roots()
    for level in range(agrees.shape[1]):
        at = reached & exists[:, level]
        self_fed.append(float(agrees[at, level].double().mean()))
        shifted = torch.arange(len(roots))[at] + level  # exists: still a root of the same text
        forced.append(float(agrees[shifted, 0].double().mean()))
        reached = reached & agrees[:, level]
    return tuple(self_fed), tuple(forced)
