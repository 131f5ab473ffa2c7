"""The shipped target in FP8 on the GPU's kernels: one set of bits at any depth and in any company, in both forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantised_heads import write_in_blocks
from tiny_engines import new_tokens, tokens_of

from eagle3core import Engine, EngineConfig, SpeculativeConfig
from lab.pairs import shipped_folder, shipped_pair
from lab.pairs.prompts import prompts_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (shipped_folder() / "target" / "model.safetensors").is_file(), reason="this checkout has no shipped pair"
    ),
]


@pytest.fixture(scope="module", params=["quantised at load", "stored in blocks"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    shipped = shipped_pair().target
    if request.param == "quantised at load":
        return shipped, {"target_weights": "fp8"}
    return write_in_blocks(shipped, tmp_path_factory.mktemp("fp8") / "target"), {}


def answers(target: tuple[Path, dict[str, Any]], k: int | None, n_slots: int) -> list[list[int]]:
    spec = None if k is None else SpeculativeConfig(model=str(shipped_pair().draft), num_speculative_tokens=k)
    config = EngineConfig(
        session_len=512, max_batch_size=n_slots, dtype="bfloat16", device="cuda", speculative_config=spec, **target[1]
    )
    engine = Engine.from_pretrained(target[0], config)
    assert engine.backend.path == "kernels"
    assert engine.target.weights == "fp8"
    found, _ = prompts_for(shipped_pair().target, limit=12, max_tokens=256)
    return tokens_of(engine.generate([list(prompt.ids) for prompt in found], new_tokens(64, ignore_eos=True)))


def test_tokens_are_the_baselines_at_any_depth_and_in_any_company(target: tuple[Path, dict[str, Any]]) -> None:
    baseline = answers(target, None, 1)
    for k, n_slots in ((None, 8), (1, 8), (3, 1), (3, 3), (7, 8)):
        assert answers(target, k, n_slots) == baseline
