"""A request on its way through the engine, from a checked prompt to a response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index as index_of
from typing import Protocol

from eagle3core.acceptance import AcceptanceRule, RejectionAcceptance
from eagle3core.arguments import check_type
from eagle3core.config import GenerationConfig
from eagle3core.errors import ConfigError, DecodeError, shown
from eagle3core.geometry import TargetGeometry
from eagle3core.metrics import RequestMetrics, StepRecord, spec_info_from_steps
from eagle3core.request.response import Response
from eagle3core.sampling import Sampling
from eagle3core.step.outcome import TokenLogprob
from eagle3core.stop import FinishReason, StopCriteria


class Tokenizer(Protocol):
    """The part of a tokenizer the engine uses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`."""


@dataclass(eq=False)
class Request:
    """A prompt, what it has generated so far, and the steps that did it.

    Attributes:
        slot: where it lies while it runs. sampling: how its tokens are drawn; None for a greedy one.
        logprobs: of its tokens. n_top: likeliest tokens that it tells of each; None: it stays empty.
        n_put_back: how often it had to wait again. n_cached: tokens of its prompt that had been read for others.
        names: of its full cache blocks (`cache.names`). most_drafts: of a step that it uses; None: all.
        rule: by which its drafts are accepted; None: where they are the target's own choice.
        kept_token: its newest token while it waits again, where that token is to come again and not to be drawn.
    """

    id: int
    prompt: list[int]
    stop: StopCriteria
    token_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: DecodeError | None = None
    slot: int = -1
    sampling: Sampling | None = None
    n_top: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    n_put_back: int = 0
    n_cached: int = 0
    names: list[bytes] = field(default_factory=list)
    rule: AcceptanceRule | None = None
    kept_token: tuple[int, list[TokenLogprob]] | None = None
    most_drafts: int | None = None

    def put_back(self) -> None:
        """Wait again, from the newest token on.

        What follows a token is drawn by other numbers where a step begins than in its middle, if drafts are accepted
        by rejection: so the next step has to begin where it would have, behind the newest token. That one is taken
        away here and comes again, unchanged, as the prompt's first.
        """
        self.n_put_back += 1
        goes_on_drawing = self.sampling is not None and isinstance(self.rule, RejectionAcceptance)
        if goes_on_drawing and self.token_ids and self.kept_token is None:
            self.kept_token = self.token_ids.pop(), [self.logprobs.pop()] if self.logprobs else []

    def _return_token(self) -> None:
        """Have the token again that was kept while the request waited."""
        if self.kept_token is not None:
            (token, logprob), self.kept_token = self.kept_token, None
            self.logprobs += logprob
            self.token_ids.append(token)

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> int:
        """Add `tokens` up to the one that ends the request, and what is known of them; how many were added."""
        if self.kept_token is not None:  # `tokens` are this one, as the prompt's first
            self._return_token()
            return len(tokens)
        for n_taken, token in enumerate(tokens, start=1):
            if self.n_top is not None and logprobs is not None:  # before its token: a reader sees tokens first
                self.logprobs.append(logprobs[n_taken - 1].with_top(self.n_top))
            self.token_ids.append(token)
            self.finish_reason = self.stop.check(self.token_ids)
            if self.finish_reason is not None:
                return n_taken
        return len(tokens)

    def break_off(self) -> None:
        """End the request: after the tokens it has, the target's logits are not finite."""
        self.finish_reason = "error"
        self.error = DecodeError(
            f"the target's logits of request {self.id} are not finite after {len(self.prompt)} tokens of prompt and "
            f"{len(self.token_ids)} generated",
            "a largest logit that is a finite number, in every step",
            "record the stages (docs/engine.md) and look which overflows first, as float16 does for weights made in "
            "bfloat16; other requests are not touched",
        )

    def cancel(self) -> None:
        """End the request with the tokens it has."""
        self._return_token()
        self.finish_reason = "cancelled"

    def fail(self, cause: BaseException) -> None:
        """End the request, since a call of the engine broke off while it was under way."""
        self._return_token()
        self.error = DecodeError(
            f"request {self.id} was ended after {len(self.token_ids)} tokens by a call that broke off: "
            f"{type(cause).__name__}: {cause}",
            "a call that ends by itself",
            "ask again, the engine is empty and usable; the cause is this error's __cause__",
        )
        self.error.__cause__ = cause
        self.finish_reason = "error"

    def response(self, tokenizer: Tokenizer | None, depth: int) -> Response:
        """The finished request as its caller sees it; `depth` is the draft's."""
        assert self.finish_reason is not None, "only a finished request has a response"
        return Response(
            text=self.stop.cut(detokenize(tokenizer, self.token_ids)),
            token_ids=self.token_ids,
            n_prompt_tokens=len(self.prompt),
            finish_reason=self.finish_reason,
            req_metrics=RequestMetrics(
                spec_info_from_steps(self.steps, depth), tuple(self.steps), self.n_put_back, self.n_cached
            ),
            error=self.error,
            seed=self.sampling.seed if self.sampling is not None else None,
            logprobs=self.logprobs if self.n_top is not None else None,
            lossy=self.rule.lossy(draws=self.sampling is not None) if self.rule is not None else None,
        )


class RequestHandle:
    """A request as its caller holds it, while it waits, is read and runs, and afterwards.

    Attributes:
        request: the engine's own account, which a round in another thread may be writing.
        tokenizer: the engine's.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, depth: int) -> None:
        self.request = request
        self.tokenizer, self._depth = tokenizer, depth

    def __repr__(self) -> str:
        state = self.finish_reason or "unfinished"
        return f"RequestHandle(id={self.id}, {len(self.request.token_ids)} tokens, {state})"

    @property
    def id(self) -> int:
        """What `Engine.cancel` takes."""
        return self.request.id

    @property
    def token_ids(self) -> list[int]:
        """Tokens so far."""
        return list(self.request.token_ids)

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities so far, of these tokens and perhaps of one more; None where they were not asked for."""
        return None if self.request.n_top is None else list(self.request.logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None as long as it has not."""
        return self.request.finish_reason

    def response(self) -> Response:
        """What `generate` would have returned.

        Raises:
            ConfigError: the request has not ended.
        """
        if self.finish_reason is None:
            raise ConfigError(
                f"request {self.id} was asked for its response after {len(self.request.token_ids)} tokens",
                "a request that has ended",
                "call Engine.step until finish_reason is set",
            )
        return self.request.response(self.tokenizer, self._depth)


def settings_for(
    prompts: Sequence[Sequence[int]], generation: GenerationConfig | Sequence[GenerationConfig]
) -> list[GenerationConfig]:
    """Settings of each prompt.

    Raises:
        ConfigError: prompts or settings that are none, or settings for another number of prompts.
    """
    if not isinstance(prompts, Sequence) or not all(isinstance(prompt, Iterable) for prompt in prompts):
        raise ConfigError(
            f"prompts are {shown(prompts)}", "a list with the token ids of each prompt", "write [[1, 2, 3]] for one"
        )
    settings = list(generation) if isinstance(generation, Sequence) else [generation] * len(prompts)
    for limits in generation if isinstance(generation, Sequence) else (generation,):
        check_type("generation", limits, GenerationConfig)
    if len(settings) != len(prompts):
        raise ConfigError(
            f"{len(settings)} generation configurations for {len(prompts)} prompts",
            "one for all, or one a prompt",
            "pass a single GenerationConfig or a list of equal length",
        )
    return settings


def new_request(
    index: int,
    prompt: Sequence[int],
    generation: GenerationConfig,
    request_id: int,
    *,
    target: TargetGeometry,
    session_len: int,
    tokenizer: Tokenizer | None,
    rule: AcceptanceRule | None = None,
) -> Request:
    """The request for prompt number `index` (as errors name it), whose drafts are accepted by `rule`.

    Raises:
        ConfigError: an empty or too long prompt, a token outside the vocabulary, stop words without a tokenizer,
            fewer drafts than the rule needs.
    """
    if not prompt:
        raise ConfigError(f"prompt {index} is empty", "at least one token", "give it a token, such as BOS")
    if len(prompt) >= session_len:
        raise ConfigError(
            f"prompt {index} has {len(prompt)} tokens with session_len {session_len}",
            f"at most {session_len - 1}, so that one token can follow",
            "shorten the prompt or raise session_len",
        )
    tokens = _tokens_of(index, prompt, target.vocab_size)
    if generation.stop_words and tokenizer is None:
        raise ConfigError(
            f"stop_words are {generation.stop_words!r} on an engine without a tokenizer",
            "stop_token_ids, or an engine with a tokenizer",
            "use pipeline(...), or pass tokenizer= to the engine",
        )
    if rule is not None:
        rule.check_request(generation.max_draft_tokens)
    stop = StopCriteria(
        generation, target.eos_token_ids, session_len - len(prompt), lambda ids: detokenize(tokenizer, ids)
    )
    return Request(
        request_id, tokens, stop, sampling=generation.sampling(), n_top=generation.n_top, rule=rule,
        most_drafts=generation.max_draft_tokens,
    )  # fmt: skip


def _tokens_of(index: int, prompt: Sequence[int], n_vocab: int) -> list[int]:
    """The tokens of prompt number `index`, which is not empty.

    Raises:
        ConfigError: one that is no integer of the vocabulary.
    """
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < n_vocab:
        return list(prompt)  # as nearly always, and known without a look at each by itself
    outside = [token for token in prompt if not _is_token(token, n_vocab)]
    if outside:
        raise ConfigError(
            f"prompt {index} holds token {shown(outside[0])}",
            f"ids of 0..{n_vocab - 1}",
            "use the target's own tokenizer",
        )
    return [index_of(token) for token in prompt]


def _is_token(token: object, n_vocab: int) -> bool:
    """Whether it is an integer of the vocabulary; 1.5 is not token 1, nor is True."""
    try:
        return not isinstance(token, bool) and 0 <= index_of(token) < n_vocab  # type: ignore[arg-type]
    except TypeError:
        return False


def detokenize(tokenizer: Tokenizer | None, token_ids: list[int]) -> str:
    """Text of `token_ids` without special tokens; empty without a tokenizer."""
    return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)
