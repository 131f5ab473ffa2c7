"""The engine on the GPU's kernels with the shipped pair: one set of bits at any depth and in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engines import new_tokens, tokens_of
from torch import Tensor

from eagle3core import Engine, EngineConfig, SpeculativeConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.trace import RecordingTrace, Trace
from eagle3core.weights import pack_checkpoints
from lab.pairs import shipped_folder, shipped_pair
from lab.pairs.prompts import prompts_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (shipped_folder() / "target" / "model.safetensors").is_file(), reason="this checkout has no shipped pair"
    ),
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found, _ = prompts_for(shipped_pair().target, limit=12, max_tokens=256)
    return [list(prompt.ids) for prompt in found]


def engine(k: int | None, *, trace: Trace | None = None, **changes: Any) -> Engine:
    pair = shipped_pair()
    spec = None if k is None else SpeculativeConfig(model=str(pair.draft), num_speculative_tokens=k)
    settings = {"session_len": 512, "max_batch_size": 8, "dtype": "bfloat16", "device": "cuda", **changes}
    return Engine.from_pretrained(pair.target, EngineConfig(**settings, speculative_config=spec), trace=trace)


@pytest.fixture(scope="module")
def baseline(prompts: list[list[int]]) -> list[list[int]]:
    made = engine(None, max_batch_size=1)
    assert made.backend.path == "kernels"
    return tokens_of(made.generate(prompts, new_tokens(64, ignore_eos=True)))


@pytest.mark.parametrize("k", [None, *range(1, 8)])
@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_tokens_are_the_baselines_at_any_depth_and_in_any_company(
    prompts: list[list[int]], baseline: list[list[int]], k: int | None, n_slots: int
) -> None:
    made = engine(k, max_batch_size=n_slots)
    assert tokens_of(made.generate(prompts, new_tokens(64, ignore_eos=True))) == baseline


def logits_of(k: int | None, prompt: list[int], n: int) -> Tensor:
    """Bits of the logits `[n, V]` that chose the tokens."""
    trace = RecordingTrace()
    [response] = engine(k, trace=trace, max_batch_size=1).generate([prompt], new_tokens(n, ignore_eos=True))
    kept = [step.n_accepted + 1 for step in response.req_metrics.steps] if k else [1] * (n - 1)
    rows = [trace.tensors[f"step{i}/verify/target.head"][:count] for i, count in enumerate(kept)]
    return torch.cat([trace.tensors["prefill/target.head"], *rows])[:n].view(torch.int16)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_logits_of_accepted_rows_are_the_baselines_bits(prompts: list[list[int]], k: int) -> None:
    assert torch.equal(logits_of(k, prompts[0], 48), logits_of(None, prompts[0], 48))


@pytest.mark.parametrize("k", [None, 3])
def test_a_run_allocates_nothing_on_the_device(prompts: list[list[int]], k: int | None) -> None:
    made = engine(k)
    made.generate(prompts[:3], new_tokens(4))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for request in range(3):
        made.generate([prompts[request]], new_tokens(40))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_plain_torch_on_the_gpu_gives_nearly_the_same_tokens(
    prompts: list[list[int]], baseline: list[list[int]]
) -> None:
    checkpoint = load_target(shipped_pair().target, dtype=torch.bfloat16)
    target, _ = pack_checkpoints(checkpoint, None, device=torch.device("cuda"), block=64, packs=False)
    plain = Engine(target, None, EngineConfig(session_len=512, dtype="bfloat16", device="cuda"))
    theirs = tokens_of(plain.generate(prompts, new_tokens(64, ignore_eos=True)))
    agree = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 64)
        for x, y in zip(baseline, theirs, strict=True)
    ]
    assert sum(n == 64 for n in agree) >= len(agree) // 2, agree


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("trace", [Trace(), RecordingTrace()], ids=["whole", "staged"])
def test_an_engine_on_a_gpu_that_is_not_current_gives_the_same_tokens(
    prompts: list[list[int]], baseline: list[list[int]], trace: Trace
) -> None:
    pair, other = shipped_pair(), torch.device("cuda:1")
    checkpoint = load_target(pair.target, dtype=torch.bfloat16)
    head = load_draft(pair.draft, checkpoint.geometry, dtype=torch.bfloat16)
    target, draft = pack_checkpoints(checkpoint, head, device=other, block=64)
    spec = SpeculativeConfig(model=str(pair.draft), num_speculative_tokens=3)
    config = EngineConfig(session_len=512, max_batch_size=3, dtype="bfloat16", device="cuda", speculative_config=spec)
    made = Engine(target, draft, config, trace=trace)
    assert tokens_of(made.generate(prompts, new_tokens(64, ignore_eos=True))) == baseline
    assert torch.cuda.current_device() == 0
