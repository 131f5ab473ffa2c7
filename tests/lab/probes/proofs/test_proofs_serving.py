"""The proof of serving: small, with a real server; and what it says of servers that lie, break off or keep blocks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proof_subjects import verdicts
from serving import MISSING, WHY_NOT

from lab.cli import parsed
from lab.options.proofs import ProveOptions
from lab.options.serve import ServeOptions
from lab.probes.proofs.plans import PARTS, Plans, needed_variants
from lab.probes.proofs.serving.checks import Serving, at_share, judge_answers, judge_blocks, judge_end, judge_refusals
from lab.probes.proofs.serving.clients import MOST_ERRORS, Client, Tally, ask_until_over, difference
from lab.probes.proofs.serving.connection import Connection
from lab.probes.proofs.serving.load import Load
from lab.probes.proofs.serving.plan import ServingPlan
from lab.probes.proofs.serving.questions import BAD, COMPLETIONS, Question
from lab.probes.proofs.subject import Setting
from lab.serve.command import engine_config, speculative_config

pytestmark = pytest.mark.reference

SMALL = ServingPlan(
    clients=10, seconds=5, slots=4, session_len=512, cache_blocks=16, n_prompts=2, prompt_tokens=(150, 70),
    n_tokens=(4, 11, 19), odd_every=4, dtype="float64", device="cpu",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=WHY_NOT)
def test_ten_clients_at_a_real_server_get_the_offline_answers_and_leave_nothing() -> None:
    serving = Serving(SMALL)
    found = verdicts(serving.checks())
    assert {name: one.held for name, one in found.items()} == dict.fromkeys(found, True), found
    assert serving.load.tally.n_answers >= 10
    assert found["every answer is the offline one"].values["n_found_tokens"], "the same prompts come again"


LOAD = Load(
    Tally(n_answers=5, n_tokens=50, n_left=2, n_refused=3, first_s=[0.1, 0.3, 0.2]), 2.0, 9,
    {'engine_info{path="kernels"}': 1, "accepted_tokens_total": 30, "steps_total": 20, "cache_blocks": 16,
     'requests_total{reason="cancelled"}': 2, "cache_blocks_held": 0, "cache_blocks_kept": 7}, 0, "",
)  # fmt: skip


def seen(**changes: Any) -> Load:
    """A run that went well, but for what its clients saw."""
    return replace(LOAD, tally=replace(LOAD.tally, **changes))


def left(**changes: float) -> Load:
    """A run that went well, but for the server's own figures."""
    return replace(LOAD, left={**LOAD.left, **changes})


def test_a_run_in_which_all_went_well_holds_and_its_figures_are_told() -> None:
    answers = judge_answers(LOAD, "kernels")
    assert answers.held is True
    assert answers.values["tokens_per_s"] == 25
    assert (answers.values["first_text_p50_s"], answers.values["first_text_p99_s"]) == (0.2, 0.3)
    assert answers.values["n_requests"] == 7
    assert [judge(LOAD).held for judge in (judge_blocks, judge_refusals, judge_end)] == [True] * 3
    assert at_share([], 0.5) == 0


@pytest.mark.parametrize(
    ("load", "held", "what"),
    [
        (seen(errors=["EOFError: the connection broke off"]), False, "broke off"),
        (seen(differing=["from letter 3"]), False, "from letter 3"),
        (left(**{'engine_info{path="kernels"}': 0}), False, "does not compute by kernels"),
        (left(accepted_tokens_total=0), None, "no draft accepted"),
        (seen(n_answers=0), None, "nothing was answered"),
    ],
)
def test_an_error_a_difference_and_an_engine_that_is_not_the_one_do_not_hold(
    load: Load, held: bool | None, what: str
) -> None:
    verdict = judge_answers(load, "kernels")
    assert verdict.held is held
    assert what in verdict.detail


def test_blocks_that_are_still_held_fail_and_nobody_leaving_proves_nothing() -> None:
    assert judge_blocks(left(cache_blocks_held=1)).held is False
    assert judge_blocks(left(requests_running=1)).held is False
    assert judge_blocks(left(requests_waiting=1)).held is False
    assert judge_blocks(left(**{'requests_total{reason="cancelled"}': 0})).held is None
    assert judge_blocks(replace(LOAD, most_held=0)).held is None


def test_bad_requests_that_are_taken_and_a_server_that_is_killed_fail() -> None:
    assert judge_refusals(seen(not_refused=["got 200"])).held is False
    assert judge_refusals(seen(n_refused=0)).held is None
    for code, log in ((None, ""), (1, ""), (0, "Traceback (most recent call last):")):
        assert judge_end(replace(LOAD, code=code, log=log)).held is False
    assert judge_end(replace(LOAD, log="a warning")).held is True


QUESTION = Question(COMPLETIONS, {"prompt": "a"}, "bcd", "length", 3)


def event(**choice: Any) -> bytes:
    """One event of a completion."""
    return b"data: " + json.dumps({"choices": [{"finish_reason": None, **choice}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = event(text="bc") + event(text="d", finish_reason="length") + USAGE + DONE


def chunked(body: bytes, size: int = 7) -> bytes:
    """An answer of 200 in chunks that do not end where events do."""
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def plain(status: int, body: bytes) -> bytes:
    """An answer whose length is told."""
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def played(client_does: Callable[[Client], Coroutine[Any, Any, None]], answer: bytes) -> Tally:
    """What a client counts whose server answers every request with the same bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
        writer.write(answer)
        writer.close()

    plan, tally = replace(SMALL, patience_s=20, odd_every=100_000), Tally()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = Client(1, plan, server.sockets[0].getsockname()[1], tally)
        await client_does(client)
        client._connection.leave()
        await asyncio.sleep(0.01)  # for both ends to close
    return tally


def read_by(answer: bytes) -> Tally:
    """Whole questions, one after the other for a moment; those after the first find a connection that was closed."""

    async def ask(client: Client) -> None:
        await client.ask_until(time.perf_counter() + 0.02, [QUESTION])

    return asyncio.run(played(ask, answer))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_read_whole_however_it_is_cut(size: int) -> None:
    tally = read_by(chunked(WHOLE, size))
    assert (tally.n_answers >= 1, tally.differing) == (True, [])
    assert tally.n_tokens == 3 * tally.n_answers


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (chunked(WHOLE)[:-40], "EOFError"),
        (chunked(WHOLE.removesuffix(DONE)), "before it was done"),
        (chunked(WHOLE + event(text="e")), "where an event was expected"),
        (chunked(b'data: {"error": {"message": "broken"}}\n\n' + DONE), "in the stream: broken"),
        (plain(500, b"{}"), "status 500"),
        (plain(429, b"{}"), "status 429"),
        (b"", "broke off"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(answer: bytes, what: str) -> None:
    tally = read_by(answer)
    assert tally.n_answers == 0
    assert what in tally.errors[0]


@pytest.mark.parametrize(
    "body",
    [
        event(text="bx") + event(text="d", finish_reason="length") + USAGE + DONE,
        event(text="bc", finish_reason="length") + USAGE + DONE,
        event(text="bcd", finish_reason="stop") + USAGE + DONE,
        event(text="bcd", finish_reason="length") + USAGE.replace(b"3", b"2") + DONE,
        event(text="bcd", finish_reason="length") + DONE,
        event(text="bcd", finish_reason="length") + event(text="", finish_reason="length") + USAGE + DONE,
    ],
)
def test_another_text_reason_or_number_of_tokens_differs(body: bytes) -> None:
    tally = read_by(chunked(body))
    assert len(tally.differing) == tally.n_answers >= 1


def test_clients_of_a_server_that_is_gone_stop_and_tell_errors() -> None:
    async def scene() -> Tally:
        async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
        return await ask_until_over(replace(SMALL, seconds=60), port, [QUESTION])

    begun = time.perf_counter()
    tally = asyncio.run(scene())
    assert MOST_ERRORS <= len(tally.errors) <= MOST_ERRORS + SMALL.clients
    assert time.perf_counter() - begun < 50
    gone = replace(LOAD, tally=tally, left={}, code=-9)
    assert [judge_answers(gone, "kernels").held, judge_blocks(gone).held, judge_end(gone).held] == [False, None, False]


def test_what_came_before_a_client_left_is_compared_too() -> None:
    async def leave(client: Client) -> None:
        await client._leave(QUESTION, 1)

    tally = asyncio.run(played(leave, chunked(event(text="x") + WHOLE)))
    assert (tally.n_left, len(tally.differing)) == (1, 1)
    tally = asyncio.run(played(leave, chunked(WHOLE)))
    assert (tally.n_left, tally.differing) == (1, [])


def test_a_refusal_of_another_status_or_without_its_parts_is_none() -> None:
    async def misuse(client: Client) -> None:
        await client._misuse(BAD[0])

    good = b'{"error": {"what": "a", "allowed": "b", "do": "c"}}'
    assert asyncio.run(played(misuse, plain(400, good))).n_refused == 1
    for answer in (plain(200, good), plain(500, good), plain(400, good.replace(b'"c"', b'""'))):
        tally = asyncio.run(played(misuse, answer))
        assert (tally.n_refused, len(tally.not_refused)) == (0, 1)


def test_where_texts_part_is_told() -> None:
    assert difference("abx", "abc") == "from letter 2 on 'x' for 'c'"
    assert difference("ab", "abc") == "from letter 2 on '' for 'c'"


def test_a_connection_is_used_again_until_the_server_closes_it() -> None:
    n_opened = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        n_opened.append(1)
        for closes in (False, True):
            if not await reader.readline():
                break  # the client has left
            await reader.readuntil(b"\r\n\r\n")
            extra = b"Connection: close\r\n" if closes else b""
            writer.write(plain(200, b"{}").replace(b"X\r\n", b"X\r\n" + extra))
        writer.close()
        await writer.wait_closed()

    async def scene() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            connection = Connection(server.sockets[0].getsockname()[1])
            for _ in range(3):
                await connection.ask("/", method="GET")
                assert await connection.whole() == b"{}"
            connection.leave()
            await asyncio.sleep(0.01)

    asyncio.run(scene())
    assert len(n_opened) == 2


def test_the_servers_engine_is_the_one_whose_kernels_are_built_ahead() -> None:
    plan = ServingPlan()
    _, options = parsed(["serve", *plan.words()])
    assert isinstance(options, ServeOptions)
    config = engine_config(options, speculative_config(options, Path()))
    assert config.prefix_cache
    assert config.speculative_config is not None
    [offline, served] = plan.settings()
    assert served == Setting(
        config.speculative_config.num_speculative_tokens, config.max_batch_size, config.session_len
    )
    assert (offline.k, offline.batch) == (0, 1)
    names = {variant.name for variant in needed_variants(Plans(), ["serving"], "sm_90a")}
    assert {"accept_4_4", "accept_1_1", "active_slots_16", "active_slots_1"} <= names


def test_clients_and_seconds_can_be_typed() -> None:
    _, options = parsed(["prove", "serving", "--clients", "7", "--seconds", "2.5"])
    assert isinstance(options, ProveOptions)
    assert (options.parts, options.clients, options.seconds) == (("serving",), 7, 2.5)
    assert PARTS[-1] == "serving", "what takes longest comes last"
