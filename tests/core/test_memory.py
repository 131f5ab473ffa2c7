"""The memory plan is what gets allocated, and what does not fit is refused with what would."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from device_engines import BY_MEANING, device_runner, write_nano_pair
from tiny_engines import Pair, engine_config, new_tokens, tiny_engine

from eagle3core import ConfigError, Engine, EngineConfig, SpeculativeConfig, backend, engine, memory
from eagle3core.backend import Backend, choose_backend
from eagle3core.geometry import BlockGeometry, DraftGeometry, RopeGeometry, TargetGeometry
from eagle3core.loading import runners
from eagle3core.memory import GRAPH_BYTES, PASS_BYTES, MemoryPlan, plan_memory
from eagle3core.step.sizes import SPAN

pytestmark = pytest.mark.reference

BLOCK = BlockGeometry(
    hidden_size=128,
    intermediate_size=256,
    n_heads=8,
    n_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeGeometry(),
)
TARGET = TargetGeometry(BLOCK, n_layers=5, vocab_size=99, max_position_embeddings=4096)
DRAFT = DraftGeometry(
    dataclasses.replace(BLOCK, n_kv_heads=4),
    target_hidden_size=128,
    vocab_size=99,
    draft_vocab_size=99,
    taps=(0, 2, 4),
    has_embedding=False,
    has_head=True,
)


class FixedBackend(Backend):
    """A device with a given amount of free memory."""

    @property
    def free_bytes(self) -> int:
        return 10_000_000


def plan(*, speculate: bool, **changes: float) -> MemoryPlan:
    """The plan of 100 + 6 (or + 1) tokens a sequence in blocks of 16, three sequences, 16-bit."""
    spec = SpeculativeConfig(model="draft", num_speculative_tokens=3) if speculate else None
    settings = {"session_len": 100, "block_size": 16, "prefill_chunk": 32, "max_batch_size": 3, **changes}
    config = EngineConfig(speculative_config=spec, **settings)  # type: ignore[arg-type]
    device = FixedBackend(torch.device("cpu"), "test")
    return plan_memory(TARGET, DRAFT if speculate else None, config, device, dtype=torch.bfloat16, weight_bytes=12345)


def test_the_plan_is_the_one_counted_by_hand() -> None:
    made = plan(speculate=True)
    assert made.blocks_per_sequence == 7  # ceil((100 + 6) / 16)
    assert made.target_kv_bytes == 3 * 7 * 16 * (2 * 5 * 2 * 16) * 2  # slots, blocks, tokens, K and V rows, bytes
    assert made.draft_kv_bytes == 3 * 7 * 16 * (2 * 1 * 4 * 16) * 2
    assert made.kv_bytes == 215_040 + 86_016
    assert (made.weight_bytes, made.allowed_kv_bytes) == (12345, 7_500_000)


def test_plain_decoding_plans_no_draft() -> None:
    made = plan(speculate=False)
    assert (made.blocks_per_sequence, made.draft_kv_bytes) == (7, 0)  # ceil((100 + 1) / 16)


def test_the_plan_is_told_in_mebibytes() -> None:
    assert str(plan(speculate=True)) == (
        "weights 0.0 MiB, target KV 0.2 MiB, draft KV 0.1 MiB (21 blocks in each, up to 7 a sequence), KV limit 7.2 MiB"
    )


def test_the_kernels_path_leaves_room_for_its_graphs() -> None:
    """More than this device has, so the refusal shows what was counted."""
    device = FixedBackend(torch.device("cpu"), "test", "kernels", "sm_90a")
    for chunk, n_narrower in ((64, 0), (512, 3), (2048, 5)):
        config, n_bytes = EngineConfig(prefill_chunk=chunk), GRAPH_BYTES + n_narrower * PASS_BYTES
        with pytest.raises(ConfigError, match=f"graphs of {n_bytes} bytes"):
            plan_memory(TARGET, None, config, device, dtype=torch.bfloat16, weight_bytes=12345)
    made = MemoryPlan(0, 0, 0, 1, 0, scratch_bytes=2**20, graph_bytes=GRAPH_BYTES)
    assert str(made).endswith("scratch 1.0 MiB, graphs 80.0 MiB")


def test_slots_whose_longest_sessions_do_not_fit_together_share_the_blocks_that_fit() -> None:
    assert plan(speculate=True, max_batch_size=74).n_blocks == 74 * 7
    made = plan(speculate=True, max_batch_size=75)
    assert made.n_blocks == 7_500_000 // 14_336 == 523 < 75 * 7  # bytes of a block: 16 (320 + 128) 2
    assert made.kv_bytes == 523 * 14_336


def test_too_long_a_session_is_refused_when_not_even_one_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(speculate=True, session_len=20000)
    assert caught.value.what == "the KV caches would take 17934336 bytes for one session with session_len 20000"
    assert caught.value.allowed == "at most 7500000 bytes (cache_max_entry_count 0.75 of free memory)"
    assert caught.value.remedy == "lower session_len: not even one sequence fits"


def test_a_smaller_share_allows_less_and_gives_a_smaller_pool() -> None:
    assert plan(speculate=True, cache_max_entry_count=0.5).allowed_kv_bytes == 5_000_000
    pools = [plan(speculate=True, max_batch_size=99, cache_max_entry_count=share).n_blocks for share in (0.75, 0.9)]
    assert pools == [523, 627]


def test_a_number_of_blocks_is_taken_as_it_is_or_refused_with_what_fits() -> None:
    assert plan(speculate=True, cache_blocks=5).kv_bytes == 5 * 14_336
    assert plan(speculate=True, cache_blocks=523).n_blocks == 523
    with pytest.raises(ConfigError, match="take 7512064 bytes with cache_blocks 524") as caught:
        plan(speculate=True, cache_blocks=524)
    assert caught.value.remedy == "set cache_blocks to 523 or less, or leave it out"


def tensor_bytes(value: object) -> int:
    """Bytes of every tensor inside a value of dataclasses, tuples and mappings; views count each time."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(part) for part in value.values())
    if isinstance(value, tuple):
        return sum(tensor_bytes(part) for part in value)
    if dataclasses.is_dataclass(value):
        return sum(tensor_bytes(getattr(value, field.name)) for field in dataclasses.fields(value))
    return 0


@pytest.mark.parametrize("k", [None, 4])
def test_what_is_planned_is_what_is_allocated(pair: Pair, k: int | None) -> None:
    engine = tiny_engine(pair, k, max_batch_size=2)
    state, made = engine.runner.state, engine.memory_plan
    assert state.k.nbytes + state.v.nbytes == made.target_kv_bytes
    drafted = 0 if state.draft is None else state.draft.k.nbytes + state.draft.v.nbytes
    assert drafted == made.draft_kv_bytes
    assert (drafted == 0) == (k is None)
    assert state.tables.shape == (2, made.blocks_per_sequence)
    assert tensor_bytes(state) - made.kv_bytes == made.scratch_bytes
    files = [pair[0], pair[1]] if k else [pair[0]]
    stored = sum((directory / "model.safetensors").stat().st_size for directory in files)
    assert 2 * stored * 0.8 < made.weight_bytes < 2 * stored, "fp64 of fp32 files, less their headers"
    engine.generate([[1, 2, 3]], new_tokens(3))


def test_an_engine_over_packed_weights_plans_for_the_kernels_that_will_run_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here, so the runner it would make is one by meaning, of the same tensors."""
    runner = device_runner(write_nano_pair(tmp_path), None, BY_MEANING, order=None)
    runner = type(runner)(
        runner.target, None, dataclasses.replace(runner.sizes, span=SPAN), arch="sm_90a", replayer=BY_MEANING
    )
    config = EngineConfig(session_len=128, max_batch_size=2, dtype="bfloat16", device="cpu", prefill_chunk=64)
    for module in (runners, memory):
        monkeypatch.setattr(module, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(engine, "new_runner", lambda target, draft, config, n_blocks, trace, only_tuned: runner)
    made = Engine(runner.target, None, config)
    assert (made.backend.path, made.backend.path_reason) == ("kernels", "kernels for sm_90a")
    assert made.memory_plan.graph_bytes == GRAPH_BYTES
    scratch = runner.emit.scratch
    assert scratch is not None
    others = tensor_bytes(runner.state) - made.memory_plan.kv_bytes
    assert made.memory_plan.scratch_bytes == others + scratch[0].nbytes
    given = Engine(runner.target, None, config, runner=runner)
    assert given.backend.path == "torch", "a runner that was given says itself what it runs by"


def test_weights_read_into_a_cpus_memory_are_counted_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory shrinks with every look, as it does while weights are read."""
    left = iter(range(2**30, 0, -(2**20)))
    monkeypatch.setattr(backend, "available_host_bytes", lambda: next(left))
    made = tiny_engine(pair, 4).memory_plan
    assert made.allowed_kv_bytes == int((2**30 - made.weight_bytes - made.scratch_bytes) * 0.75)


def test_free_memory_is_some_of_what_the_machine_has(pair: Pair) -> None:
    free = choose_backend(engine_config(pair, None)).free_bytes
    assert 2**20 < free < 2**50
