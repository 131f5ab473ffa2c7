"""Stages of a batch, kept by request: the same as of each request alone, whatever stood beside it or before it."""

from __future__ import annotations

import pytest
import torch
from agreeing_pairs import write_agreeing_pair

from eagle3core.step.program import Tap
from lab.parity.by_request import NOBODY, RequestTrace
from lab.parity.recording import PairUnderTest, Recording, record

pytestmark = pytest.mark.reference

LENGTHS = (70, 5, 130, 9, 33)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairUnderTest:
    return PairUnderTest(*write_agreeing_pair(tmp_path_factory.mktemp("agreeing")), "float64")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(512, (length,), generator=random).tolist() for length in LENGTHS]


def recorded(pair: PairUnderTest, prompts: list[list[int]], slots: int, chunk: int) -> list[Recording]:
    return record(pair, prompts, k=4, steps=2, slots=slots, prefill_chunk=chunk)


def test_requests_side_by_side_leave_what_each_leaves_alone(pair: PairUnderTest, prompts: list[list[int]]) -> None:
    alone = [recorded(pair, [prompt], slots=1, chunk=512)[0] for prompt in prompts]
    together = recorded(pair, prompts, slots=2, chunk=64)  # two slots for five requests, and chunks of one block
    assert len(together) == len(prompts)
    for one, other in zip(alone, together, strict=True):
        assert set(one.tensors) == set(other.tensors)
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(other.tensors[name], tensor, msg=lambda words, at=name: f"{at}: {words}")


def test_steps_are_counted_by_request_and_no_more_are_kept_than_asked_for(
    pair: PairUnderTest, prompts: list[list[int]]
) -> None:
    for one, prompt in zip(recorded(pair, prompts, slots=2, chunk=128), prompts, strict=True):
        passes = {name.split("/")[0] for name in one.tensors if "/" in name}
        assert passes == {"prefill", "step0", "step1"}
        assert one.tensors["prompt_ids"].tolist() == prompt
        assert len(one.tensors["prefill/target.embed"]) == len(prompt)
        assert len(one.tensors["prefill/draft.tokens"]) == len(prompt) - 1
        assert one.tensors["step0/chain3/draft.head"].shape == (1, 128)


def test_a_row_goes_to_the_request_that_owns_its_place_and_padding_to_nobody() -> None:
    trace, value = RequestTrace(steps=1), torch.arange(6)
    for owner, prompt in ((7, [1, 2]), (9, [3, 4])):
        trace.tap("prompt_ids", torch.tensor([prompt]))
        with trace.scope("prefill"):
            trace.keep("target.head", Tap(value[:1]), [owner])
    with trace.scope("step5"):
        trace.keep("draft.fc", Tap(value, torch.tensor([0, -1, 3, 3, 8, 9]), "extend"), [9, NOBODY, 7])
    with trace.scope("step6"):
        trace.keep("draft.fc", Tap(value[:1], None, "extend"), [7])
    first, second = (one["step0/extend/draft.fc"].tolist() for one in trace.requests)
    assert (first, second) == ([4, 5], [0])
    assert not any(name.startswith("step1") for one in trace.requests for name in one)
