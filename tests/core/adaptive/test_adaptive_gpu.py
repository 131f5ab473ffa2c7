"""On the GPU's kernels, with the shipped pair: any depth in any step gives plain decoding's bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_engines import new_tokens, tokens_of

from eagle3core import Engine, EngineConfig, SpeculativeConfig
from eagle3core.adaptive import Choice, History, Moment, StepCurve
from lab.acceptance.shapes import shape_named
from lab.pairs import shipped_folder, shipped_pair
from lab.pairs.prompts import prompts_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (shipped_folder() / "target" / "model.safetensors").is_file(), reason="this checkout has no shipped pair"
    ),
]

N_TOKENS = 64
TREE = shape_named("dynamic-8/3/4").settings
WAYS: dict[str, dict[str, Any]] = {"chain": {"num_speculative_tokens": 4}, "tree": dict(TREE)}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found, _ = prompts_for(shipped_pair().target, limit=12, max_tokens=256)
    return [list(prompt.ids) for prompt in found]


def engine(way: str | None, n_slots: int) -> Engine:
    spec = None if way is None else SpeculativeConfig(model=str(shipped_pair().draft), adaptive=True, **WAYS[way])
    config = EngineConfig(session_len=512, max_batch_size=n_slots, dtype="bfloat16", device="cuda",
                          speculative_config=spec)  # fmt: skip
    made = Engine.from_pretrained(shipped_pair().target, config)
    assert made.backend.path == "kernels", made.backend.path_reason
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_any_depth_in_any_step_gives_plain_decodings_tokens(prompts: list[list[int]], way: str, n_slots: int) -> None:
    alone = tokens_of(engine(None, 1).generate(prompts, new_tokens(N_TOKENS, ignore_eos=True)))
    made, draw = engine(way, n_slots), random.Random(n_slots)
    assert made.book.depths is not None

    def by_chance(curve: StepCurve, history: History, moment: Moment) -> Choice:
        return Choice(draw.choice(moment.depths) if draw.random() < 0.5 else 0, "by chance", 1.0, 0.0, 1.0)

    made.book.depths.choose = by_chance
    assert tokens_of(made.generate(prompts, new_tokens(N_TOKENS, ignore_eos=True))) == alone


def test_steps_are_timed_before_the_first_request_and_by_themselves(prompts: list[list[int]]) -> None:
    made = engine("chain", 4)
    assert made.book.depths is not None
    base = made.book.depths.curve._base
    assert {depth for depth, _ in base} == {0, 1, 2, 3, 4}
    assert all(us > 0 for us in base.values())
    responses = made.generate(prompts, new_tokens(N_TOKENS, ignore_eos=True))
    assert made.book.depths.curve._seen
    assert sum(made.book.depths.counts.values()) > 0
    assert len(responses) == len(prompts)


def test_a_step_of_any_depth_allocates_nothing_on_the_device(prompts: list[list[int]]) -> None:
    made = engine("chain", 3)
    made.generate(prompts[:3], new_tokens(4))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    made.generate(prompts[:3], new_tokens(40))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
