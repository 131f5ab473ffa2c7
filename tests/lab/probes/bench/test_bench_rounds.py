"""Floors are those counted by hand, rounds take turns, and a step is timed with every slot in use."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle3core.geometry import ExpertsGeometry
from eagle3core.metrics import RequestMetrics, StepRecord
from eagle3core.request import Response
from lab.pairs.planted import GEOMETRIES
from lab.probes.bench import run as bench_run
from lab.probes.bench.floors import Floor, draft_weight_bytes, step_floor
from lab.probes.bench.rounds import WARM_STEPS, full_window, interleave
from lab.probes.ceilings import known_gb_per_s

pytestmark = pytest.mark.reference
K = 3


def test_floors_of_the_8b_geometry_are_those_counted_by_hand() -> None:
    geometry = GEOMETRIES["llama-3.1-8b"]
    # Bytes in bf16: weights without the table 15.009 GB, cache 131072 a token; head 849 MB first, 749 MB later.
    for context, batch, base_gb, step_gb, ratio in (
        (512, 1, 15.08, 17.43, 1.156),
        (2048, 1, 15.28, 17.65, 1.155),
        (32768, 1, 19.30, 22.05, 1.142),
        (16384, 4, 23.60, 26.75, 1.134),
    ):
        floor = step_floor(geometry.target, geometry.draft, k=3, batch=batch, cached=context, itemsize=2)
        assert floor.base_bytes / 1e9 == pytest.approx(base_gb, abs=0.005)
        assert floor.step_bytes / 1e9 == pytest.approx(step_gb, abs=0.01)
        assert floor.step_over_base == pytest.approx(ratio, abs=0.001)
        assert floor.largest_speedup(3.0) == pytest.approx(3 / ratio, abs=0.01)
    plain = step_floor(geometry.target, geometry.draft, k=0, batch=1, cached=512, itemsize=2)
    assert plain.step_bytes == plain.base_bytes
    assert plain.ms(4578.0) == pytest.approx(3.29, abs=0.01)


def test_the_floor_of_a_draft_in_fp8_is_that_counted_by_hand() -> None:
    geometry = GEOMETRIES["llama-3.1-8b"]
    draft, at = geometry.draft, {"k": 3, "batch": 1, "cached": 512, "itemsize": 2}
    bf16, fp8 = (step_floor(geometry.target, draft, **at, draft_weights=w) for w in ("as_stored", "fp8"))
    maps = 3 * ((6144 + 2 * 14336) * 4096 + 4096 * 6144 + 4096 * 4096 + 4096 * 14336 + 32000 * 4096) + 12288 * 4096
    rows = 3 * (6144 + 4096 + 28672 + 4096 + 32000) + 4096
    assert bf16.base_bytes == fp8.base_bytes
    assert bf16.step_bytes - fp8.step_bytes == maps - 4 * rows
    assert fp8.step_over_base == pytest.approx(1.078, abs=0.001)


def test_the_floor_of_caches_in_fp8_is_that_counted_by_hand() -> None:
    geometry = GEOMETRIES["llama-3.1-8b"]
    at = {"k": 3, "batch": 4, "cached": 16384, "itemsize": 2}
    bf16 = step_floor(geometry.target, geometry.draft, **at)
    target = step_floor(geometry.target, geometry.draft, **at, cache_dtype="fp8")
    both = step_floor(geometry.target, geometry.draft, **at, cache_dtype="fp8", draft_cache_dtype="fp8")
    a_layer = 4 * 16384 * 2 * 8 * 128  # values of keys and values in a layer
    assert bf16.base_bytes - target.base_bytes == 32 * a_layer
    assert target.base_bytes == both.base_bytes
    assert target.step_bytes - both.step_bytes == 3 * a_layer


def test_the_floor_of_a_target_in_fp8_is_that_counted_by_hand() -> None:
    geometry = GEOMETRIES["llama-3.1-8b"]
    target, at = geometry.target, {"k": 3, "batch": 1, "cached": 512, "itemsize": 2}
    bf16, fp8 = (step_floor(target, geometry.draft, **at, target_weights=w) for w in ("as_stored", "fp8"))
    values = 32 * (6144 + 4096 + 28672 + 14336) * 4096 + 128256 * 4096
    rows = 32 * (6144 + 4096 + 28672 + 4096) + 128256
    assert bf16.base_bytes - fp8.base_bytes == values - 4 * rows
    assert bf16.step_bytes - fp8.step_bytes == values - 4 * rows
    both = step_floor(target, geometry.draft, **at, draft_weights="fp8", target_weights="fp8")
    assert both.ms(4578.0) == pytest.approx(1.913, abs=0.002)
    # A head that the draft shares is the target's, unless it is the token table, which stays as it is.
    shared = replace(geometry.draft, has_head=False)
    for tied, size in ((False, 1), (True, 2)):
        floors = [
            step_floor(replace(target, tie_word_embeddings=tied), shared, **{**at, "k": k}, target_weights="fp8")
            for k in (1, 2)
        ]
        heads = [floor.stages["draft.head"] for floor in floors]
        read = shared.draft_vocab_size * (4096 * size + (0 if tied else 4))
        assert heads[1] - heads[0] == read + 2 * 4096  # and the gain of the norm before it


def test_the_floor_of_experts_in_fp8_is_that_counted_by_hand() -> None:
    target = GEOMETRIES["qwen3-30b-a3b"].target
    at = {"k": 0, "batch": 1, "cached": 512, "itemsize": 2, "target_weights": "fp8"}
    expert = 3 * 2048 * 768 + 4 * (2 * 768 + 2048)  # a byte a value, and a scale a row
    plain = step_floor(target, None, **at)
    beside = 48 * 2 * (128 * 2048 + 2048)  # routers and norms stay in bf16
    assert plain.stages["target.mlp"] == 48 * 8 * expert + beside
    every = step_floor(target, None, **{**at, "batch": 4096})
    assert every.stages["target.mlp"] == pytest.approx(48 * 128 * expert + beside, rel=1e-6)
    # What is in 4 bits stays so.
    oss = GEOMETRIES["gpt-oss-120b"].target
    stored, kept = (step_floor(oss, None, **{**at, "target_weights": w}).stages for w in ("as_stored", "fp8"))
    assert stored["target.mlp"] == kept["target.mlp"]


def test_a_tied_table_is_read_as_the_head_and_a_shared_head_by_the_draft() -> None:
    geometry = GEOMETRIES["nano"]
    target, draft = geometry.target, geometry.draft
    floor = step_floor(target, draft, k=2, batch=1, cached=10, itemsize=2)
    tied = step_floor(replace(target, tie_word_embeddings=True), draft, k=2, batch=1, cached=10, itemsize=2)
    assert tied.base_bytes == floor.base_bytes
    shared = step_floor(target, replace(draft, has_head=False), k=2, batch=1, cached=10, itemsize=2)
    assert shared.step_bytes == floor.step_bytes
    assert draft_weight_bytes(replace(draft, has_head=False), 2) == draft_weight_bytes(draft, 2)


def test_of_experts_a_step_reads_those_that_its_rows_choose() -> None:
    geometry = GEOMETRIES["llama-3.1-8b"]
    experts = ExpertsGeometry(n=128, n_chosen=4, intermediate_size=2880)
    target = replace(geometry.target, block=replace(geometry.target.block, experts=experts))
    one = 3 * 2880 * 4096 * 2 * 32  # an expert of all 32 layers, in bf16

    def floor(k: int, batch: int) -> Floor:
        return step_floor(target, geometry.draft, k=k, batch=batch, cached=512, itemsize=2)

    plain, spec = floor(0, 1), floor(3, 1)
    assert (plain.base_bytes, plain.more_experts) == (plain.step_bytes, 0)
    assert spec.base_bytes == plain.base_bytes
    assert spec.more_experts == spec.stages["target.mlp"] - plain.stages["target.mlp"]
    for batch, distinct in ((1, 4.0), (4, 15.3), (16, 51.0)):  # of 128 where all are alike likely
        read = floor(0, batch).stages["target.mlp"] - 2 * 32 * (4096 + 128 * 4096)  # beside norms and routers
        assert read / one == pytest.approx(distinct, abs=0.05)


def test_layers_with_a_window_read_their_last_positions() -> None:
    geometry = GEOMETRIES["nano"]
    target = geometry.target
    alternate = replace(target, windows=tuple(128 * (i % 2) for i in range(target.n_layers)))
    whole, near = (step_floor(each, None, k=0, batch=2, cached=1000, itemsize=2) for each in (target, alternate))
    n_windowed, block = target.n_layers // 2, target.block
    spared = n_windowed * 2 * (1000 - 128) * 2 * block.n_kv_heads * block.head_dim * 2
    assert whole.base_bytes - near.base_bytes == spared


# -- rounds


def test_modes_take_turns_and_the_order_turns_around() -> None:
    seen: list[str] = []
    runs = {name: (lambda name=name: seen.append(name) or len(seen)) for name in "ab"}
    told: list[int] = []
    found = interleave(runs, rounds=2, warmup=1, on_round=told.append)
    assert seen == ["b", "a", "a", "b", "b", "a"]
    assert found == {"a": [3, 6], "b": [4, 5]}
    assert told == [-1, 0, 1]


def response(*committed: int) -> Response:
    """A request whose steps committed so many tokens each."""
    steps = tuple(StepRecord(0, K, n - 1, n, False) for n in committed)
    return Response("", [0] * (1 + sum(committed)), 4, "length", RequestMetrics(None, steps))


def test_the_full_window_ends_before_the_first_request_does() -> None:
    ends = [float(i * i) for i in range(20)]
    window = full_window([response(*[2] * 10), response(*[3] * 7)], ends, 2)
    assert window is not None
    assert window.n_steps == 6 - WARM_STEPS
    assert window.seconds == ends[5] - ends[WARM_STEPS - 1]
    assert window.n_tokens == window.n_steps * 5
    assert full_window([response(*[2] * 10)] * 3, ends, 2) is None, "one waited for a slot"
    assert full_window([response(2, 2, 2)], ends, 1) is None, "too short to tell"
    plain = Response("", [0] * 9, 4, "length", RequestMetrics())
    counted = full_window([plain], ends, 1)
    assert counted is not None
    assert counted.n_tokens == counted.n_steps == 8 - 1 - WARM_STEPS


# -- peers


def test_floors_are_of_the_gpu_that_ran_and_one_that_none_is_known_of_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here, so the driver's word and the measured rate are given."""
    cuda, names = torch.device("cuda"), ["NVIDIA H200 NVL"]
    measured = [SimpleNamespace(way="copy", gb_per_s=900.0), SimpleNamespace(way="read", gb_per_s=700.0)]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[-1])
    monkeypatch.setattr(bench_run, "memory_ceilings", lambda *a, **k: measured)
    source = SimpleNamespace(card="planted nano")
    assert bench_run.read_ceiling(cuda) == known_gb_per_s("NVIDIA H200")
    assert bench_run.about(source, cuda, 4578.0) == "planted nano; read ceiling 4578 GB/s"  # type: ignore[arg-type]
    names.append("NVIDIA L40S")
    assert known_gb_per_s(names[-1]) is None
    assert bench_run.read_ceiling(cuda) == 700.0
    told = bench_run.about(source, cuda, 700.0)  # type: ignore[arg-type]
    assert told.endswith("read ceiling 700 GB/s, as this run measured it: none is known of NVIDIA L40S")
