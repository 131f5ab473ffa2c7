"""What a launch cannot do is said before it is tried; what it can runs on the device of its operands."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle3core.errors import BackendUnavailable, InvariantViolated
from eagle3core.kernels import launch
from eagle3core.kernels.card import Variant, parameters

PARAMETERS = parameters("x:in y:out n:i32")


def make_double(isa: Any, *, width: int) -> Any:
    def kernel(x, y, n):
        i = isa.cuda.blockIdx.x * width + isa.cuda.threadIdx.x
        if i < n:
            value = isa.load_f32(x + isa.i64(i) * 4)
            isa.store_f32(y + isa.i64(i) * 4, value + value)

    return kernel


DOUBLE = Variant("double", make_double, {"width": 64}, PARAMETERS, 64)


@pytest.mark.reference
def test_a_launch_with_wrong_operands_is_refused():
    with pytest.raises(InvariantViolated, match=r"\['n', 'z'\] missing or unknown"):
        DOUBLE.launch((1,), x=None, y=None, z=3)


@pytest.mark.reference
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_a_launch_without_a_gpu_says_what_to_do():
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        launch.bind([DOUBLE.launch((1,), x=torch.zeros(4), y=torch.zeros(4), n=4)])


@pytest.mark.reference
def test_the_operands_say_the_device_and_two_of_them_are_refused(monkeypatch):
    class On(torch.Tensor):
        """A tensor that says it lies on another device, as there is no GPU here."""

        @property
        def device(self):
            return self.where

    def on(where: str) -> torch.Tensor:
        tensor = torch.zeros(4).as_subclass(On)
        tensor.where = torch.device(where)
        return tensor

    def double(x, y):
        return DOUBLE.launch((1,), x=x, y=y, n=4)

    assert launch.operands_device([double(None, on("cuda:1")), double(on("cuda:1"), torch.zeros(4))]).index == 1
    assert launch.operands_device([double(None, None)]) is None
    with pytest.raises(InvariantViolated, match="lie on cuda:0, cuda:1"):
        launch.bind([double(on("cuda:0"), on("cuda:0")), double(on("cuda:1"), None)])

    def refused(device=None):
        raise BackendUnavailable(f"asked for {device}", "nothing", "stop here")

    monkeypatch.setattr(launch, "device_arch", refused)  # the target comes from the operands' device
    with pytest.raises(BackendUnavailable, match="asked for cuda:1"):
        launch.bind([double(on("cuda:1"), on("cuda:1"))])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_their_operands_and_leave_the_current_one(gpu):
    results = []
    for name in ("cuda:1", "cuda:0"):
        x = torch.randn(100, device=name)
        y = torch.zeros_like(x)
        bound = launch.bind([DOUBLE.launch((2,), x=x, y=y, n=100)])
        assert torch.cuda.current_device() == 0
        bound()
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(name)
        results.append(torch.equal(y, 2 * x))
    assert results == [True, True]


@pytest.mark.gpu
def test_a_bound_launch_runs_and_can_be_captured(gpu):
    x = torch.randn(100, device="cuda")
    y = torch.zeros_like(x)
    bound = launch.bind([DOUBLE.launch((2,), x=x, y=y, n=100)])
    bound()
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x)


@pytest.mark.gpu
def test_kernels_that_were_loaded_are_not_looked_for_again(gpu, monkeypatch):
    again = replace(DOUBLE, constants={"width": 32}, threads=32)
    launch.load([again], torch.device("cuda"))
    monkeypatch.setattr(launch, "cubin", lambda *wanted: pytest.fail("looked for again"))
    x = torch.randn(100, device="cuda")
    y = torch.zeros_like(x)
    launch.execute([again.launch((4,), x=x, y=y, n=100)])
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x)


@pytest.mark.gpu
def test_a_block_may_use_more_shared_memory_than_the_default(gpu):
    def make_big(isa: Any) -> Any:
        def kernel(x, y, n):
            base = isa.shared_address(isa.cuda.shared.array(0, isa.f32, alignment=128))
            tid = isa.i32(isa.cuda.threadIdx.x)
            isa.shared_store_f32(isa.i32(base + 90_000 + tid * 4), isa.load_f32(x + isa.i64(tid) * 4))
            isa.cuda.syncthreads()
            isa.store_f32(y + isa.i64(tid) * 4, isa.shared_load_f32(isa.i32(base + 90_000 + (63 - tid) * 4)))

        return kernel

    x, y = torch.randn(64, device="cuda"), torch.zeros(64, device="cuda")
    launch.execute([Variant("big", make_big, {}, PARAMETERS, 64, 96_000).launch((1,), x=x, y=y, n=64)])
    torch.cuda.synchronize()
    assert torch.equal(y, x.flip(0))
