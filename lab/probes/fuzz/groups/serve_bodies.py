"""Bodies of completions and chats, to the server's service: an answer, or a refusal with a status of the client's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

from eagle3core import EngineConfig, Pipeline, pipeline
from lab.probes.fuzz.damage import damaged_text
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.pairs import prepare_talking_pair
from lab.serve import forms
from lab.serve.asked import Asked, ChatAsked, CompletionAsked, read_body
from lab.serve.refusals import Refused
from lab.serve.service import Service

NAME = "small"
COMMON: dict[str, Any] = {
    "model": NAME, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.01, "seed": 3,
    "posterior_threshold": 0.0, "stop": ["end", "\n\n"], "stop_token_ids": [5], "ignore_eos": False, "stream": False,
    "stream_options": {"include_usage": True}, "n": 1, "user": "a",
}  # fmt: skip
BODIES: tuple[tuple[type[Asked], dict[str, Any]], ...] = (
    (CompletionAsked, {**COMMON, "prompt": "def main():", "logprobs": 2}),
    (CompletionAsked, {"prompt": ["one", "two"], "max_tokens": 3, "temperature": 0}),
    (CompletionAsked, {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 3, "echo": False}),
    (CompletionAsked, {"prompt": [1, 2, 3], "max_tokens": 3, "logprobs": 0, "logit_bias": {}}),
    (ChatAsked, {**COMMON, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}),
    (ChatAsked, {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]},
                              {"role": "user", "content": "b"}], "max_completion_tokens": 3}),
)  # fmt: skip


def _prepare(folder: Path) -> Pipeline:
    target = prepare_talking_pair(folder).target
    config = EngineConfig(session_len=64, max_batch_size=2, block_size=16, prefill_chunk=64, device="cpu")
    return pipeline(target, engine_config=config)  # which no case has used: threads and processes do not outlive a fork


def _make(pipe: Pipeline, random: Random, folder: Path) -> None:
    which = random.randrange(len(BODIES))
    (folder / f"{which}.json").write_bytes(damaged_text(BODIES[which][1], random))


def _open(pipe: Pipeline, folder: Path) -> None:
    [path] = folder.iterdir()
    try:
        asyncio.run(_answered(pipe, BODIES[int(path.stem)][0], path.read_bytes()))
    except Refused as error:
        if not 400 <= error.status < 500:
            raise AssertionError(f"a body is answered with status {error.status}") from error
        json.dumps(error.body(), ensure_ascii=False).encode()
        raise


async def _answered(pipe: Pipeline, kind: type[Asked], raw: bytes) -> None:
    """The whole answer in its form, as JSON."""
    service = Service(pipe, NAME, most_waiting=4)
    make = forms.ChatForm if kind is ChatAsked else forms.CompletionForm
    try:
        asked = read_body(kind, raw)
        form = make(NAME, service.token_text, includes_usage=asked.includes_usage)
        work = service.begin(await service.jobs(asked))
        try:
            json.dumps(form.whole(await work.whole()), ensure_ascii=False).encode()
        finally:
            await work.close()
    finally:
        await service.close()


GROUPS = (
    Group(
        "serve-bodies",
        "bodies of completions and chats, to the server's service",
        _prepare,
        _make,
        _open,
        refusals=("Refused", "ConfigError"),
    ),
)
