"""Cubins are found again by what they are made from; what a launch cannot do is said before it is tried."""

import json
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


def make_same(isa: Any, *, width: int) -> Any:
    def kernel(x, y, n):
        i = isa.cuda.blockIdx.x * width + isa.cuda.threadIdx.x
        if i < n:
            isa.store_f32(y + isa.i64(i) * 4, isa.load_f32(x + isa.i64(i) * 4))

    return kernel


DOUBLE = Variant("double", make_double, {"width": 64}, PARAMETERS, 64)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv(launch.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(launch.CUBINS_VARIABLE, str(tmp_path / "ahead"))
    return tmp_path / "cache", tmp_path / "ahead"


@pytest.mark.compiled
def test_a_cubin_is_compiled_once_and_then_found(folders, monkeypatch):
    cache, _ = folders
    code, about = launch.cubin(DOUBLE, "sm_90a")
    assert code[:4] == b"\x7fELF"
    assert about["arch"] == "sm_90a"
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(launch, "compile_variant", lambda *a: pytest.fail("compiled again"))
    assert launch.cubin(DOUBLE, "sm_90a") == (code, about)


@pytest.mark.compiled
def test_cubins_built_ahead_are_used_and_not_built_twice(folders, monkeypatch):
    cache, ahead = folders
    told = []
    assert launch.build_cubins([DOUBLE], "sm_120", ahead, tell=told.append) == 1
    assert "registers" in told[0]
    monkeypatch.setattr(launch, "compile_variant", lambda *a: pytest.fail("compiled again"))
    assert launch.build_cubins([DOUBLE], "sm_120", ahead) == 0
    assert launch.cubin(DOUBLE, "sm_120")[1]["variant"] == "double"
    assert not cache.exists()


@pytest.mark.compiled
def test_a_half_written_cubin_is_never_taken(folders):
    cache, _ = folders
    cache.mkdir()
    name = f"double.sm_90a.{launch.digest(DOUBLE, 'sm_90a')}"
    (cache / f"{name}.cubin").write_bytes(b"torn")  # the description, written last, is missing
    code, _ = launch.cubin(DOUBLE, "sm_90a")
    assert code[:4] == b"\x7fELF"
    assert json.loads((cache / f"{name}.json").read_text())["spill_bytes"] == 0


@pytest.mark.reference
def test_a_digest_changes_with_everything_that_shapes_the_code():
    others = [
        replace(DOUBLE, constants={"width": 128}),
        replace(DOUBLE, threads=128),
        replace(DOUBLE, blocks_per_sm=2),
        replace(DOUBLE, parameters=parameters("x:in y:out n:i64")),
        replace(DOUBLE, make=make_same),  # another factory of this file
    ]
    digests = {launch.digest(v, "sm_90a") for v in (DOUBLE, *others)} | {launch.digest(DOUBLE, "sm_100")}
    assert len(digests) == 7


@pytest.mark.reference
def test_a_digest_covers_the_sibling_files_a_kernel_is_made_from(tmp_path, monkeypatch):
    from eagle3core.kernels.gemm import ring as gemm_ring

    read = []
    original = type(tmp_path).read_bytes
    monkeypatch.setattr(type(tmp_path), "read_bytes", lambda self: read.append(self.name) or original(self))
    launch.source_digest.__wrapped__(gemm_ring)
    assert {"ptx.py", "gemm_ring.py", "gemm_epilogue.py"} <= set(read)
    assert not {"card.py", "emulator.py", "launch.py"} & set(read)


@pytest.mark.reference
def test_a_launch_with_wrong_operands_is_refused():
    with pytest.raises(InvariantViolated, match=r"\['n', 'z'\] missing or unknown"):
        DOUBLE.launch((1,), x=None, y=None, z=3)


@pytest.mark.reference
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_a_launch_without_a_gpu_says_what_to_do():
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        launch.bind([DOUBLE.launch((1,), x=torch.zeros(4), y=torch.zeros(4), n=4)])


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
