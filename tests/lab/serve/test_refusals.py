"""What gets no answer is told why in three parts, with a status and in the form that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import CHAT, COMPLETION, MISSING, MOST_BYTES, WHY_NOT, client, letter_pipe, play
from tiny_engines import Pair

from eagle3core import ConfigError
from lab.serve.asked import NEUTRAL, Asked, ChatAsked, CompletionAsked, read_body
from lab.serve.refusals import Refused
from lab.serve.service import Service

pytestmark = [pytest.mark.reference, pytest.mark.skipif(bool(MISSING), reason=WHY_NOT)]

SMALL = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
HELLO = [{"role": "user", "content": "abc"}]

BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (COMPLETION, {}, 400, "prompt", "prompt is missing"),
    (COMPLETION, {"prompt": None}, 400, "prompt", "prompt is missing"),
    (COMPLETION, {"prompt": []}, 400, "prompt", "prompt is []"),
    (COMPLETION, {"prompt": [True]}, 400, "prompt", "prompt is [True]"),
    (COMPLETION, {"prompt": [1, "a"]}, 400, "prompt", "prompt is [1, 'a']"),
    (COMPLETION, {"prompt": [-1]}, 400, "prompt", "prompt is [-1]"),
    (COMPLETION, {"prompt": [16]}, 400, None, "prompt 0 holds token 16"),
    (COMPLETION, {"prompt": ""}, 400, None, "prompt 0 is empty"),
    (COMPLETION, {"prompt": "a" * 64}, 400, None, "prompt 0 has 64 tokens with session_len 64"),
    (COMPLETION, {"prompt": "\ud800"}, 400, None, "half a letter"),
    (COMPLETION, {"prompt": ["a"] * 30}, 400, "prompt", "30 prompts in one request"),
    (COMPLETION, {**SMALL, "max_tokens": 62}, 400, "max_tokens", "62 tokens were asked for after a prompt of 3"),
    (COMPLETION, {**SMALL, "max_tokens": 0}, 400, "max_tokens", "max_tokens is 0"),
    (COMPLETION, {**SMALL, "max_tokens": "5"}, 400, "max_tokens", "max_tokens is '5'"),
    (COMPLETION, {**SMALL, "temperature": -1}, 400, "temperature", "temperature is -1"),
    (COMPLETION, {**SMALL, "temperature": "hot"}, 400, "temperature", "temperature is 'hot'"),
    (COMPLETION, {**SMALL, "temperature": 1, "top_p": 0}, 400, "top_p", "top_p is 0"),
    (COMPLETION, {**SMALL, "top_k": -2}, 400, "top_k", "top_k is -2"),
    (COMPLETION, {**SMALL, "seed": 1 << 64}, 400, "seed", "seed is 18446744073709551616"),
    (COMPLETION, {**SMALL, "stop": ""}, 400, "stop", "stop is ''"),
    (COMPLETION, {**SMALL, "stop": ["a"] * 17}, 400, "stop", "stop is ['a'"),
    (COMPLETION, {**SMALL, "stop": 3}, 400, "stop", "stop is 3"),
    (COMPLETION, {**SMALL, "stream": "yes"}, 400, "stream", "stream is 'yes'"),
    (COMPLETION, {**SMALL, "stream_options": {"include_usage": 1}}, 400, "stream_options", "stream_options is"),
    (COMPLETION, {**SMALL, "n": 2}, 400, "n", "n is 2"),
    (COMPLETION, {**SMALL, "echo": True}, 400, "echo", "echo is True"),
    (COMPLETION, {**SMALL, "logit_bias": {"1": 5}}, 400, "logit_bias", "logit_bias is"),
    (COMPLETION, {**SMALL, "model": "gpt"}, 404, "model", "model is 'gpt'"),
    (COMPLETION, {**SMALL, "logprobs": 21}, 400, "logprobs", "logprobs is 21"),
    (COMPLETION, {**SMALL, "logprobs": True}, 400, "logprobs", "logprobs is True"),
    (CHAT, {"messages": HELLO, "logprobs": 3}, 400, "logprobs", "logprobs is 3"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs", "top_logprobs is 3 without logprobs"),
    (CHAT, {"messages": []}, 400, "messages", "messages is []"),
    (CHAT, {"messages": "hi"}, 400, "messages", "messages is 'hi'"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "message 0 is"),
    (CHAT, {"messages": [{"content": "a"}]}, 400, "messages", "message 0 is"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "message 0 is"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 62}, 400, "max_tokens", "62 tokens were asked for"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools", "tools is"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format", "response_format"),
]  # fmt: skip


def in_three_parts(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's keys and all three parts."""
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "what", "allowed", "do"}
    assert error["message"] == f"{error['what']}\n  allowed: {error['allowed']}\n  do: {error['do']}"
    assert all(error[part] for part in ("type", "what", "allowed", "do"))
    return error


def test_every_bad_request_is_refused_in_three_parts_and_none_harms_a_good_one(letters: Pair) -> None:
    service = Service(letter_pipe(letters), "tiny", most_waiting=20)

    async def scene() -> tuple[list[httpx.Response], httpx.Response]:
        async with client(service) as http:
            good = asyncio.create_task(http.post(COMPLETION, json={**SMALL, "stream": True}))
            bad = [await http.post(path, content=json.dumps(body), headers=JSON) for path, body, *_ in BAD]
            return bad, await good

    answers, good = play(service, scene)
    for (path, body, status, param, what), answer in zip(BAD, answers, strict=True):
        assert answer.status_code == status, (path, body, answer.text)
        error = in_three_parts(answer)
        assert error["param"] == param, (body, error)
        assert what in error["what"], (body, error)
    assert good.status_code == 200
    assert service.counts.ended == {"length": 1}


JSON = {"Content-Type": "application/json"}
RAW: list[tuple[str, str, bytes, dict[str, str], int, str]] = [
    ("POST", COMPLETION, b"{", JSON, 400, "the body is no JSON"),
    ("POST", COMPLETION, b"\xff\xfe{", JSON, 400, "the body is no JSON"),
    ("POST", COMPLETION, b"[" * 100_000, JSON, 400, "the body is no JSON"),
    ("POST", COMPLETION, b'{"prompt": "a", "temperature": NaN}', JSON, 400, "NaN is no number"),
    ("POST", COMPLETION, b'{"prompt": "a", "top_k": ' + b"9" * 5000 + b"}", JSON, 400, "the body is no JSON"),
    ("POST", COMPLETION, b"[1]", JSON, 400, "the body is [1]"),
    ("POST", COMPLETION, b'{"prompt": 1, "\\ud800": 1}', JSON, 400, "the body has a field '\\ud800'"),
    ("POST", COMPLETION, b"", JSON, 400, "the body is no JSON"),
    ("POST", COMPLETION, b'{"prompt": "a"}', {"Content-Type": "text/plain"}, 415, "sent as text/plain"),
    ("POST", COMPLETION, b" " * (MOST_BYTES + 1), JSON, 413, "more than 1048576 bytes"),
    ("GET", COMPLETION, b"", JSON, 405, "GET /v1/completions is answered with 405"),
    ("POST", "/v1/embeddings", b"{}", JSON, 404, "POST /v1/embeddings is answered with 404"),
]  # fmt: skip


def test_a_body_that_cannot_be_read_and_a_path_that_is_not_there_are_refused_likewise(letters: Pair) -> None:
    async def scene() -> list[httpx.Response]:
        async with client(service) as http:
            return [await http.request(how, path, content=raw, headers=kind) for how, path, raw, kind, *_ in RAW]

    service = Service(letter_pipe(letters), "tiny", most_waiting=20)
    for (_, _, raw, _, status, what), answer in zip(RAW, play(service, scene), strict=True):
        assert answer.status_code == status, (raw[:40], answer.text)
        assert what in in_three_parts(answer)["what"]


def test_a_request_that_finds_no_place_is_told_to_come_back_and_gets_one_later(letters: Pair) -> None:
    service = Service(letter_pipe(letters, max_batch_size=1), "tiny", most_waiting=1)

    async def scene() -> list[httpx.Response]:
        async with client(service) as http:
            asked = read_body(CompletionAsked, json.dumps({**SMALL, "prompt": ["a", "b"]}).encode())
            work = service.begin(await service.jobs(asked))
            refused = [await http.post(COMPLETION, json={**SMALL, "stream": streams}) for streams in (False, True)]
            await work.close()
            return [*refused, await http.post(COMPLETION, json=SMALL)]

    *refused, served = play(service, scene)
    for answer in refused:
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert in_three_parts(answer)["code"] == "rate_limit_exceeded"
    assert service.counts.refused == 2
    assert served.status_code == 200


def test_a_server_that_closes_tells_open_streams_and_new_requests(letters: Pair) -> None:
    service = Service(letter_pipe(letters, max_batch_size=1), "tiny", most_waiting=20)

    async def scene() -> list[httpx.Response]:
        async with client(service) as http:
            long = {**SMALL, "max_tokens": 50}
            asked = [asyncio.create_task(http.post(COMPLETION, json={**long, "stream": s})) for s in (True, False)]
            while service.n_open < 2:
                await asyncio.sleep(0.001)
            closing = asyncio.create_task(service.close())
            answers = await asyncio.gather(*asked)
            await closing
            return [*answers, await http.post(COMPLETION, json=SMALL), await http.get("/health")]

    stream, whole, late, health = play(service, scene)
    assert stream.status_code == 200
    *_, last, done, _ = stream.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "closing"
    assert done == "data: [DONE]"
    for answer in (whole, late):
        assert (answer.status_code, in_three_parts(answer)["code"]) == (503, "closing")
    assert (health.status_code, health.json()["status"]) == (503, "closing")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*CompletionAsked.model_fields, *ChatAsked.model_fields, *NEUTRAL})


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=5), st.booleans(), st.integers(1, 80))
def test_any_values_of_any_fields_are_taken_or_refused_in_three_parts(
    values: dict[str, Any], is_chat: bool, n_prompt: int
) -> None:
    body: type[Asked] = ChatAsked if is_chat else CompletionAsked
    needed = {"messages": HELLO} if is_chat else {"prompt": "a"}
    refused: Refused | ConfigError | None = None
    try:
        asked = read_body(body, json.dumps({**needed, **values}).encode())
        limits = asked.generation(n_prompt, 64)
        prompts = asked.chat if isinstance(asked, ChatAsked) else asked.prompts
    except (Refused, ConfigError) as error:
        refused = error
    if refused is None:
        assert limits.max_new_tokens >= 1
        assert prompts
    else:
        assert all((refused.what, refused.allowed, refused.remedy))
        assert getattr(refused, "status", 400) == 400
        json.dumps(str(refused), ensure_ascii=False).encode()


def test_fields_at_their_neutral_values_and_unknown_ones_change_nothing() -> None:
    neutral = {name: values[-1] for name, values in NEUTRAL.items() if values}
    assert len(neutral) > 20
    body = {**SMALL, **neutral, **dict.fromkeys(NEUTRAL.keys() - neutral), "user": "me", "metadata": {"a": 1}}
    assert read_body(CompletionAsked, json.dumps(body).encode()).generation(3, 64).max_new_tokens == 3
    for name in NEUTRAL:
        with pytest.raises(Refused, match=f"{name} is 'odd'"):
            read_body(CompletionAsked, json.dumps({**SMALL, name: "odd"}).encode())


def test_settings_of_draws_beside_greedy_decoding_are_left_out() -> None:
    body = {**SMALL, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 3}
    assert read_body(CompletionAsked, json.dumps(body).encode()).generation(3, 64).sampling() is None
    drawn = read_body(CompletionAsked, json.dumps({"prompt": "a", "seed": -1}).encode()).generation(1, 64).sampling()
    assert drawn is not None
    assert (drawn.temperature, drawn.seed) == (1.0, (1 << 64) - 1), "what OpenAI's default is"
