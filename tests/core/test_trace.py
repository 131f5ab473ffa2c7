"""Spans nest as documented, taps carry real rows only, and neither changes a token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_engines import Pair, new_tokens, random_prompts, tiny_engine, tokens_of

from eagle3core.trace import DOMAIN, RecordingTrace, TimingTrace, Trace

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
    "rewind": ("EAGLE_TAIL_COMMIT", "commit", "EAGLE::KVCacheRewind"),
}


class SpanLog(Trace):
    """Every span with the spans around it, in order of opening."""

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

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self.open.append(name)
        yield
        self.open.pop()

    def tap(self, name: str, value: torch.Tensor, valid: torch.Tensor | None = None) -> None:
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
    public = {name for path in ENCLOSED.values() for name in path} - {"commit"}
    assert {name: around[name] for name in around if name not in public} == ENCLOSED
    assert all(path[:-1] == around[path[-1]] for path in log.seen), "one span has one place"
    assert public <= set(around)


def test_a_step_opens_its_ranges_in_the_order_of_its_work(pair: Pair) -> None:
    log = SpanLog()
    run(pair, log, k=2, n_new=2)  # prefill and one step
    outermost = [path[0] for path in log.seen if len(path) == 1]
    draft, base = "EagleModule::forward", "BASE_DECODE_STEP"
    prefill = [base, base, draft, draft]  # ten tokens in chunks of eight
    step = [draft, "EAGLE_TREE_MASKS", draft, "EAGLE_TREE_MASKS", "EAGLE_TREE_MASKS", base, "EAGLE_ACCEPT"]
    assert outermost == [*prefill, *step, "EAGLE_TAIL_COMMIT"]


def test_ranges_are_pushed_to_nvtx_and_popped_even_when_work_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    depth, names = [0], []

    def push(attributes: object) -> None:
        depth[0] += 1
        names.append(attributes)

    def pop() -> None:
        depth[0] -= 1

    monkeypatch.setattr(DOMAIN, "push_range", push)
    monkeypatch.setattr(DOMAIN, "pop_range", pop)
    run(pair, Trace())
    assert depth == [0]
    assert len(names) > 20
    with pytest.raises(ZeroDivisionError), Trace().span("broken"):
        _ = 1 / (depth[0] - 1)  # the one range is open here
    assert depth == [0]


def test_taps_are_offered_under_the_pass_they_belong_to(pair: Pair) -> None:
    scopes = Scopes()
    run(pair, scopes, k=3, n_new=2)
    passes = list(dict.fromkeys(name.rpartition("/")[0] for name in scopes.seen))
    assert passes == ["", "prefill", "step0/extend", "step0/chain1", "step0/chain2", "step0/verify", "step0"]


def test_recorded_rows_are_the_sequence_of_one_request(pair: Pair) -> None:
    trace = RecordingTrace()
    (tokens,) = run(pair, trace, k=3, n_new=24, lengths=(10,))
    recorded = trace.tensors
    prompt = random_prompts([10])[0]
    assert recorded["prompt_ids"].tolist() == prompt
    assert recorded["first_token"].tolist() == tokens[:1]
    assert recorded["prefill/target.embed"].shape == (10, 32)
    assert recorded["prefill/target.taps"].shape == (10, 96)
    assert recorded["prefill/target.head"].shape == (1, 6)
    assert recorded["prefill/draft.tokens"].tolist() == prompt[1:]
    assert recorded["prefill/draft.positions"].tolist() == list(range(9))
    assert "prefill/draft.head" not in recorded
    assert recorded["step0/extend/draft.tokens"].tolist() == tokens[:1]
    assert recorded["step0/extend/draft.positions"].tolist() == [9]
    assert torch.equal(recorded["step0/extend/draft.taps"], recorded["prefill/target.taps"][-1:])
    sequence, n_steps = tokens[:1], sum("tree.tokens" in name for name in recorded)
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


def test_every_stage_of_a_step_is_recorded_with_its_width(pair: Pair) -> None:
    trace = RecordingTrace()
    run(pair, trace, k=2, n_new=2)
    stages = {name.removeprefix("step0/chain1/"): t for name, t in trace.tensors.items() if "step0/chain1/" in name}
    widths = {name: tuple(tensor.shape) for name, tensor in stages.items()}
    assert widths == {
        "draft.feedback_in": (1, 32),
        "draft.tokens": (1,),
        "draft.positions": (1,),
        "draft.fc": (1, 32),
        "draft.concat": (1, 64),
        "draft.qkv": (1, 64),
        "draft.rope": (1, 48),
        "draft.attn": (1, 32),
        "draft.mlp": (1, 32),
        "draft.feedback": (1, 32),
        "draft.norm": (1, 32),
        "draft.head": (1, 6),
    }
    extend = {name.removeprefix("step0/extend/") for name in trace.tensors if "step0/extend/" in name}
    assert extend == {name for name in widths if name != "draft.feedback_in"} | {"draft.taps"}
    assert torch.equal(stages["draft.feedback_in"], trace.tensors["step0/extend/draft.feedback"][-1:])
    assert torch.equal(stages["draft.fc"], stages["draft.feedback_in"])


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
