"""What every test needs: one thread a process, rings counted aloud, GPU tests skipped with their reason."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads

import pytest
import torch
from hypothesis import HealthCheck, settings
from rings import ring_counts

if TYPE_CHECKING:
    from eagle3core.kernels.card import Launch
    from lab.probes.proofs.subject import Subject

torch.set_num_threads(1)
# Shared cores make single examples slow at random, so time is bounded by the number of examples instead.
settings.register_profile(
    "lab", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lab")


def reason_without_gpu() -> str | None:
    """Why tests of the gpu ring cannot run here; None when they can."""
    if torch.cuda.is_available():
        return None
    return "no CUDA device: torch is a CPU build" if torch.version.cuda is None else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; skip the gpu ring where there is no GPU."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # the others stay in their order
    reason = reason_without_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and lists of tests make next to no garbage, and looking for it takes longer the more there is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.set_threshold(10_000, 20, 20)  # a test of an engine makes thousands of objects, all freed at once
        gc.enable()


seen: set[Path] = set()  # files of which a test has begun in this process


def pytest_collection_finish() -> None:
    """Leave what the imports made out of all later looks for garbage: it stays, and is most of what there is."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Random tensors differ between tests and repeat between runs, in any order and on any worker.

    Before the first test of a file what earlier ones imported and cached is set aside as well: a measurement looks for
    garbage between its rounds, which would go through all of it.
    """
    if item.path not in seen:
        seen.add(item.path)
        gc.collect()
        gc.freeze()
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that says how much of each ring ran, and why the rest did not."""
    terminalreporter.write_line(f"rings: {'; '.join(ring_counts(terminalreporter.stats)) or 'none'}")


@pytest.fixture(scope="module")
def nano_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair on disk that the kernels take: two layers of head size 64, its draft right about half the time."""
    from device_engines import write_nano_pair  # not every test needs the engine

    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5)


@pytest.fixture(scope="module")
def nano_kernels(nano_pair: tuple[Path, Path]) -> Subject:
    """That pair on the kernels' path, as proofs take it."""
    from proof_subjects import nano_subject

    return nano_subject(nano_pair)


@pytest.fixture
def gpu() -> Iterator[tuple[torch.device, str, Callable[..., None]]]:
    """(device, arch, executor) of the CUDA device; skips with the reason where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    from eagle3core.kernels import launch  # not every test needs the driver

    device = torch.device("cuda")

    def execute(launches: Sequence[Launch]) -> None:
        launch.execute(launches)
        torch.cuda.synchronize()

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield device, launch.device_arch(), execute
    torch.backends.cuda.matmul.allow_tf32 = before
