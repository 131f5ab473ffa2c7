"""A finished request as its caller sees it, and what whoever measures or compares asks of responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3core.errors import ConfigError, DecodeError, shown
from eagle3core.metrics import RequestMetrics
from eagle3core.step.outcome import TokenLogprob
from eagle3core.stop import FinishReason


@dataclass(frozen=True, repr=False)
class Response:
    """One finished request.

    Attributes:
        text: generated text, cut before a stop word; empty without a tokenizer.
        token_ids: generated tokens, an end token included.
        n_prompt_tokens: tokens of the prompt.
        finish_reason: "eos", "stop" or "length"; "error" for a request that could not go on, "cancelled" for one that
            was ended before its end.
        req_metrics: counters of the request.
        error: why a request could not go on; `token_ids` are right up to there. None for every other end.
        seed: of a request whose tokens were drawn; with it the same request gives the same tokens. None for a greedy
            one.
        logprobs: of every token, if asked for (`GenerationConfig.logprobs`).
        lossy: why the tokens are not the target's own, by the rule of acceptance they came by; None where they are.
    """

    text: str
    token_ids: list[int]
    n_prompt_tokens: int
    finish_reason: FinishReason
    req_metrics: RequestMetrics
    error: DecodeError | None = None
    seed: int | None = None
    logprobs: list[TokenLogprob] | None = None
    lossy: str | None = None

    def __repr__(self) -> str:
        """In a line: the beginning of the text, how many tokens, why it ended, whether they are lossy."""
        lossy = f", {self.lossy}" if self.lossy is not None else ""
        return f"Response({shown(self.text, 60)}, {len(self.token_ids)} tokens, {self.finish_reason!r}{lossy})"


def without_errors(responses: Sequence[Response]) -> list[Response]:
    """`responses`, of which none could not go on: for whoever measures or compares.

    Raises:
        DecodeError: of the first that could not.
    """
    for response in responses:
        if response.error is not None:
            raise response.error
    return list(responses)


def own_tokens(responses: Sequence[Response]) -> list[Response]:
    """`responses`, whose tokens are all the target's own: for whoever compares tokens.

    Raises:
        ConfigError: some came by a rule of acceptance that is not lossless.
    """
    for response in responses:
        if response.lossy is not None:
            raise ConfigError(
                f"an answer by {response.lossy}",
                "tokens of the target's own: they are compared",
                "leave SpeculativeConfig.acceptance out",
            )
    return list(responses)
