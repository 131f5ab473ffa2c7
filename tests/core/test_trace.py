"""Spans nest as documented, taps carry real rows only, and neither changes a token.

Some stages are never formed; what takes their place is `lab.parity`'s to read (docs/engine.md). Where a test is about
such a stage, the same engine is recorded a second time by it, and both recordings have to agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_engines import Pair, new_tokens, random_prompts, tiny_engine, tokens_of
from torch import Tensor

from eagle3core.trace import DOMAIN, RecordingTrace, StagedTrace, TimingTrace, Trace
from lab.parity.recording import record_from

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
LOGITS = 64  # columns of a vocabulary of six: the head's weights are padded to a multiple of this


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
    assert {name: around[name] for name in around if name not in public} == ENCLOSED
    assert all(path[:-1] == around[path[-1]] for path in log.seen), "one span has one place"
    assert public <= set(around)


def test_a_step_opens_its_ranges_in_the_order_of_its_work(pair: Pair) -> None:
    log = SpanLog()
    run(pair, log, k=2, n_new=2)  # prefill and one step
    outermost = [path[0] for path in log.seen if len(path) == 1]
    draft, base, masks = "EagleModule::forward", "BASE_DECODE_STEP", "EAGLE_TREE_MASKS"
    accept, commit = "EAGLE_ACCEPT", "EAGLE_TAIL_COMMIT"
    chunk = [masks, base, draft]
    prefill = [*chunk, *chunk, base, accept, commit]  # ten tokens in chunks of eight, then the first token
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
    assert (log.seen, log.taps) == ([], ["prompt_ids", "first_token"])


def test_taps_are_offered_under_the_pass_they_belong_to(pair: Pair) -> None:
    scopes = Scopes()
    run(pair, scopes, k=3, n_new=2)
    passes = list(dict.fromkeys(name.rpartition("/")[0] for name in scopes.seen))
    assert passes == ["", "prefill", "step0/extend", "step0/chain1", "step0/chain2", "step0", "step0/verify"]


def test_recorded_rows_are_the_sequence_of_one_request(pair: Pair) -> None:
    trace = RecordingTrace()
    prompts = random_prompts([10])
    engine = tiny_engine(pair, 3, trace=trace, session_len=128)
    ((tokens,), (prompt,)) = tokens_of(engine.generate(prompts, new_tokens(24))), prompts
    n_steps = sum("tree.tokens" in name for name in trace.tensors)
    recorded = record_from(engine, prompts, k=3, steps=n_steps)[0].tensors
    for name, tensor in trace.tensors.items():
        kept = recorded[name]
        if name.endswith(".head"):
            assert torch.all(tensor[:, kept.shape[1] :] == -torch.inf), "what pads the vocabulary is never the largest"
            tensor = tensor[:, : kept.shape[1]]
        if name.endswith("accept.tokens"):
            assert tensor.tolist() == [*kept.tolist(), *[-1] * (4 - len(kept))]
            tensor = tensor[: len(kept)]
        assert torch.equal(tensor, kept), name
    assert recorded["prompt_ids"].tolist() == prompt
    assert recorded["first_token"].tolist() == tokens[:1]
    assert recorded["prefill/target.embed"].shape == (10, 32)
    assert recorded["prefill/target.taps"].shape == (10, 96)
    assert recorded["prefill/target.head"].shape == (1, 6)
    assert recorded["prefill/draft.tokens"].tolist() == prompt[1:]
    assert recorded["prefill/draft.positions"].tolist() == list(range(9))
    assert "prefill/draft.head" not in recorded
    assert torch.equal(recorded["prefill/draft.taps"], recorded["prefill/target.taps"][:-1])
    assert recorded["step0/extend/draft.tokens"].tolist() == tokens[:1]
    assert recorded["step0/extend/draft.positions"].tolist() == [9]
    assert torch.equal(recorded["step0/extend/draft.taps"], recorded["prefill/target.taps"][-1:])
    sequence = tokens[:1]
    for r in range(n_steps):
        assert recorded[f"step{r}/tree.tokens"][0] == sequence[-1]
        assert recorded[f"step{r}/tree.parents"].tolist() == [-1, 0, 1, 2]
        sequence += recorded[f"step{r}/accept.tokens"].tolist()
        last_entry, parent = recorded[f"step{r}/extend/draft.positions"][-1], recorded[f"step{r}/extend/draft.feedback"]
        for level in (1, 2):
            chain = f"step{r}/chain{level}"
            assert recorded[f"{chain}/draft.positions"].tolist() == [int(last_entry) + level]
            assert recorded[f"{chain}/draft.tokens"].tolist() == [int(recorded[f"step{r}/tree.tokens"][level])]
            assert torch.equal(recorded[f"{chain}/draft.feedback_in"], parent[-1:])
            parent = recorded[f"{chain}/draft.feedback"]
        if r + 1 < n_steps:  # the next extend pass reads exactly what this step committed
            n_new = len(recorded[f"step{r}/accept.tokens"])
            assert torch.equal(recorded[f"step{r + 1}/extend/draft.tokens"], recorded[f"step{r}/accept.tokens"])
            assert torch.equal(
                recorded[f"step{r + 1}/extend/draft.taps"], recorded[f"step{r}/verify/target.taps"][:n_new]
            )
    assert sequence[: len(tokens)] == tokens
    assert any(len(recorded[f"step{r}/extend/draft.tokens"]) > 1 for r in range(n_steps)), "some drafts were accepted"


def test_steps_are_numbered_from_0_in_every_run(pair: Pair) -> None:
    engine = tiny_engine(pair, 2)
    names = []
    for _ in range(2):
        engine.trace = trace = RecordingTrace()
        engine.generate(random_prompts([10]), new_tokens(6))
        names.append(list(trace.tensors))
    assert names[0] == names[1]
    assert "step0/tree.tokens" in names[0]


def widths_of(tensors: dict[str, Tensor], pass_name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the stages of a pass."""
    named = ((name.rpartition("/"), tensor) for name, tensor in tensors.items())
    return {stage: tuple(tensor.shape) for (around, _, stage), tensor in named if around == pass_name}


def test_every_stage_of_a_step_is_recorded_with_its_width(pair: Pair) -> None:
    trace = RecordingTrace()
    engine = tiny_engine(pair, 2, trace=trace)
    engine.generate(random_prompts([10]), new_tokens(2))
    formed = {
        "draft.tokens": (1,),
        "draft.fc": (1, 32),
        "draft.concat": (1, 64),
        "draft.feedback": (1, 32),
        "draft.head": (1, LOGITS),
    }
    assert widths_of(trace.tensors, "step0/chain1") == formed
    assert widths_of(trace.tensors, "step0/extend") == {**formed, "draft.taps": (1, 96)}
    assert torch.equal(trace.tensors["step0/chain1/draft.fc"], trace.tensors["step0/extend/draft.feedback"][-1:])
    (recording,) = record_from(engine, random_prompts([10]), k=2, steps=1)
    derived = {
        "draft.feedback_in": (1, 32),
        "draft.positions": (1,),
        "draft.qkv": (1, 64),
        "draft.rope": (1, 48),
        "draft.attn": (1, 32),
        "draft.norm": (1, 32),
    }
    every = {**formed, **derived, "draft.head": (1, 6)}
    assert widths_of(recording.tensors, "step0/chain1") == every
    extend = {name: width for name, width in every.items() if name != "draft.feedback_in"}
    assert widths_of(recording.tensors, "step0/extend") == {**extend, "draft.taps": (1, 96)}


def test_padding_of_a_batch_is_not_recorded() -> None:
    trace = RecordingTrace()
    value = torch.arange(12.0).view(2, 3, 2)
    valid = torch.tensor([[True, False, True], [False, False, True]])
    with trace.scope("step0"), trace.scope("extend"):
        trace.tap("draft.fc", value, valid)
        trace.tap("all", value)
    assert trace.tensors["step0/extend/draft.fc"].tolist() == [[0, 1], [4, 5], [10, 11]]
    assert trace.tensors["step0/extend/all"].shape == (6, 2)
    value.zero_()
    assert float(trace.tensors["step0/extend/draft.fc"].max()) == 11.0, "a record is a copy"


def test_later_chunks_of_a_pass_follow_the_earlier_ones(pair: Pair) -> None:
    whole, chunked = RecordingTrace(), RecordingTrace()
    prompts = random_prompts([19])
    tiny_engine(pair, 2, trace=whole, prefill_chunk=32).generate(prompts, new_tokens(1))
    tiny_engine(pair, 2, trace=chunked, prefill_chunk=4).generate(prompts, new_tokens(1))
    assert whole.tensors.keys() == chunked.tensors.keys()
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(chunked.tensors[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


def test_a_scope_ends_when_work_fails() -> None:
    trace = RecordingTrace()
    with pytest.raises(ZeroDivisionError), trace.scope("step0"):
        _ = 1 / 0
    trace.tap("after", torch.ones(1, 1))
    assert list(trace.tensors) == ["after"]


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
