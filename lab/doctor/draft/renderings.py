"""Prompts written otherwise than they were: through the tokenizer's template, without it, or without thinking."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3core.errors import Eagle3Error
from lab.pairs.prompts import Prompt
from lab.pairs.random_ids import has_tokenizer

SWITCH = "enable_thinking"  # Qwen3's templates and those after them; absent means true there

Renderings = dict[str, tuple[str, tuple[Prompt, ...]]]


def other_renderings(target: Path, prompts: Sequence[Prompt]) -> tuple[Renderings, str]:
    """By name, each with the change that asks for it; and why there is none where that cannot be told.

    A prompt keeps its length at most: what was cut to its last tokens is cut again.
    """
    if not has_tokenizer(target):
        return {}, "the target has no tokenizer"
    if not any(prompt.text for prompt in prompts):
        return {}, "the prompts are token ids without a text"
    from eagle3core.chat import ChatWriter
    from eagle3core.pipeline import load_tokenizer

    tokenizer = load_tokenizer(target)
    writer, made = ChatWriter(tokenizer), Renderings()
    if not writer.has_template:
        return {}, ""
    try:
        chats = [list(p.chat) or [{"role": "user", "content": p.text}] for p in prompts]
        is_chat = any(prompt.chat for prompt in prompts)
        if is_chat:
            plain = _written(prompts, [writer.text_ids(prompt.text) for prompt in prompts])
            made["as plain texts"] = 'prompts as {"text": ...} instead of {"messages": ...}', plain
        else:
            through = _written(prompts, [writer.ids(chat) for chat in chats])
            made["through the chat template"] = 'prompts as {"messages": ...} instead of {"text": ...}', through
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, str) and SWITCH in template:
            quiet = ChatWriter(_with_template(tokenizer, "{% set enable_thinking = false %}" + template))
            without = _written(prompts, [quiet.ids(chat) for chat in chats])
            made["through the chat template without thinking"] = "chat_template_kwargs: enable_thinking false", without
    except Eagle3Error as refused:
        return made, "" if made else f"the chat template refuses them: {refused.what}"
    return made, ""


def _written(prompts: Sequence[Prompt], ids: Sequence[Sequence[int]]) -> tuple[Prompt, ...]:
    longest = max(len(prompt.ids) for prompt in prompts)
    return tuple(replace(p, ids=tuple(own[-longest:])) for p, own in zip(prompts, ids, strict=True) if own)


def _with_template(tokenizer: Any, template: str) -> Any:
    changed = copy(tokenizer)
    changed.chat_template = template
    return changed
