"""The front door: text or chat in, responses out.

from eagle3core import SpeculativeConfig, pipeline
pipe = pipeline("TARGET_DIR", speculative_config=SpeculativeConfig(model="DRAFT_DIR"))
print(pipe("def main():").text)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias, cast, overload

from eagle3core.alignment import validate_eagle_runtime_config
from eagle3core.arguments import check_path, check_type
from eagle3core.batching import TextStream
from eagle3core.batching.closing import Closing
from eagle3core.chat import ChatAnswer, ChatAnswers, ChatWriter, Message, check_tokenizer_files
from eagle3core.config import EngineConfig, GenerationConfig
from eagle3core.engine import Engine
from eagle3core.errors import CheckpointError, ConfigError, shown
from eagle3core.request import Response
from eagle3core.speculative import SpeculativeConfig

Prompt: TypeAlias = str | Sequence[Message]


class Pipeline(Closing):
    """An engine with its tokenizer.

    Args:
        engine: decodes token ids.
        tokenizer: a Hugging Face tokenizer of the target.

    Attributes:
        answers: reads answers as the target's chat format means them, and counts those that break it.
    """

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.answers = ChatAnswers(tokenizer)
        self._chats = ChatWriter(tokenizer)

    @overload
    def __call__(self, prompts: str | list[Message], gen_config: GenerationConfig | None = None) -> Response: ...
    @overload
    def __call__(self, prompts: list[Prompt], gen_config: GenerationConfig | None = None) -> list[Response]: ...
    @overload
    def __call__(self, prompts: list[str], gen_config: GenerationConfig | None = None) -> list[Response]: ...

    def __call__(
        self, prompts: str | list[Message] | list[Prompt] | list[str], gen_config: GenerationConfig | None = None
    ) -> Response | list[Response]:
        """Response to one text or one chat (a list of role/content messages), or responses to a list of these.

        Raises:
            ConfigError: a prompt that is empty, too long, or a chat where the tokenizer has no chat template.
        """
        check_type("gen_config", gen_config, GenerationConfig, NoneType)
        check_type("prompts", prompts, str, list, tuple)
        generation = gen_config or GenerationConfig()
        only = _only_prompt(prompts)
        if only is not None:
            return self.engine.generate([self.encode(only)], generation)[0]
        several = cast("list[Prompt]", prompts)
        return self.engine.generate([self.encode(prompt) for prompt in several], generation)

    def stream(self, prompt: Prompt, gen_config: GenerationConfig | None = None) -> TextStream:
        """The response to one text or chat, in pieces of text as they come, which together are `Response.text`.

        What may turn out to be part of a stop word, or is part of a character, is held back until that is known.

        Raises:
            ConfigError: as a call.
        """
        check_type("gen_config", gen_config, GenerationConfig, NoneType)
        return TextStream(self.engine.stream(self.encode(prompt), gen_config))

    def read_answer(self, response: Response, gen_config: GenerationConfig | None = None) -> ChatAnswer:
        """The answer to a chat, taken apart: what the user is told, and of formats with channels what was thought.

        An answer that breaks its format is plain text from there on, with a warning and a count; nothing is raised.
        """
        words = (gen_config or GenerationConfig()).stop_words
        return self.answers.read(response.token_ids, response.text, words)

    def close(self) -> None:
        """As `Engine.close`."""
        self.engine.close()

    def encode(self, prompt: Prompt, template_settings: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a text, or of a chat by the tokenizer's template, which reads further settings if it knows them
        (`{"reasoning_effort": "high"}`)."""
        if isinstance(prompt, str):
            return self._chats.text_ids(prompt)
        chat = cast("Sequence[Message]", prompt) if isinstance(prompt, Sequence) else ()
        if not chat or not all(isinstance(each, Mapping) and {"role", "content"} <= set(each) for each in chat):
            raise ConfigError(
                f"a prompt is {shown(prompt)}",
                "a text, or a list of messages with 'role' and 'content'",
                "write [{'role': 'user', 'content': '...'}]",
            )
        return self._chats.ids(chat, template_settings)


def _only_prompt(prompts: str | list[Message] | list[Prompt] | list[str]) -> Prompt | None:
    """The one prompt this is: a text, or a chat, which is a list of messages and nothing else; None for several."""
    if isinstance(prompts, str):
        return prompts
    messages = [one for one in prompts if isinstance(one, Mapping)]
    return messages if messages and len(messages) == len(prompts) else None


def pipeline(
    model_path: str | Path,
    *,
    speculative_config: SpeculativeConfig | None = None,
    engine_config: EngineConfig | None = None,
) -> Pipeline:
    """A pipeline over the target in `model_path`; settings may sit in either configuration, equal if in both.

    Raises:
        ConfigError: contradictory settings (docs/requirements.md R-06, 1.X-23).
        CheckpointError: target, draft or tokenizer cannot be loaded.
    """
    check_path("model_path", model_path)
    check_type("speculative_config", speculative_config, SpeculativeConfig, NoneType)
    check_type("engine_config", engine_config, EngineConfig, NoneType)
    config = validate_eagle_runtime_config(engine_config or EngineConfig(), speculative_config)
    check_has_tokenizer(model_path)
    # The models first: what is wrong with them is found by our own checks, before transformers reads their config too.
    engine = Engine.from_pretrained(model_path, config)
    engine.tokenizer = load_tokenizer(model_path)
    return Pipeline(engine, engine.tokenizer)


def check_has_tokenizer(model_path: str | Path) -> None:
    """That there is a tokenizer to load.

    Raises:
        CheckpointError: the directory has none.
    """
    if not os.path.isfile(Path(model_path) / "tokenizer_config.json"):  # whatever the name, which may be far too long
        raise CheckpointError(
            f"{Path(model_path).name} has no tokenizer_config.json",
            "a directory with a Hugging Face tokenizer",
            "copy the tokenizer files beside the weights, or feed token ids to Engine.generate",
        )


def load_tokenizer(model_path: str | Path) -> Any:
    """The target's Hugging Face tokenizer.

    Raises:
        CheckpointError: the directory has none that transformers can read.
    """
    from transformers import AutoTokenizer  # a slow import that engines fed with token ids do not need

    check_has_tokenizer(model_path)
    try:
        check_tokenizer_files(Path(model_path))
    except CheckpointError as reason:
        raise CheckpointError(
            f"the tokenizer in {Path(model_path).name} cannot be read: {reason.what}", reason.allowed, reason.remedy
        ) from reason
    try:
        return AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=False)
    except BaseException as error:
        # Damaged files raise whatever their readers happen to, and the one in Rust panics past Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"the tokenizer in {Path(model_path).name} cannot be read: {type(error).__name__}: {str(error)[:300]}",
            "tokenizer files that transformers loads",
            "check tokenizer.json and tokenizer_config.json",
        ) from error
