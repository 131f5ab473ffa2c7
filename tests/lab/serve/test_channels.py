"""Chats of a target that answers in channels: what it thought and what it says, whole and streamed, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import CHAT, COMPLETION, MISSING, WHY_NOT, client, events_of, play
from tiny_engines import new_tokens, tiny_engine, tokens_of, write_tiny_pair

from eagle3core import Pipeline
from lab.serve.service import Service

pytestmark = [pytest.mark.reference, pytest.mark.skipif(bool(MISSING), reason=WHY_NOT)]

CHANNEL, MESSAGE, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
THOUGHT = [CHANNEL, "analysis", MESSAGE, "Add", " them.", END, START, "assistant"]
GOOD = [*THOUGHT, CHANNEL, "final", MESSAGE, "It", " is 4."]
BROKEN = [CHANNEL, "fin", "ally", MESSAGE, "It", " is 4."]
CALL = [CHANNEL, "commentary", " to=functions.sum ", "<|constrain|>", "json", MESSAGE, '{"a"', ": 4}", "<|call|>"]
VOCAB, LEAST = 96, 13


class Planned:
    """A tokenizer by which the tokens that a pair happens to give read as planned; each token is one word."""

    chat_template = f"{CHANNEL}{MESSAGE}{{{{ messages[0].content }}}}"
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012  (the tokenizer's own name and type)

    def __init__(self, tokens: list[int], words: list[str]) -> None:
        self.words = dict(zip(tokens, words, strict=False))

    def get_vocab(self) -> dict[str, int]:
        return {word: token for token, word in self.words.items()} | {START: VOCAB, END: VOCAB + 1}

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(text.removeprefix(CHANNEL + MESSAGE))]}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        words = (self.words.get(token, "?") for token in token_ids)
        return "".join(word for word in words if not (skip_special_tokens and word.startswith("<|")))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, int, list[int]]:
    """A pair, and a prompt of one token after which it says different ones."""
    pair = write_tiny_pair(tmp_path_factory.mktemp("planned"), seed=5, vocab=VOCAB)
    engine = tiny_engine(pair, None)
    answers = tokens_of(engine.generate([[token] for token in range(VOCAB)], new_tokens(LEAST)))
    prompt = next(i for i, answer in enumerate(answers) if len(set(answer)) == LEAST)
    return pair, prompt, answers[prompt]


def asked(given: tuple[Any, int, list[int]], words: list[str], **more: Any) -> tuple[Service, list[httpx.Response]]:
    """A chat, whole and streamed."""
    pair, prompt, tokens = given
    tokenizer = Planned(tokens, words)
    pipe = Pipeline(tiny_engine(pair, 3, tokenizer=tokenizer), tokenizer)
    # Marks come again in an answer, and the pair says no token again: each has several ids.
    pipe.answers.marks = {t: word for t, word in zip(tokens, words, strict=False) if word.startswith("<|")}
    service = Service(pipe, "tiny", most_waiting=20)
    body = {"messages": [{"role": "user", "content": str(prompt)}], "temperature": 0, "max_tokens": len(words), **more}

    async def scene() -> list[httpx.Response]:
        async with client(service) as http:
            bodies = (body, {**body, "stream": True})
            answers = await asyncio.gather(*(http.post(CHAT, json=each) for each in bodies))
            return [*answers, await http.get("/metrics")]

    return service, list(play(service, scene))


def streamed(answer: httpx.Response) -> dict[str, Any]:
    """The message that the deltas of a stream make together."""
    message: dict[str, Any] = {}
    for delta in (event["choices"][0]["delta"] for event in events_of(answer.text)):
        for name in ("role", "content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_thoughts_and_words_come_in_fields_of_their_own_whole_and_streamed(given: Any) -> None:
    service, (whole, stream, metrics) = asked(given, GOOD)
    message = whole.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "It is 4.", "reasoning_content": "Add them."}
    assert streamed(stream) == message
    assert events_of(stream.text)[-1]["choices"][0]["finish_reason"] == "length"
    assert service.pipe.answers.n_plain == 0
    assert "eagle3_chat_answers_broken_total 0" in metrics.text


def test_an_answer_that_breaks_its_format_is_text_and_counted(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "eagle3core"):
        _, (whole, stream, metrics) = asked(given, BROKEN)
    assert whole.status_code == stream.status_code == 200
    message = whole.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "finallyIt is 4.", "reasoning_content": ""}
    assert streamed(stream)["content"] == "finallyIt is 4."
    assert "eagle3_chat_answers_broken_total 2" in metrics.text
    assert sum("breaks the chat format" in record.message for record in caplog.records) == 2


def test_a_call_of_a_tool_is_no_text(given: Any) -> None:
    _, (whole, stream, _) = asked(given, CALL)
    message = whole.json()["choices"][0]["message"]
    assert message["content"] == message["reasoning_content"] == ""
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "sum", "arguments": '{"a": 4}'}
    assert streamed(stream)["tool_calls"] == message["tool_calls"]


def test_the_effort_asked_for_reaches_the_template_and_another_word_is_refused(given: Any) -> None:
    pair, prompt, tokens = given
    tokenizer = Planned(tokens, GOOD)
    tokenizer.chat_template = (
        f"{CHANNEL}{MESSAGE}{{% if reasoning_effort == 'high' %}}{prompt}{{% else %}}0{{% endif %}}"
    )
    service = Service(Pipeline(tiny_engine(pair, 3, tokenizer=tokenizer), tokenizer), "tiny", most_waiting=4)

    async def scene() -> list[httpx.Response]:
        body = {"messages": [{"role": "user", "content": "4"}], "temperature": 0, "max_tokens": 3, "logprobs": True}
        async with client(service) as http:
            return [
                await http.post(CHAT, json={**body, "reasoning_effort": word}) for word in ("high", "low", "utmost")
            ]

    high, low, refused = play(service, scene)
    words = [[one["token"] for one in answer.json()["choices"][0]["logprobs"]["content"]] for answer in (high, low)]
    assert words[0] == GOOD[:3] != words[1]
    assert (refused.status_code, refused.json()["error"]["allowed"]) == (400, "low, medium or high")


def test_log_probabilities_and_usage_count_marks_too(given: Any) -> None:
    _, (whole, stream, _) = asked(given, GOOD, logprobs=True)
    told = whole.json()["choices"][0]["logprobs"]["content"]
    events = [event["choices"][0]["logprobs"] for event in events_of(stream.text)]
    pieces = list(itertools.chain.from_iterable(one["content"] for one in events if one))
    assert [one["token"] for one in told] == GOOD
    # On a CPU a sum's last bits depend on which sequences share a step and when they joined: two clients leave it open.
    chances = pytest.approx([one.pop("logprob") for one in told], abs=1e-9)
    assert [one.pop("logprob") for one in pieces] == chances
    assert pieces == told
    assert whole.json()["usage"]["completion_tokens"] == len(GOOD)


def test_an_end_of_the_generation_config_ends_an_answer_and_is_no_text(given: Any, tmp_path: Path) -> None:
    pair, prompt, tokens = given
    folder = tmp_path / "target"
    shutil.copytree(pair[0], folder)
    ends = {"eos_token_id": [tokens[12], VOCAB - 1]}  # as gpt-oss lists its marks of a return and of a call
    (folder / "generation_config.json").write_text(json.dumps(ends))
    words = [*GOOD[:-1], "<|return|>"]
    tokenizer = Planned(tokens, words)
    pipe = Pipeline(tiny_engine((folder, pair[1]), 3, tokenizer=tokenizer), tokenizer)
    pipe.answers.marks = {t: word for t, word in zip(tokens, words, strict=False) if word.startswith("<|")}
    response = pipe([{"role": "user", "content": str(prompt)}], new_tokens(40))
    assert (response.finish_reason, len(response.token_ids)) == ("eos", 13)
    answer = pipe.read_answer(response)
    assert (answer.content, answer.reasoning, answer.fault) == ("It", "Add them.", "")
    pipe.close()


def test_completions_and_a_server_told_so_give_the_text_as_it_is(given: Any, tmp_path: Path) -> None:
    pair, prompt, tokens = given
    tokenizer = Planned(tokens, GOOD)
    service = Service(Pipeline(tiny_engine(pair, 3, tokenizer=tokenizer), tokenizer), "tiny", most_waiting=4)
    service.pipe.answers.marks = {}

    async def scene() -> list[httpx.Response]:
        body = {"temperature": 0, "max_tokens": len(GOOD)}
        async with client(service) as http:
            chat = await http.post(CHAT, json={**body, "messages": [{"role": "user", "content": str(prompt)}]})
            return [chat, await http.post(COMPLETION, json={**body, "prompt": [prompt]})]

    chat, completion = play(service, scene)
    text = "".join(word for word in GOOD if not word.startswith("<|"))
    assert chat.json()["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert completion.json()["choices"][0]["text"] == text
