"""What the kernels can run they are built for; what they cannot is said before anything is built, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3core.config import EngineConfig
from eagle3core.step.kernel_limits import why_plain_torch
from lab.pairs.planted import PlantedGeometry, find_geometry
from lab.probes.proofs.plans import shapes_of
from lab.probes.proofs.subject import Setting

pytestmark = pytest.mark.reference


def reason(geometry: PlantedGeometry, **changes: int) -> str | None:
    """Why the kernels cannot run a pair in bf16."""
    return why_plain_torch(geometry.target, geometry.draft, EngineConfig(**changes), torch.bfloat16)  # type: ignore[arg-type]


def with_vocabulary(n: int) -> PlantedGeometry:
    """The 8B pair over `n` tokens, of which its draft knows the usual few."""
    made = find_geometry("llama-3.1-8b")
    return replace(made, target=replace(made.target, vocab_size=n), draft=replace(made.draft, vocab_size=n))


def test_programs_that_read_prompts_in_wide_chunks_are_built() -> None:
    geometry = find_geometry("llama-3.1-8b")
    assert reason(geometry, prefill_chunk=4096) is None
    subject = shapes_of(geometry, "sm_90a")
    subject = replace(subject, settings={**subject.settings, "prefill_chunk": 4096})
    runner = subject.runner(Setting(3, 2, 8192))
    assert [shape.rows for shape in runner.chunks] == [64, 128, 256, 512, 1024, 2048, 4096]
    scratch = runner.emit.scratch
    assert scratch is not None
    assert scratch[0].nbytes > 80 << 20


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.2-3b", "qwen3-8b", "qwen3-4b"])
def test_the_named_geometries_run_on_the_kernels(name: str) -> None:
    assert reason(find_geometry(name)) is None


def test_a_vocabulary_beyond_the_kernels_is_refused_with_its_size() -> None:
    assert reason(with_vocabulary(262144)) is None
    assert reason(with_vocabulary(262145)) == "a vocabulary has 262145 tokens, the kernels choose among 262144"
    shapes_of(with_vocabulary(262144), "sm_90a").runner(Setting(2, 1, 256))
