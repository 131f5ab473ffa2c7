"""Spans nest as documented, taps are offered under their pass, and neither changes a token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_engines import Pair, new_tokens, random_prompts, tiny_engine, tokens_of
from torch import Tensor

from eagle3core.trace import DOMAIN, RecordingTrace, StagedTrace, TimingTrace, Trace

pytestmark = pytest.mark.reference

ENCLOSED = {
    "draft.fc": ("EagleModule::forward",),
    "draft.qkv": ("EagleModule::forward", "EAGLE_DRAFT_ATTENTION_FMHA"),
    "draft.attn": ("EagleModule::forward", "EAGLE_DRAFT_ATTENTION_FMHA"),
    "draft.mlp": ("EagleModule::forward", "EAGLE_DRAFT_FFN"),
    "draft.head": ("EagleModule::forward", "EAGLE_DRAFT_LM_HEAD"),
    "tree.grow": ("EAGLE_TREE_MASKS",),
    "tree.masks": ("EAGLE_TREE_MASKS",),
    "target.embed": ("BASE_DECODE_STEP",),
    "target.0.attn": ("BASE_DECODE_STEP",),
    "target.0.mlp": ("BASE_DECODE_STEP",),
    "target.1.attn": ("BASE_DECODE_STEP",),
    "target.1.mlp": ("BASE_DECODE_STEP",),
    "target.head": ("BASE_DECODE_STEP",),
    "accept": ("EAGLE_ACCEPT",),
    "commit": ("EAGLE_TAIL_COMMIT",),
    "rewind": ("EAGLE_TAIL_COMMIT", "EAGLE::KVCacheRewind"),
}


class SpanLog(Trace):
    """Every span with the spans around it, in order of opening."""

    is_detailed = True

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with super().span(name):
            self.open.append(name)
            self.seen.append(tuple(self.open))
            yield
            assert self.open.pop() == name


class Scopes(Trace):
    """Where each tap was offered."""

    is_detailed = True

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self.open.append(name)
        yield
        self.open.pop()

    def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
        self.seen.append("/".join([*self.open, name]))


OF_THE_START = [("start.weights",), ("start.compile",)]  # before any prompt, in no range of a step


def run(
    pair: Pair, trace: Trace, *, k: int | None = 2, n_new: int = 6, lengths: tuple[int, ...] = (10,)
) -> list[list[int]]:
    """Tokens of prompts of `lengths` decoded under `trace`."""
    return tokens_of(tiny_engine(pair, k, trace=trace).generate(random_prompts(list(lengths)), new_tokens(n_new)))


def test_every_span_lies_in_the_public_ranges_that_the_table_names(pair: Pair) -> None:
    log = SpanLog()
    run(pair, log)
    assert log.open == []
    around = {path[-1]: path[:-1] for path in log.seen}
    public = {name for path in ENCLOSED.values() for name in path}
    assert {name: around[name] for name in around if name not in public and (name,) not in OF_THE_START} == ENCLOSED
    assert all(path[:-1] == around[path[-1]] for path in log.seen), "one span has one place"
    assert public <= set(around)


def test_a_step_opens_its_ranges_in_the_order_of_its_work(pair: Pair) -> None:
    log = SpanLog()
    run(pair, log, k=2, n_new=2)  # prefill and one step
    assert log.seen[: len(OF_THE_START)] == OF_THE_START
    outermost = [path[0] for path in log.seen[len(OF_THE_START) :] if len(path) == 1]
    draft, base, masks = "EagleModule::forward", "BASE_DECODE_STEP", "EAGLE_TREE_MASKS"
    accept, commit = "EAGLE_ACCEPT", "EAGLE_TAIL_COMMIT"
    # Ten tokens in chunks of eight; the draft reads the last of them after the first token.
    prefill = [masks, base, draft, masks, base, base, accept, commit, draft]
    # Rows are placed, then levels drafted; the last level's choice and the tree's tokens share a range.
    step = [masks, draft, masks, draft, masks, base, accept, commit]
    assert outermost == [*prefill, *step]


def test_ranges_are_pushed_to_nvtx_and_popped_even_when_work_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    depth, names = [0], []

    def push(attributes: object) -> None:
        depth[0] += 1
        names.append(attributes)

    def pop() -> None:
        depth[0] -= 1

    monkeypatch.setattr(DOMAIN, "push_range", push)
    monkeypatch.setattr(DOMAIN, "pop_range", pop)
    run(pair, StagedTrace())
    assert depth == [0]
    assert len(names) > 20
    with pytest.raises(ZeroDivisionError), Trace().span("broken"):
        _ = 1 / (depth[0] - 1)  # the one range is open here
    assert depth == [0]


def test_a_range_around_a_stage_that_fails_is_closed(pair: Pair) -> None:
    class Failing(SpanLog):
        def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
            if name == "draft.head":
                raise ZeroDivisionError

        @contextmanager
        def span(self, name: str) -> Iterator[None]:
            self.open.append(name)
            try:
                yield
            finally:
                assert self.open.pop() == name

    log = Failing()
    with pytest.raises(ZeroDivisionError):
        run(pair, log)
    assert log.open == []


def test_a_trace_that_asks_for_no_detail_gets_programs_as_a_whole(pair: Pair) -> None:
    class Coarse(SpanLog):
        is_detailed = False

        def __init__(self) -> None:
            super().__init__()
            self.taps: list[str] = []

        def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
            self.taps.append(name)

    log = Coarse()
    run(pair, log)
    assert (log.seen, log.taps) == (OF_THE_START, ["prompt_ids", "first_token"])


def test_taps_are_offered_under_the_pass_they_belong_to(pair: Pair) -> None:
    scopes = Scopes()
    run(pair, scopes, k=3, n_new=2)
    passes = list(dict.fromkeys(name.rpartition("/")[0] for name in scopes.seen))
    assert passes == ["", "prefill", "step0/extend", "step0/chain1", "step0/chain2", "step0", "step0/verify"]


@pytest.mark.parametrize("k", [None, 3])
def test_tracing_changes_no_token(pair: Pair, k: int | None) -> None:
    lengths = (5, 12)
    plain = run(pair, Trace(), k=k, n_new=12, lengths=lengths)
    assert run(pair, RecordingTrace(), k=k, n_new=12, lengths=lengths) == plain
    assert run(pair, TimingTrace(torch.device("cpu")), k=k, n_new=12, lengths=lengths) == plain


def test_time_is_added_up_by_span_and_an_outer_span_holds_its_inner_ones() -> None:
    trace = TimingTrace(torch.device("cpu"))
    for _ in range(2):
        with trace.span("outer"), trace.span("inner"):
            time.sleep(0.003)
    assert trace.calls == {"outer": 2, "inner": 2}
    assert 6000 <= trace.total_us["inner"] <= trace.total_us["outer"] < 1e6


def test_the_timed_spans_of_a_run_are_those_that_were_opened(pair: Pair) -> None:
    log, timing = SpanLog(), TimingTrace(torch.device("cpu"))
    run(pair, log)
    run(pair, timing)
    names = [path[-1] for path in log.seen]
    assert timing.calls == {name: names.count(name) for name in names}
    assert all(us > 0 for us in timing.total_us.values())
