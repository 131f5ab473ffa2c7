"""Plain torch on a GPU: the same tokens in fp64, the same stages in fp32, and nothing left behind."""

from __future__ import annotations

import gc
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from derived_stages import DerivedToo
from precision import allowed_error, largest_error
from random_pairs import write_random_pair
from tiny_engines import (
    Pair,
    accepted_counts,
    is_empty,
    new_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)
from torch import Tensor

from eagle3core.trace import RecordingTrace
from lab.pairs import shipped_folder, shipped_pair
from lab.pairs.prompts import prompts_for
from lab.parity.tokens import run_token_parity

pytestmark = pytest.mark.gpu

INTEGER = ("prompt_ids", "first_token", "tokens", "positions", "parents")
LENGTHS = [3, 9, 1, 17, 30]


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Four layers over 512 tokens, wide enough that every stage has thousands of numbers to compare."""
    directory = tmp_path_factory.mktemp("wide")
    return write_random_pair(directory, n_layers=4, taps=(0, 2, 4), convention="input", eos=[])


@pytest.mark.parametrize("k", [1, 3, 8])
def test_double_precision_on_the_gpu_gives_the_cpus_tokens(pair: Pair, k: int) -> None:
    prompts = random_prompts(LENGTHS)
    expected = tokens_of(tiny_engine(pair, None).generate(prompts, new_tokens(24)))
    assert tokens_of(tiny_engine(pair, None, device="cuda").generate(prompts, new_tokens(24))) == expected
    engine = tiny_engine(pair, k, device="cuda")
    responses = engine.generate(prompts, new_tokens(24))
    assert tokens_of(responses) == expected
    assert {0, 1} <= accepted_counts(responses)
    assert is_empty(engine)


def test_slots_refilled_in_the_middle_of_a_run_change_no_token_on_the_gpu(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path, vocab=24, draft_vocab=5, eos=[3])
    prompts = random_prompts([5, 40, 1, 12, 3, 3], n_vocab=24)
    limits = [new_tokens(n) for n in (1, 20, 2, 11, 7, 20)]
    expected = tokens_of(tiny_engine(pair, None).generate(prompts, limits))
    engine = tiny_engine(pair, 4, device="cuda", max_batch_size=2)
    assert tokens_of(engine.generate(prompts, limits)) == expected
    assert is_empty(engine)


def recorded(pair: Pair, dtype: str, device: str) -> dict[str, Tensor]:
    """Every stage of a prompt's prefill and first steps."""
    trace = RecordingTrace()
    engine = tiny_engine(pair, 3, dtype=dtype, device=device, session_len=160, prefill_chunk=32, trace=trace)
    engine.runner.replay_by(DerivedToo())
    engine.runner.n_behind = 0  # a step enqueued ahead of the last result would be recorded too, with every slot empty
    engine.generate(random_prompts([100], n_vocab=512), new_tokens(24))
    return trace.tensors


def by_stage(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating-point values of every stage, all passes together, flattened.

    `dtype` is the engine's: what is derived in fp64 from its numbers errs as they do.
    """
    stages: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            stages[name.rpartition("/")[2]].append(tensor.flatten().to(dtype))
    return {stage: torch.cat(parts) for stage, parts in stages.items()}


def test_single_precision_stages_on_the_gpu_obey_the_2x_rule(wide_pair: Pair) -> None:
    truth, plain = recorded(wide_pair, "float64", "cpu"), recorded(wide_pair, "float32", "cpu")
    ours = recorded(wide_pair, "float32", "cuda")
    assert ours.keys() == plain.keys() == truth.keys()
    for name, tensor in ours.items():
        if name.endswith(INTEGER):
            assert torch.equal(tensor, truth[name]), name
            assert torch.equal(plain[name], truth[name]), name
    exact, usual = by_stage(truth, torch.float64), by_stage(plain, torch.float32)
    failed = {
        stage: (largest_error(value, exact[stage]), allowed_error(usual[stage], exact[stage]))
        for stage, value in by_stage(ours, torch.float32).items()
        if not largest_error(value, exact[stage]) <= allowed_error(usual[stage], exact[stage])
    }
    assert len(exact) >= 20
    assert failed == {}


def test_an_engine_gives_its_memory_back(pair: Pair) -> None:
    tiny_engine(pair, 2, device="cuda").generate([[1, 2, 3]], new_tokens(4))  # libraries allocate for good here
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = tiny_engine(pair, 3, device="cuda", session_len=512)
    held = torch.cuda.memory_allocated() - before
    plan = engine.memory_plan
    assert held >= plan.kv_bytes + plan.weight_bytes
    engine.generate(random_prompts(LENGTHS), new_tokens(16))
    assert torch.cuda.memory_allocated() - before == held, "a run leaves no tensor behind"
    del engine
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_the_engine_chooses_the_gpu_by_itself_and_says_which(pair: Pair) -> None:
    backend = tiny_engine(pair, 2, device="auto").backend
    assert backend.device.type == "cuda"
    assert backend.reason == f"CUDA device {torch.cuda.get_device_name()}"
    assert 0 < backend.free_bytes <= torch.cuda.get_device_properties(0).total_memory


def test_memory_that_torch_keeps_for_later_counts_as_free(pair: Pair) -> None:
    backend, n_bytes = tiny_engine(pair, 2, device="auto").backend, 1 << 30

    def kept() -> int:
        """What torch kept, which is given back by asking; other processes of the GPU are in both numbers."""
        free = torch.cuda.mem_get_info()[0]
        return backend.free_bytes - free

    kept()
    held = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    assert abs(kept()) < n_bytes // 8, "what is in use is not free"
    del held  # to torch's allocator, not to the driver
    assert abs(kept() - n_bytes) < n_bytes // 8


@pytest.mark.skipif(
    not (shipped_folder() / "target" / "model.safetensors").is_file(), reason="this checkout has no shipped pair"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_shipped_pair_diverges_in_near_ties_alone(dtype: str) -> None:
    shipped = shipped_pair()
    prompts, _ = prompts_for(shipped.target, limit=8, max_tokens=256)
    report = run_token_parity(
        shipped.target,
        shipped.draft,
        prompts=[list(prompt.ids) for prompt in prompts],
        dtype=dtype,
        device="cuda",
        ks=(3,),
        max_new_tokens=64,
    )
    assert report.passed, report.verdict
