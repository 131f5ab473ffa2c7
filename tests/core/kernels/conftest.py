"""Executors for the card tests: the emulator on the CPU, or the GPU if there is one."""

import pytest
import torch

from eagle3core.kernels import launch


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and other workers share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpu():
    """(device, arch, executor) of the CUDA device; skips with the reason where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    device = torch.device("cuda")

    def execute(launches):
        launch.execute(launches)
        torch.cuda.synchronize()

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield device, launch.device_arch(), execute
    torch.backends.cuda.matmul.allow_tf32 = before
