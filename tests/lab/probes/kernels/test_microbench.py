"""The microbenchmarks time the real ops and refuse what they cannot run."""

from __future__ import annotations

import json

import pytest
import torch

from eagle3core.errors import BackendUnavailable, ConfigError
from lab.options.kernels import BookkeepingOptions
from lab.probes.kernels import bookkeeping as microbench

pytestmark = pytest.mark.reference

BENCHMARKS = (
    microbench.benchmark_kv_cache_rewind,
    microbench.benchmark_accept_draft_tokens,
    microbench.benchmark_pack_accepted_paths,
)


@pytest.mark.parametrize("measure", BENCHMARKS)
def test_a_microbenchmark_gives_time_per_call_and_calls_per_second(measure) -> None:
    result = measure(batch=3, device="cpu", calls=4)
    assert (result.batch, result.device, result.calls) == (3, "cpu", 4)
    assert result.avg_ms_per_call > 0
    assert result.ops_per_second == pytest.approx(1e3 / result.avg_ms_per_call)


def test_the_command_prints_one_json_line_an_op(capsys: pytest.CaptureFixture[str]) -> None:
    microbench.main(BookkeepingOptions(device="cpu", batch=2, calls=2))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["op"] for row in rows] == ["block_table", "accept", "pack_paths"]


@pytest.mark.parametrize("measure", BENCHMARKS)
def test_a_device_without_a_name_or_a_batch_without_sequences_is_refused(measure) -> None:
    with pytest.raises(ConfigError, match="'cpu' or 'cuda'"):
        measure(device="tpu")
    with pytest.raises(ConfigError, match="batch is 0"):
        measure(batch=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused_with_the_remedy() -> None:
    with pytest.raises(BackendUnavailable, match="device='cpu'"):
        microbench.benchmark_pack_accepted_paths(device="cuda")


def test_a_longer_rewind_than_the_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="rewind is 9"):
        microbench.benchmark_kv_cache_rewind(rewind=9, length=8)


@pytest.mark.gpu
@pytest.mark.parametrize("measure", BENCHMARKS)
def test_on_cuda_a_microbenchmark_launches_the_kernel_and_times_it_on_the_device(measure, gpu, monkeypatch) -> None:
    from eagle3core.kernels import launch

    bound, bind = [], launch.bind
    monkeypatch.setattr(launch, "bind", lambda launches: bound.append([*launches]) or bind(launches))
    result = measure(batch=5, device="cuda", calls=200)
    names = {item.variant.name for launches in bound for item in launches}
    assert names
    assert all(name.startswith(result.op) for name in names)
    assert (result.device, result.batch, result.calls) == ("cuda", 5, 200)
    assert result.avg_ms_per_call > 0
    assert result.ops_per_second == pytest.approx(1e3 / result.avg_ms_per_call)


@pytest.mark.gpu
def test_the_command_prints_one_json_line_an_op_on_cuda(gpu, capsys: pytest.CaptureFixture[str]) -> None:
    microbench.main(BookkeepingOptions(device="cuda", batch=3, calls=20))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["op"], row["device"]) for row in rows] == [
        ("block_table", "cuda"), ("accept", "cuda"), ("pack_paths", "cuda"),
    ]  # fmt: skip
