"""Whether drawn drafts are verified by what they were drawn from: at a temperature, against both models' own logits.

With drafts drawn from q and verified against p, a draft d is accepted with min(1, p(d) / q(d)), and over all draws with
the sum of min(p, q). An engine that drafts its likeliest token and verifies it as drawn, or the other way round, shows
itself in two counts: how often a draft is the likeliest, and how often it is accepted.
Source: Leviathan et al., arXiv 2211.17192, section 3; the test of both counts is derived here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3core import RejectionAcceptance
from eagle3core.config import GenerationConfig
from eagle3core.request import without_errors
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.lamps.runs import runs
from lab.parity.by_request import RequestTrace
from lab.parity.recording import traced

if TYPE_CHECKING:
    from eagle3core import Engine
    from lab.doctor.draft.case import Case

TEMPERATURE, SEED = 1.0, 1
MOST_ERRORS = 5.0  # standard errors: one false alarm in a million engines a count
MOST_LOGITS = 2**28  # of all that is recorded: a gibibyte in fp32
CHANGE = (
    "SpeculativeConfig(acceptance=RejectionAcceptance()): draw the drafts, and verify them by what they were drawn from"
)


class _Drawn(RequestTrace):
    """Keeps what one step's drafts and their verification say, and nothing of the rest."""

    def _put(self, tensors: dict[str, Tensor], key: str, rows: Tensor) -> None:
        if key.endswith(("draft.head", "verify/target.head", "tree.tokens", "accept.tokens")) and "prefill" not in key:
            super()._put(tensors, key, rows)


@dataclass
class _Count:
    """Events of known chances.

    Attributes:
        n: tries. seen: events. expected: sum of the chances. variance: of the number of events.
    """

    n: int = 0
    seen: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, seen: bool, chance: float) -> None:
        """One try."""
        self.n += 1
        self.seen += seen
        self.expected += chance
        self.variance += chance * (1 - chance)

    @property
    def errors(self) -> float:
        """Standard errors between what was seen and what was to be expected, at least one event's width apart."""
        return (self.seen - self.expected) / math.sqrt(max(self.variance, 1.0))


@dataclass
class _Counts:
    """What a run of drawn requests says.

    Attributes:
        likeliest: drafts that were the draft's likeliest. accepted: drafts that were accepted.
        overlap: by level, sums of min(p, q) over the places that were reached, and how many there were.
        lengths: tokens of the steps.
    """

    likeliest: _Count = field(default_factory=_Count)
    accepted: _Count = field(default_factory=_Count)
    overlap: dict[int, list[float]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    @property
    def expected_length(self) -> float:
        """Tokens a step with drawn drafts: acceptance of each level, given those before it."""
        length, reached = 1.0, 1.0
        for level in sorted(self.overlap):
            reached *= sum(self.overlap[level]) / len(self.overlap[level])
            length += reached
        return length


@runs("as_distribution")
def look_at_draws(case: Case) -> Finding:
    """Drafts that are drawn, and their acceptance, against the chances that both models' logits give them."""
    counts = _counted(case)
    drawn, taken, lamp = counts.likeliest, counts.accepted, "as_distribution"
    if not counts.lengths or not drawn.n:
        return Finding(lamp, "unknown", "no step was complete at a temperature")
    own, after = sum(counts.lengths) / len(counts.lengths), counts.expected_length
    values = (("errors_of_drafts", drawn.errors), ("errors_of_acceptance", taken.errors), ("n_drafts", drawn.n))
    said = (
        f"at temperature {TEMPERATURE:g}, {drawn.seen} of {drawn.n} drafts are the draft's likeliest where "
        f"{drawn.expected:.0f} are to be expected, and {taken.seen} of them are accepted where {taken.expected:.0f} are"
    )
    if max(abs(drawn.errors), abs(taken.errors)) < MOST_ERRORS:
        return Finding(lamp, "green", said, values=values)
    return Finding(lamp, "red", said, Repair(CHANGE, own, after), 0.9, values)


def _counted(case: Case) -> _Counts:
    """The case's prompts at a temperature, its drafts drawn."""
    at, vocab = case.conditions, case.target_files.geometry.vocab_size
    steps = max(1, min(case.max_new_tokens, MOST_LOGITS // (2 * vocab * (case.k + 1) * len(at.prompts))))
    counts = _Counts()
    for i, prompt in enumerate(at.prompts):
        engine = at.engine([prompt], drafts={"acceptance": RejectionAcceptance()}, collect_draft_ranks=False)
        trace = _Drawn(steps)
        generation = GenerationConfig(max_new_tokens=steps, temperature=TEMPERATURE, seed=SEED + i, ignore_eos=True)
        with traced(engine, trace):
            without_errors(engine.generate([prompt], generation))
        for step in _steps(trace.requests[0]):
            _count(counts, engine, step)
    return counts


def _steps(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each step, without its name."""
    number = 0
    while f"step{number}/accept.tokens" in tensors:
        name = f"step{number}/"
        yield {key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}
        number += 1


def _count(counts: _Counts, engine: Engine, step: dict[str, Tensor]) -> None:
    draft = engine.draft
    assert draft is not None, "an engine of a case has a head"
    drafted = step["tree.tokens"].flatten()[1:].tolist()
    n_accepted = int((step["accept.tokens"] >= 0).sum()) - 1
    verified = (step["verify/target.head"].double() / TEMPERATURE).softmax(dim=-1)  # [k + 1, V]
    vocab = engine.target.geometry.vocab_size
    n_known, ids = draft.geometry.draft_vocab_size, draft.draft_to_target
    ids = None if ids is None else ids[:n_known].cpu().long()
    for level, token in enumerate(drafted[: n_accepted + 1]):
        name = f"chain{level}" if level else "extend"
        logits = step[f"{name}/draft.head"].flatten()[:n_known].double()
        own = (logits / TEMPERATURE).softmax(dim=-1)
        q = own[:vocab] if ids is None else torch.zeros(verified.shape[1], dtype=own.dtype).index_add_(0, ids, own)
        p = verified[level, : len(q)]
        counts.likeliest.add(token == int(q.argmax()), float(q.max()))
        counts.accepted.add(level < n_accepted, min(1.0, float(p[token] / q[token])) if q[token] > 0 else 0.0)
        counts.overlap.setdefault(level, []).append(float(torch.minimum(p, q).sum()))
    counts.lengths.append(n_accepted + 1)


AS_DISTRIBUTION = Lamp(
    "as_distribution", "Are drawn drafts verified by the distribution they were drawn from?", look_at_draws,
    is_long=True,
)  # fmt: skip
