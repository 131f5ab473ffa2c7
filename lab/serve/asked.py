"""What a client asks for: bodies of requests, field by field, and the settings that they mean for the engine.

Names and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos` and `stop_token_ids` are what other servers add, and
`posterior_threshold` is ours. A field that would change the answer and is not built is refused unless it says
"nothing" (`NEUTRAL`); a field that nobody knows is ignored. Source: OpenAI's API reference; vLLM's extra parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3core import GenerationConfig
from eagle3core.config import MOST_LOGPROBS
from eagle3core.errors import shown
from lab.serve.refusals import Refused

USUAL_COMPLETION = 16  # OpenAI's max_tokens of a completion that says none
MOST_STOPS, MOST_STOP_LETTERS = 16, 1000
PAGE = "docs/serve.md lists the fields"
Body = TypeVar("Body", bound="Asked")
Id = Annotated[int, Field(ge=0)]

# Fields of OpenAI's and vLLM's that would change the answer, with the values at which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "use_beam_search": (False,), "min_tokens": (0,), "echo": (False,), "suffix": ("",),
    "logit_bias": ({},), "bad_words": ([],), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "prompt_logprobs": (0,), "prompt_embeds": (), "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,), "include_stop_str_in_output": (False,), "response_format": ({"type": "text"},),
    "structured_outputs": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (), "prediction": (), "documents": ([],),
    "chat_template": (), "chat_template_kwargs": ({},), "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}  # fmt: skip


def _field(default: Any, allowed: str, **limits: Any) -> Any:
    """A field with what it may be in words, which a refusal quotes."""
    return Field(default, description=allowed, **limits)


class StreamOptions(BaseModel):
    """What a stream tells beside its pieces."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class Asked(BaseModel):
    """Fields that completions and chats share."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = _field(None, "a text: the name of the model that is served")
    max_tokens: int | None = _field(None, "a whole number of at least 1", ge=1)
    temperature: float | None = _field(None, "a number of at least 0; 0 is greedy", ge=0, allow_inf_nan=False)
    top_p: float | None = _field(None, "a number above 0 and up to 1", gt=0, le=1)
    top_k: int | None = _field(None, "a whole number of at least 1; 0 or -1 for all tokens", ge=-1, le=(1 << 31) - 1)
    min_p: float | None = _field(None, "a number of 0 to 1", ge=0, le=1)
    posterior_threshold: float | None = _field(None, "a number of 0 to 1", ge=0, le=1)
    seed: int | None = _field(None, "a whole number of 64 bits", ge=-(1 << 63), lt=1 << 64)
    stop: str | list[str] | None = _field(None, "a text, or a list of texts, none of them empty")
    stop_token_ids: list[Id] | None = _field(None, "a list of token ids")
    ignore_eos: bool | None = _field(None, "true or false")
    stream: bool | None = _field(None, "true or false")
    stream_options: StreamOptions | None = _field(None, 'an object such as {"include_usage": true}')

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        """Tokens that an answer may have, as asked."""
        return self.max_tokens

    @property
    def usual_tokens(self) -> int | None:
        """Tokens that it may have where nothing was asked; None: all that the session has room for."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer.

        Raises:
            Refused: an empty one, too many, or one that is too long to look for after every token.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MOST_STOPS or any(not 0 < len(word) <= MOST_STOP_LETTERS for word in stops):
            raise Refused(
                400,
                f"stop is {shown(self.stop)}",
                f"up to {MOST_STOPS} texts of 1 to {MOST_STOP_LETTERS} letters",
                "correct stop, or leave it out",
                param="stop",
            )
        return stops

    def generation(self, n_prompt: int, session_len: int) -> GenerationConfig:
        """What the engine is asked for after a prompt of `n_prompt` tokens.

        Raises:
            Refused: more tokens than the session has room for. ConfigError: what the engine refuses.
        """
        room, wanted = session_len - n_prompt, self.most_tokens
        if wanted is not None and wanted > room > 0:
            raise Refused(
                400,
                f"{wanted} tokens were asked for after a prompt of {n_prompt}",
                f"at most {room} here: a session holds {session_len} tokens, prompt and answer",
                "lower max_tokens, shorten the prompt, or start the server with a longer --session-len",
                param="max_tokens",
                code="context_length_exceeded",
            )
        temperature = 1.0 if self.temperature is None else self.temperature
        usual = room if self.usual_tokens is None else min(self.usual_tokens, room)
        return GenerationConfig(
            max_new_tokens=max(1, usual if wanted is None else wanted),  # what leaves no room, the engine refuses
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_words=self.stops,
            temperature=temperature,
            logprobs=self.kept_logprobs,
            **(self._draws() if temperature else {}),
        )

    @property
    def kept_logprobs(self) -> bool | int:
        """Log-probabilities that are asked for, as the engine counts them."""
        return False

    def _draws(self) -> dict[str, Any]:
        """Settings of drawn tokens; greedy decoding, of which OpenAI's clients send them too, has no use for them."""
        given = {name: getattr(self, name) for name in ("top_p", "min_p", "posterior_threshold", "seed", "top_k")}
        draws = {name: value for name, value in given.items() if value is not None}
        if self.seed is not None:
            draws["seed"] = self.seed % (1 << 64)
        if self.top_k is not None:
            draws["top_k"] = max(self.top_k, 0)
        return draws


class CompletionAsked(Asked):
    """The body of /v1/completions."""

    prompt: str | list[Id] | list[str] | list[list[Id]] = _field(..., "a text, token ids, or a list of either")
    logprobs: int | None = _field(None, f"a whole number of 0 to {MOST_LOGPROBS}", ge=0, le=MOST_LOGPROBS)

    @property
    def kept_logprobs(self) -> bool | int:
        """Those of the tokens, and of as many likeliest ones as `logprobs` says."""
        return False if self.logprobs is None else self.logprobs or True

    @property
    def usual_tokens(self) -> int | None:
        """As OpenAI's completions have it."""
        return USUAL_COMPLETION

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids, one an answer.

        Raises:
            Refused: an empty list.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise Refused(400, "prompt is []", "at least one token or text", "give a prompt", param="prompt")
        several: list[Any] = list(self.prompt)
        return [several] if isinstance(several[0], int) else several


class ChatAsked(Asked):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = _field(..., "a list of messages, each with role and content")
    max_completion_tokens: int | None = _field(None, "a whole number of at least 1", ge=1)
    logprobs: bool | None = _field(None, "true or false")
    top_logprobs: int | None = _field(None, f"a whole number of 0 to {MOST_LOGPROBS}", ge=0, le=MOST_LOGPROBS)
    reasoning_effort: Literal["low", "medium", "high"] | None = _field(None, "low, medium or high")

    @property
    def template_settings(self) -> dict[str, Any]:
        """What the chat template is told beside the messages."""
        return {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}

    @property
    def kept_logprobs(self) -> bool | int:
        """Those of the tokens, and of as many likeliest ones as `top_logprobs` says.

        Raises:
            Refused: `top_logprobs` without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise Refused(
                400, f"top_logprobs is {self.top_logprobs} without logprobs", "logprobs true beside it",
                "set logprobs to true, or leave top_logprobs out", param="top_logprobs",
            )  # fmt: skip
        return (self.top_logprobs or True) if self.logprobs else False

    @property
    def most_tokens(self) -> int | None:
        """The newer name of OpenAI's before the older."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def chat(self) -> list[dict[str, Any]]:
        """Messages whose content is one text.

        Raises:
            Refused: no messages, or content that is no text.
        """
        if not self.messages:
            raise Refused(400, "messages is []", "at least one message", "give a message", param="messages")
        return [{**message, "content": _text_of(message, i)} for i, message in enumerate(self.messages)]


def _text_of(message: Mapping[str, Any], index: int) -> str:
    """The text of a message, which may come in parts."""
    content, role = message.get("content"), message.get("role")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not isinstance(role, str) or not all(isinstance(text, str) for text in texts):
        raise Refused(
            400,
            f"message {index} is {shown(dict(message), 200)}",
            "a role, and content that is a text or a list of parts of type text",
            "correct that message; pictures and sound are not read",
            param="messages",
        )
    return "\n".join(str(text) for text in texts)


def read_body(body: type[Body], raw: bytes) -> Body:
    """A request, checked.

    Raises:
        Refused: no JSON object, a field that is not what it may be, or one that asks for what is not built.
    """
    try:
        values = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}", "a JSON object", "correct the body") from error
    if not isinstance(values, dict):
        raise Refused(400, f"the body is {shown(values, 100)}", "a JSON object", "correct the body")
    given = {name: value for name, value in values.items() if value is not None}
    try:
        asked = body.model_validate(given)
    except ValidationError as error:
        raise _refusal(body, given, error) from error
    for name, value in (asked.model_extra or {}).items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            neutral = ", ".join(json.dumps(each) for each in NEUTRAL[name])
            raise Refused(
                400,
                f"{name} is {shown(value, 100)}",
                f"{name} left out" + (f", or {neutral}" if neutral else ""),
                f"leave {name} out: it is not built; {PAGE}",
                param=name,
            )
    return asked


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def _refusal(body: type[Asked], values: Mapping[str, Any], error: ValidationError) -> Refused:
    """The first field that is not what it may be."""
    place = error.errors(include_url=False)[0]["loc"]
    if not place:  # none: the reader stumbled over a name
        names = [name for name in values if any("\ud800" <= letter <= "\udfff" for letter in name)]
        what = f"the body has a field {shown(names[0] if names else list(values), 100)}"
        return Refused(400, what, "names of whole letters, as UTF-8 has them", "correct or leave out that field")
    name = str(place[0])
    what = f"{name} is {shown(values[name], 200)}" if name in values else f"{name} is missing"
    return Refused(400, what, body.model_fields[name].description or "", f"correct {name}; {PAGE}", param=name)
