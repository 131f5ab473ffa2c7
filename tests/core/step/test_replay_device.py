"""Graphs and events belong to the GPU of the models, whichever GPU is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from eagle3core.kernels.card import Call
from eagle3core.step import replay
from eagle3core.step.program import Stage
from eagle3core.step.replay import GraphReplayer
from eagle3core.step.results import ResultQueue
from eagle3core.trace import Trace

pytestmark = pytest.mark.reference


class TwoGpus:
    """What torch does of two GPUs, the first of them current, as there is none here.

    Attributes:
        current: index of the current one. seen: what happened, with the GPU it happened on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.seen: list[tuple[str, int]] = []
        replay._capture_stream.cache_clear()
        fakes = {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.note("replay")),
            "Event": lambda **_: SimpleNamespace(record=lambda stream=None: self.note("event", stream)),
            "Stream": lambda index: SimpleNamespace(index=index),
            "current_device": lambda: self.current,
            "current_stream": lambda index=None: SimpleNamespace(index=self.current if index is None else index),
            "device": self.device,
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(replay, "bind", lambda launches: lambda: self.note("kernel"))

    def note(self, what: str, stream: SimpleNamespace | None = None) -> None:
        self.seen.append((what, self.current if stream is None else stream.index))

    @contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        before, self.current = self.current, device if isinstance(device, int) else device.index
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: object, stream: SimpleNamespace | None = None) -> Iterator[None]:
        """Without a stream on that of the first GPU, which is where torch's own lies once that GPU has captured."""
        with self.device(0 if stream is None else stream.index):
            self.note("capture")
            yield


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoGpus]:
    yield TwoGpus(monkeypatch)
    replay._capture_stream.cache_clear()


def stage(gpus: TwoGpus) -> Stage:
    """A kernel, and a call that is plain torch."""
    kernel: tuple = (object(),)
    return Stage("accept", (Call("a", {}, lambda: None, kernel), Call("b", {}, lambda: gpus.note("torch"))))


def test_a_program_is_captured_on_the_gpu_of_its_models(gpus: TwoGpus) -> None:
    for index in (1, 0):
        gpus.seen.clear()
        GraphReplayer(torch.device("cuda", index)).whole((stage(gpus),))
        assert gpus.seen == [("capture", index), ("kernel", index), ("torch", index)]
    gpus.seen.clear()
    GraphReplayer(torch.device("cuda", 1)).staged((stage(gpus),))(Trace())
    assert gpus.seen[:3] == [("capture", 1), ("kernel", 1), ("torch", 1)]
    assert gpus.current == 0


def test_a_result_is_awaited_on_the_gpu_that_writes_it(gpus: TwoGpus) -> None:
    queue = ResultQueue(torch.zeros(2, 1, 5, dtype=torch.int32), torch.device("cuda", 1))
    queue.send(1, None)
    assert gpus.seen == [("event", 1)]
