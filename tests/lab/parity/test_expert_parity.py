"""Targets with experts, stage by stage against transformers; and bugs in their experts, each named where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_pairs import MXFP4, write_random_pair
from rings import slow_but, slow_from
from tiny_engines import random_prompts

from lab.parity import faults, run_stage_parity
from lab.parity.faults.of_experts import EXPERT_FAULTS

pytestmark = pytest.mark.reference

Pair = tuple[Path, Path]
N_VOCAB = 200
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"family": "qwen3_moe"},
    "gpt_oss in MXFP4": {"family": "gpt_oss", "ffn": 96, "quantization_config": MXFP4},
    "qwen3_moe, other settings": {"family": "qwen3_moe", "norm_topk_prob": False, "mlp_only_layers": [1], "heads": 6},
}
PROMPTS = random_prompts([70, 9, 33], n_vocab=N_VOCAB)


@pytest.fixture(scope="module", params=slow_but(["gpt_oss in MXFP4"], KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_random_pair(
        tmp_path_factory.mktemp("experts"), n_layers=3, taps=(0, 1, 2), vocab=N_VOCAB, draft_vocab=100, seed=3,
        eos=[], **KINDS[request.param],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", slow_from(1, ["float32", "bfloat16"]))
def test_every_stage_holds_and_the_routers_are_among_them(pair: Pair, dtype: str) -> None:
    report = run_stage_parity(*pair, prompts=PROMPTS, dtype=dtype, device="cpu", k=2, steps=2, prefill_chunk=64)
    assert report.passed, report.verdict
    names = [cell.stage for cell in report.cells if (cell.prompt, cell.pass_name) == (0, "step1/verify")]
    first = names.index("target.2.attn")
    assert names[first : first + 4] == ["target.2.attn", "target.2.router", "target.2.experts", "target.2.mlp"]


def test_scales_of_another_group_of_mxfp4_are_named_at_their_stage(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_layers": 3, "taps": (0, 1, 2), "vocab": N_VOCAB, "draft_vocab": 100, "eos": []}
    made = write_random_pair(tmp_path, **sizes, seed=3, **KINDS["gpt_oss in MXFP4"])
    fault = faults.FAULTS["rolled_group_scales"]
    first = run_stage_parity(*made, prompts=PROMPTS[1:2], k=2, steps=1, fault=fault.name).first_divergent
    assert first is not None
    assert (first.stage, first.kind) == (fault.stage, fault.kind), first


@pytest.mark.parametrize("name", slow_from(2, [fault.name for fault in EXPERT_FAULTS]))
def test_a_bug_in_the_experts_is_named_at_its_stage(pair: Pair, name: str) -> None:
    fault = faults.FAULTS[name]
    first = run_stage_parity(*pair, prompts=PROMPTS[1:2], k=2, steps=1, fault=name).first_divergent
    assert first is not None, f"{name} was not found"
    assert (first.stage, first.kind) == (fault.stage, fault.kind), first
