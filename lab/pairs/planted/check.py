"""Whether a planted pair is what its card says: margins, tokens, and acceptance against the dial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.request import Response, own_tokens, without_errors
from lab.errors import ExperimentError
from lab.pairs.planted.pair import PlantedPair
from lab.pairs.planted.plain_logits import causal_logits
from lab.pairs.planted.tokens import expected_length
from lab.rows.verdict import wilson_interval

TOLERANCE = 0.03  # between acceptance and dial
_SURE = 3.0  # standard errors that chance stays within in 997 of 1000 counts
LEAST_MARGIN = 8.0  # top-2 gap over logit error
_Z95 = 1.959964


@dataclass(frozen=True)
class Margin:
    """How decisive the next token is.

    Attributes:
        gap: smallest difference of the two best logits, in fp32 on the same (rounded) weights.
        error: largest difference of a logit between the pair's dtype and fp32.
        follows: whether the best logit was the planted successor everywhere.
        n_rows: positions looked at.
    """

    gap: float
    error: float
    follows: bool
    n_rows: int

    @property
    def ratio(self) -> float:
        """Gap over error."""
        return self.gap / self.error if self.error else math.inf

    @property
    def holds(self) -> bool:
        """Whether the margin is decisive."""
        return self.follows and self.ratio >= LEAST_MARGIN


def measure_margin(pair: PlantedPair, *, n_tokens: int = 64, seed: int = 1) -> Margin:
    """The margin over random tokens of the whole vocabulary, teacher-forced; takes the target in both precisions."""
    (tokens,) = pair.prompts(1, n_tokens, seed=seed)
    checkpoint = pair.target_checkpoint()
    ids = torch.tensor(tokens, device=pair.device)
    ours = causal_logits(checkpoint.weights, checkpoint.geometry, ids).float()
    wide = {name: t.float() if t.is_floating_point() else t for name, t in checkpoint.weights.items()}
    truth = causal_logits(wide, checkpoint.geometry, ids)
    best = truth.topk(2, dim=-1).values
    wanted = pair.tokens.successor.to(pair.device)[ids]
    follows = bool((truth.argmax(-1) == wanted).all() and (ours.argmax(-1) == wanted).all())
    return Margin(float((best[:, 0] - best[:, 1]).min()), float((ours - truth).abs().max()), follows, n_tokens)


@dataclass(frozen=True)
class Position:
    """Acceptance at one position of the draft, among the steps that accepted all before it."""

    n_reached: int
    n_accepted: int

    @property
    def rate(self) -> float:
        """Accepted over reached; 0 where no step came so far."""
        return self.n_accepted / self.n_reached if self.n_reached else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the rate."""
        return wilson_interval(self.n_accepted, self.n_reached, _Z95)


@dataclass(frozen=True)
class DialCheck:
    """Acceptance as the real engine measured it, against the dial.

    Attributes:
        share: planted probability.
        positions: by position of the draft.
        length: mean acceptance length, bonus included.
        n_steps: complete verify steps.
        n_wrong: requests whose tokens were not the planted ones.
    """

    share: float
    positions: tuple[Position, ...]
    length: float
    n_steps: int
    n_wrong: int

    @property
    def allowed(self) -> tuple[float, ...]:
        """How far each position may be from the dial: `TOLERANCE`, or as far as chance goes in so few steps."""
        spread = self.share * (1 - self.share)
        return tuple(
            max(TOLERANCE, _SURE * math.sqrt(spread / p.n_reached)) if p.n_reached else math.inf for p in self.positions
        )

    @property
    def holds(self) -> bool:
        """Whether every position is as near to the dial as is allowed and every token is the planted one."""
        near = (abs(p.rate - self.share) <= most for p, most in zip(self.positions, self.allowed, strict=True))
        return self.n_wrong == 0 and all(near)

    def values(self) -> dict[str, Any]:
        """What is stored of the check."""
        return {
            "share": self.share,
            "acceptance_length": self.length,
            "expected_length": expected_length(self.share, len(self.positions)),
            "n_steps": self.n_steps,
            "n_wrong_requests": self.n_wrong,
            "given_prefix": [position.rate for position in self.positions],
            "given_prefix_low": [position.interval[0] for position in self.positions],
            "given_prefix_high": [position.interval[1] for position in self.positions],
            "n_reached": [position.n_reached for position in self.positions],
            "tolerance": TOLERANCE,
            "allowed": [most if math.isfinite(most) else None for most in self.allowed],
            "holds": self.holds,
        }


def check_dial(
    pair: PlantedPair, engine: Engine, *, n_steps: int, context: int = 64, seed: int = 0, n_tokens: int | None = None
) -> DialCheck:
    """Decode until at least `n_steps` complete verify steps are counted, the slots of `engine` in use.

    Args:
        n_tokens: generated tokens a request; None lets every slot run one request, as long as it takes.

    Raises:
        ExperimentError: the engine drafts nothing, its sessions are too short, or fewer steps came than were asked for.
    """
    spec, slots = engine.config.speculative_config, engine.config.max_batch_size
    k = spec.num_speculative_tokens if spec else 0
    if k < 1 or n_steps < 1:
        raise ExperimentError(
            f"{n_steps} steps of an engine that drafts {k} tokens", "at least one of each", "give it a draft"
        )
    length = expected_length(pair.tokens.share, k)
    n_tokens = n_tokens or tokens_for(n_steps, slots, length)
    if context + n_tokens > engine.config.session_len:
        raise ExperimentError(
            f"session_len {engine.config.session_len} for a context of {context} and {n_tokens} tokens a request",
            f"at least {context + n_tokens}",
            "raise session_len or max_batch_size, or count fewer steps",
        )
    # A request's last step is cut short, or just complete; half a step more is lost to chance on average.
    n_requests = max(slots, math.ceil(1.1 * n_steps / max(n_tokens / length - 1, 1)))
    prompts = pair.prompts(n_requests, context, seed=seed)
    generation = GenerationConfig(max_new_tokens=n_tokens, ignore_eos=True)
    responses = own_tokens(without_errors(engine.generate(prompts, generation)))
    found = count_dial(pair, prompts, responses, k)
    if found.n_steps < n_steps:
        raise ExperimentError(
            f"{found.n_steps} complete steps were counted",
            f"{n_steps}",
            "raise n_tokens, or check the engine's metrics",
        )
    return found


def tokens_for(n_steps: int, slots: int, length: float) -> int:
    """Tokens a request must generate for `n_steps` complete steps over all slots, with room for chance."""
    return math.ceil(1.1 * n_steps / slots * length) + 16


def count_dial(pair: PlantedPair, prompts: Sequence[Sequence[int]], responses: Sequence[Response], k: int) -> DialCheck:
    """Acceptance by position over the complete steps of `responses`, and whether every token was the planted one."""
    steps = [step for response in responses for step in response.req_metrics.steps if not step.cut]
    positions = tuple(
        Position(sum(step.n_accepted >= i for step in steps), sum(step.n_accepted > i for step in steps))
        for i in range(k)
    )
    wrong = sum(
        list(response.token_ids) != pair.tokens.follow(prompt[-1], len(response.token_ids))
        for prompt, response in zip(prompts, responses, strict=True)
    )
    length = sum(step.n_committed for step in steps) / len(steps) if steps else 0.0
    return DialCheck(pair.tokens.share, positions, length, len(steps), wrong)
