"""The paths answer as OpenAI's do, with the tokens that `generate` gives offline."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import torch
from serving import CHAT, COMPLETION, LETTERS, MISSING, WHY_NOT, client, events_of, letter_pipe, offline, play, text_of
from tiny_engines import Pair, new_tokens

from eagle3core.trace import Trace
from lab.serve.asked import CompletionAsked
from lab.serve.service import Service

pytestmark = [pytest.mark.reference, pytest.mark.skipif(bool(MISSING), reason=WHY_NOT)]

PROMPTS = ["abc", "hello", "ponmlkjihgfedcba", "dd"]
GREEDY: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 11, "temperature": 0}


def answered(pair: Pair, *asked: tuple[str, dict[str, Any]], **changes: Any) -> list[httpx.Response]:
    """Answers to requests that were sent together."""
    service = Service(letter_pipe(pair, **changes), "tiny", most_waiting=20)

    async def scene() -> list[httpx.Response]:
        async with client(service) as http:
            return list(await asyncio.gather(*(http.post(path, json=body) for path, body in asked)))

    return list(play(service, scene))


@pytest.mark.parametrize("k", [None, 3])
def test_whole_and_streamed_answers_are_those_of_generate(letters: Pair, k: int | None) -> None:
    expected = offline(letters, GREEDY)
    ids = [[LETTERS.index(letter) for letter in prompt] for prompt in PROMPTS]
    bodies = [GREEDY, {**GREEDY, "prompt": ids}, {**GREEDY, "stream": True}]
    whole, by_ids, stream = answered(letters, *((COMPLETION, body) for body in bodies), k=k)
    for answer in (whole, by_ids):
        body = answer.json()
        assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
            (i, text, "length") for i, text in enumerate(expected)
        ]
        n_prompt = sum(map(len, PROMPTS))
        assert body["usage"] == {"prompt_tokens": n_prompt, "completion_tokens": 44, "total_tokens": n_prompt + 44}
        assert (body["object"], body["model"]) == ("text_completion", "tiny")
    events = events_of(stream.text)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert [text_of(events, i) for i in range(4)] == [(text, "length") for text in expected]
    assert {event["id"] for event in events} == {events[0]["id"]}


def test_a_chat_is_written_by_its_template_and_streamed_with_its_usage(letters: Pair) -> None:
    [expected] = offline(letters, {**GREEDY, "prompt": ["hidcab"]})  # both messages, then what the template adds
    parts = [{"type": "text", "text": "hi"}]
    asked = {"messages": [{"role": "system", "content": parts}, {"role": "user", "content": "dc"}], "temperature": 0}
    whole, stream = answered(
        letters,
        (CHAT, {**asked, "max_completion_tokens": 11}),
        (CHAT, {**asked, "max_tokens": 11, "stream": True, "stream_options": {"include_usage": True}}),
    )
    [choice] = whole.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected}
    *pieces, usage = events_of(stream.text)
    assert text_of(pieces) == (expected, "length")
    assert [piece["choices"][0]["delta"].get("role") for piece in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
    assert all(piece["usage"] is None for piece in pieces)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 11)
    assert whole.json()["usage"] == usage["usage"]


def test_seeds_and_limits_of_drawn_tokens_reach_the_engine(letters: Pair) -> None:
    drawn = {"prompt": "abc", "max_tokens": 12, "temperature": 0.9, "top_k": 5, "top_p": 0.9, "seed": 7}
    with letter_pipe(letters, None) as pipe:
        settings = {name: drawn[name] for name in ("temperature", "top_k", "top_p", "seed")}
        expected = pipe("abc", new_tokens(12, **settings)).text
    first, again, unlimited = answered(
        letters, (COMPLETION, drawn), (COMPLETION, drawn), (COMPLETION, {**drawn, "top_k": -1, "seed": -7})
    )
    assert [one.json()["choices"][0]["text"] for one in (first, again)] == [expected] * 2
    assert unlimited.json()["choices"][0]["text"] != expected


def test_a_stop_text_ends_an_answer_before_it(letters: Pair) -> None:
    [text] = offline(letters, {"prompt": ["abc"], "max_tokens": 20})
    stop = text[6:8]
    asked = {"prompt": "abc", "max_tokens": 20, "temperature": 0}
    as_text, as_list, by_id = answered(
        letters,
        (COMPLETION, {**asked, "stop": stop}),
        (COMPLETION, {**asked, "stop": ["zz", stop], "stream": True}),
        (COMPLETION, {**asked, "stop_token_ids": [LETTERS.index(text[3])]}),
    )
    expected = text[: text.index(stop)]
    [choice] = as_text.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    assert text_of(events_of(as_list.text)) == (expected, "stop")
    assert by_id.json()["choices"][0]["text"] == text[: text.index(text[3]) + 1]


def test_a_completion_without_a_limit_has_16_tokens_and_a_chat_all_there_is_room_for(letters: Pair) -> None:
    completion, chat = answered(
        letters,
        (COMPLETION, {"prompt": "abc", "temperature": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "abc"}], "temperature": 0}),
    )
    assert completion.json()["usage"]["completion_tokens"] == 16
    assert chat.json()["usage"]["total_tokens"] == 64, "the whole session"


def test_log_probabilities_are_those_of_the_engine_whole_and_streamed(letters: Pair) -> None:
    with letter_pipe(letters, None) as pipe:
        [expected] = pipe.engine.generate([[0, 1, 2]], new_tokens(11, logprobs=3))
    assert expected.logprobs is not None
    asked = {**GREEDY, "prompt": "abc", "logprobs": 3}
    whole, stream, own = answered(
        letters, (COMPLETION, asked), (COMPLETION, {**asked, "stream": True}), (COMPLETION, {**asked, "logprobs": 0})
    )
    told = whole.json()["choices"][0]["logprobs"]
    texts = [LETTERS[one.token_id] for one in expected.logprobs]
    assert (told["tokens"], told["text_offset"]) == (texts, list(range(11)))
    assert told["token_logprobs"] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-9)
    for found, one in zip(told["top_logprobs"], expected.logprobs, strict=True):
        assert found == pytest.approx({LETTERS[i]: value for i, value in one.top}, abs=1e-9)
    pieces = [one["logprobs"] for event in events_of(stream.text) for one in event["choices"] if one["logprobs"]]
    joined = {key: [each for piece in pieces for each in piece[key]] for key in told}
    assert (joined["tokens"], joined["text_offset"]) == (texts, list(range(11)))
    assert joined["token_logprobs"] == pytest.approx(told["token_logprobs"], abs=1e-9)
    assert len(pieces) > 1
    assert own.json()["choices"][0]["logprobs"]["top_logprobs"] == [{}] * 11


def test_a_chat_tells_its_log_probabilities_token_by_token(letters: Pair) -> None:
    chat = {"messages": [{"role": "user", "content": "c"}], "max_tokens": 11, "temperature": 0, "logprobs": True}
    whole, stream, bare, same = answered(
        letters,
        (CHAT, {**chat, "top_logprobs": 2}),
        (CHAT, {**chat, "top_logprobs": 2, "stream": True}),
        (CHAT, chat),
        (COMPLETION, {**GREEDY, "prompt": "cab", "logprobs": 2}),  # what the template makes of c
    )
    told = same.json()["choices"][0]["logprobs"]
    entries = whole.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == told["tokens"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(told["token_logprobs"], abs=1e-9)
    for entry, top in zip(entries, told["top_logprobs"], strict=True):
        assert entry["bytes"] == [ord(entry["token"])]
        assert {one["token"]: one["logprob"] for one in entry["top_logprobs"]} == pytest.approx(top, abs=1e-9)
    parts = [one["logprobs"] for event in events_of(stream.text) for one in event["choices"] if one["logprobs"]]
    assert [entry["token"] for part in parts for entry in part["content"]] == told["tokens"]
    assert [entry["top_logprobs"] for entry in bare.json()["choices"][0]["logprobs"]["content"]] == [[]] * 11


def test_one_request_that_cannot_go_on_gets_an_error_and_the_others_their_answers(letters: Pair) -> None:
    good, broken = {**GREEDY, "prompt": "dd"}, {**GREEDY, "prompt": "pd"}
    [expected] = offline(letters, {**good, "prompt": ["dd"]})
    assert "p" not in expected
    pipe = letter_pipe(letters)
    for model in (pipe.engine.target, pipe.engine.draft):
        assert model is not None
        model.embedding[LETTERS.index("p")] = torch.nan
    service = Service(pipe, "tiny", most_waiting=20)

    async def scene() -> list[httpx.Response]:
        async with client(service) as http:
            bodies = (good, broken, {**broken, "stream": True}, {**good, "stream": True}, {**GREEDY, "prompt": "d"})
            return list(await asyncio.gather(*(http.post(COMPLETION, json=body) for body in bodies)))

    whole, error, stream, other, _ = play(service, scene)
    assert whole.json()["choices"][0]["text"] == expected
    assert text_of(events_of(other.text))[0] == expected
    assert error.status_code == 500
    for told in (error.json(), events_of(stream.text)[-1]):
        assert (told["error"]["type"], told["error"]["code"]) == ("server_error", "decode_error")
        assert "not finite" in told["error"]["what"]
    assert service.counts.ended["error"] == 2


def test_an_engine_that_breaks_off_tells_every_client_and_serves_on(letters: Pair) -> None:
    service = Service(letter_pipe(letters), "tiny", most_waiting=20)

    class Failing(Trace):
        is_detailed = True

        def tap(self, name: str, value: torch.Tensor, valid: torch.Tensor | None = None) -> None:
            if name == "accept.tokens":
                raise RuntimeError("a planted failure")

    async def scene() -> tuple[httpx.Response, httpx.Response]:
        async with client(service) as http:
            service.pipe.engine.trace = Failing()
            failed = await http.post(COMPLETION, json=GREEDY)
            service.pipe.engine.trace = Trace()
            return failed, await http.post(COMPLETION, json=GREEDY)

    failed, right = play(service, scene)
    assert failed.status_code == 500
    assert "a planted failure" in failed.json()["error"]["what"]
    assert [choice["text"] for choice in right.json()["choices"]] == offline(letters, GREEDY)


def test_models_health_and_metrics_say_what_is_there(letters: Pair) -> None:
    service = Service(letter_pipe(letters, max_batch_size=2), "tiny", most_waiting=4)

    async def scene() -> list[httpx.Response]:
        async with client(service) as http:
            await http.post(COMPLETION, json=GREEDY)
            return [await http.get(path) for path in ("/v1/models", "/health", "/metrics")]

    models, health, metrics = play(service, scene)
    [model] = models.json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 64)
    assert health.json() == {"status": "ok", "running": 0, "waiting": 0}
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in metrics.text.splitlines() if not line.startswith("#"))
    assert values["eagle3_slots"] == "2"
    assert values['eagle3_requests_total{reason="length"}'] == "4"
    assert values["eagle3_generated_tokens_total"] == "44"
    assert 0 < int(values["eagle3_accepted_tokens_total"]) < int(values["eagle3_drafted_tokens_total"])
    assert int(values["eagle3_drafted_tokens_total"]) == 3 * int(values["eagle3_steps_total"])
    assert values['eagle3_engine_info{path="torch"}'] == "1"


def test_metrics_say_how_many_blocks_are_held_while_requests_run_and_kept_once_they_have_ended(letters: Pair) -> None:
    service = Service(
        letter_pipe(letters, max_batch_size=2, cache_blocks=40, prefix_cache=True), "tiny", most_waiting=4
    )

    async def blocks(http: httpx.AsyncClient) -> dict[str, int]:
        lines = (await http.get("/metrics")).text.splitlines()
        found = dict(line.removeprefix("eagle3_").rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: int(value) for name, value in found.items()}

    async def scene() -> tuple[dict[str, int], ...]:
        async with client(service) as http:
            work = service.begin(await service.jobs(CompletionAsked(prompt="abcdefghij", max_tokens=40)))
            pieces = work.pieces()
            await anext(pieces)
            during = await blocks(http)
            await pieces.aclose()  # type: ignore[attr-defined]
            await work.close()
            while service.n_running:
                await asyncio.sleep(0.001)
            after = await blocks(http)
            await http.post(COMPLETION, json={"prompt": "abcdefghij", "max_tokens": 2, "temperature": 0})
            return during, after, await blocks(http)

    during, after, again = play(service, scene)
    assert during["cache_blocks"] == after["cache_blocks"] == 40
    assert during["cache_blocks_held"] >= 3
    assert (after["cache_blocks_held"], after["found_tokens_total"]) == (0, 0)
    assert after["cache_blocks_kept"] >= 2
    assert again["found_tokens_total"] == 8, "two blocks of four, which the first request left"
