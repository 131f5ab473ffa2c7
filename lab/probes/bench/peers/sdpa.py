"""Torch's scaled-dot-product attention in every form that can serve a decode step, and the fastest at a shape.

No mask: at one query a sequence none is needed; at more the result is a bound, as every query sees every key.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.errors import RunFailed
from lab.probes.bench.clocks import synchronise

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """The fastest form at a shape.

    Attributes:
        name: form and backend, e.g. "flash, heads folded into rows".
        attend: `q: [B, T, H, D]`, `k, v: [B, K, S, D]` to `[B, T, H, D]`.
        times_us: of every form that ran.
        refused: forms that torch would not run, with its reason.
    """

    name: str
    attend: Attend
    times_us: dict[str, float]
    refused: dict[str, str]


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query heads share key heads inside SDPA."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True).transpose(1, 2)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The query heads of a key head become further query rows."""
    batch, n_rows, n_heads, size = q.shape
    n_kv = k.shape[1]
    rows = q.view(batch, n_rows, n_kv, n_heads // n_kv, size).permute(0, 2, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(rows.reshape(batch, n_kv, -1, size), k, v)
    back = mixed.view(batch, n_kv, n_heads // n_kv, n_rows, size).permute(0, 3, 1, 2, 4)
    return back.reshape(batch, n_rows, n_heads, size)


def fastest(q: Tensor, k: Tensor, v: Tensor, *, calls: int = 20) -> Choice:
    """The form that takes least time at this shape, on this device, in this run.

    Raises:
        RunFailed: torch refused every form.
    """
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    forms: dict[str, Attend] = {}
    for label, form in (("grouped heads", grouped), ("heads folded into rows", folded)):
        for backend in BACKENDS if q.is_cuda else ("math",):
            name = f"{backend}, {label}"
            forms[name] = _with(BACKENDS[backend], form)
            try:
                times[name] = _time_us(forms[name], q, k, v, calls)
            except RuntimeError as error:
                refused[name] = str(error).split("\n", 1)[0]
    if not times:
        raise RunFailed(
            f"torch runs no attention for q {tuple(q.shape)}, k {tuple(k.shape)}: {refused}",
            "one of " + ", ".join(forms),
            "use another dtype or shape",
        )
    best = min(times, key=lambda name: times[name])
    return Choice(best, forms[best], times, refused)


def _with(backend: SDPBackend, form: Attend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return form(q, k, v)

    return attend


def _time_us(attend: Attend, q: Tensor, k: Tensor, v: Tensor, calls: int) -> float:
    """Median over calls inside one graph each on a GPU, so that launch time does not decide."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains at length why a backend will not do; the error says enough
        attend(q, k, v)
    if not q.is_cuda:
        return _median_us(lambda: attend(q, k, v), q.device, 3)
    replay = captured(lambda: attend(q, k, v))
    return _median_us(replay, q.device, calls)


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """`call` as a CUDA graph; call it to replay.

    A workspace that cuBLAS got before the capture would be in the graph but not the graph's: `torch.compile` frees all
    workspaces when it records graphs of its own, and a replay would then write into memory that is someone else's.
    """
    new_stream: Any = torch.cuda.Stream
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # workspaces and autotuning happen outside the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    forget_workspaces: Any = torch._C._cuda_clearCublasWorkspaces
    forget_workspaces()
    with torch.cuda.graph(graph):
        call()
    forget_workspaces()
    return graph.replay


def _median_us(call: Callable[[], object], device: torch.device, calls: int) -> float:
    samples = []
    for _ in range(calls):
        synchronise(device)
        start = time.perf_counter_ns()
        call()
        synchronise(device)
        samples.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(samples)
