"""Between a prompt's arrival and the launch of its pass a GPU is waited for by nothing, and told what it should be."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tiny_engines import new_tokens

from eagle3core import Engine, EngineConfig, SpeculativeConfig
from eagle3core.step.results import Staging
from lab.pairs import shipped_folder, shipped_pair
from lab.pairs.prompts import prompts_for

pytestmark = pytest.mark.gpu

ABOUT_10_MS = 20_000_000  # clocks


@contextmanager
def waiting_for_the_gpu_fails() -> Iterator[None]:
    """Calls that wait for the GPU raise here, and nowhere after: torch keeps that for the whole process."""
    try:
        with warnings.catch_warnings():  # torch warns that it does not see all of them
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_arrive_as_they_were_though_many_turns_wait_on_the_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    staging, told = Staging(8, device), [torch.zeros(2, 4, dtype=torch.int32, device=device) for _ in range(7)]
    for i, rows in enumerate(told):
        with staging.turn():
            torch.cuda._sleep(ABOUT_10_MS)
            for j, row in enumerate(rows):
                numbers = array("i", [10 * i + j] * 4)
                staging.copy(row, numbers)
                numbers[0] = -1
    assert [rows.tolist() for rows in told] == [[[10 * i + j] * 4 for j in range(2)] for i in range(7)]


@pytest.mark.skipif(
    not (shipped_folder() / "target" / "model.safetensors").is_file(), reason="this checkout has no shipped pair"
)
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_waits_for_the_gpu_until_the_pass_and_its_end_are_launched(k: int | None, temperature: float) -> None:
    pair = shipped_pair()
    spec = None if k is None else SpeculativeConfig(model=str(pair.draft), num_speculative_tokens=k)
    config = EngineConfig(session_len=512, max_batch_size=2, dtype="bfloat16", device="cuda", speculative_config=spec)
    engine = Engine.from_pretrained(pair.target, config)
    prompts = [list(prompt.ids) for prompt in prompts_for(pair.target, limit=4, max_tokens=256)[0]]
    limits = replace(new_tokens(9, ignore_eos=True), temperature=temperature, seed=5 if temperature else None)
    expected = [engine.generate([prompt], limits)[0].token_ids for prompt in prompts]  # all is made on first use
    for prompt, tokens in zip(prompts, expected, strict=True):
        with waiting_for_the_gpu_fails():
            handle = engine.add_request(prompt, limits)
            engine.advance()
        while engine.step():
            pass
        assert handle.token_ids == tokens
