"""At a real socket: many clients at once, clients that leave half-way, and a server that ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lettered import lettered_prompts
from serving import CHAT, COMPLETION, LETTERS, MISSING, WHY_NOT, Reader, letter_pipe, listening, play, streamed, text_of
from tiny_engines import Pair

from lab.serve.service import Service

pytestmark = [pytest.mark.reference, pytest.mark.skipif(bool(MISSING), reason=WHY_NOT)]

N_CLIENTS = 50


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_fifty_streaming_clients_get_each_its_own_tokens_and_none_is_lost(
    letters: Pair, alone: list[list[int]], dtype: str
) -> None:
    prompts = lettered_prompts()
    service = Service(letter_pipe(letters, dtype=dtype, max_batch_size=8), "tiny", most_waiting=N_CLIENTS)
    asked = [(i % 8, 3 + i % 7) for i in range(N_CLIENTS)]

    def body(which: int, n: int) -> tuple[str, dict[str, Any]]:
        text = "".join(LETTERS[token] for token in prompts[which])
        common = {"max_tokens": n, "temperature": 0, "model": "tiny", "stream_options": {"include_usage": True}}
        if which % 2 and text.endswith("ab"):  # what the template adds
            return CHAT, {**common, "messages": [{"role": "user", "content": text[:-2]}]}
        return COMPLETION, {**common, "prompt": text if which % 2 else prompts[which]}

    async def scene() -> list[list[dict[str, Any]]]:
        async with listening(service) as port:
            return list(await asyncio.gather(*(streamed(port, *body(*each)) for each in asked)))

    for (which, n), (*pieces, usage) in zip(asked, play(service, scene), strict=True):
        assert text_of(pieces) == ("".join(LETTERS[token] for token in alone[which][:n]), "length")
        n_prompt = len(prompts[which])
        assert usage["usage"] == {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
    assert service.counts.ended == {"length": N_CLIENTS}


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_slots_and_no_other_answer_changes(
    letters: Pair, alone: list[list[int]], streams: bool
) -> None:
    prompts = lettered_prompts()
    service = Service(letter_pipe(letters, max_batch_size=2), "tiny", most_waiting=20)
    long = {"max_tokens": 50, "temperature": 0, "prompt": prompts[0], "stream": streams}

    async def scene() -> list[dict[str, Any]]:
        async with listening(service) as port:
            several = {**long, "prompt": [prompts[0], prompts[2], prompts[4]]}
            leaving = [await Reader.open(port, COMPLETION, body) for body in (long, several)]
            if streams:
                for reader in leaving:
                    await reader.head()
                    await anext(reader.events())
            while service.n_open < 4:
                await asyncio.sleep(0.001)
            stays = asyncio.create_task(streamed(port, COMPLETION, {**long, "prompt": prompts[1], "max_tokens": 12}))
            while service.n_open < 5:
                await asyncio.sleep(0.001)
            for reader in leaving:
                reader.leave()
            found = await stays
            while service.n_open or service.n_running:
                await asyncio.sleep(0.001)
            return found

    assert text_of(play(service, scene))[0] == "".join(LETTERS[token] for token in alone[1][:12])
    assert service.counts.ended["cancelled"] >= 3, "with two slots, at most one of the four can have ended by itself"


def test_a_client_that_leaves_before_its_body_has_come_leaves_nothing(letters: Pair) -> None:
    service = Service(letter_pipe(letters), "tiny", most_waiting=20)

    async def scene() -> list[dict[str, Any]]:
        async with listening(service) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = "POST /v1/completions HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\nContent-Length: 99"
            writer.write(head.encode() + b"\r\n\r\n{")
            await writer.drain()
            writer.transport.abort()
            return await streamed(port, COMPLETION, {"prompt": "abc", "max_tokens": 3, "temperature": 0})

    assert text_of(play(service, scene))[1] == "length"
