"""Microbenchmarks of the bookkeeping ops by themselves, on the CPU (plain torch) or on CUDA (the kernels).

`python3 -m lab.probes.kernels.bookkeeping --device cpu` prints one JSON line an op. CUDA times are of launches one
after the other on a stream; inside a captured step the same kernels cost less. Source: docs/requirements.md R-129.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from eagle3core.errors import BackendUnavailable, ConfigError
from eagle3core.kernels import Card, Case, Launch, proof, registry
from eagle3core.kernels.slots import block_table
from lab.errors import EXIT_PASSED
from lab.options.kernels import BookkeepingOptions
from lab.options.reader import run_program

WARM_UP = 3


@dataclass(frozen=True)
class MicrobenchResult:
    """One op, timed.

    Attributes:
        op: the card's name.
        device: "cpu" or "cuda".
        batch: sequences a call works on.
        calls: timed calls.
        avg_ms_per_call: mean time of one call, ms.
        ops_per_second: calls a second.
    """

    op: str
    device: str
    batch: int
    calls: int
    avg_ms_per_call: float
    ops_per_second: float


def benchmark_kv_cache_rewind(
    batch: int = 8, rewind: int = 5, *, block: int = 64, length: int = 4096, device: str = "cpu", calls: int = 100
) -> MicrobenchResult:
    """Take `rewind` tokens back from `batch` sequences of `length` tokens, and give them room again.

    A call is one update of the block tables; rewinds and regrowths alternate, so that all rewinds find one state.
    """
    where = _device(device, batch, calls)
    if not 0 <= rewind <= length:
        raise ConfigError(f"rewind is {rewind} with length {length}", "0..length", "rewind fewer tokens")
    entries = -(-length // block)
    free = torch.zeros(batch * entries, dtype=torch.int32, device=where)
    pool = block_table.BlockPool(
        torch.arange(batch * entries, dtype=torch.int32, device=where).view(batch, entries),
        free,
        torch.zeros(1, dtype=torch.int32, device=where),
    )
    slots = torch.arange(batch, dtype=torch.int32, device=where)
    long, short = torch.full_like(slots, length), torch.full_like(slots, length - rewind)
    if device == "cpu":

        def both() -> None:
            rewound, _, _ = block_table.block_table_reference(pool, slots, long, short, block)
            block_table.block_table_reference(rewound, slots, short, long, block)

        return _timed("block_table", device, batch, calls, both, per_run=2)
    changed, missing = torch.zeros_like(slots), torch.zeros_like(slots)
    arch = _arch()
    launches = [
        launch
        for old, new in ((long, short), (short, long))
        for launch in block_table.block_table(arch, pool, slots, old, new, changed, missing, block)
    ]
    return _timed("block_table", device, batch, calls, _bound(launches), per_run=2)


def benchmark_accept_draft_tokens(
    batch: int = 8, nodes: int = 60, path_len: int = 9, *, device: str = "cpu", calls: int = 100
) -> MicrobenchResult:
    """Accept over random trees of `nodes` nodes, root included, with paths of at most `path_len`."""
    return _card(registry()["accept"], {"batch": batch, "nodes": nodes, "path_len": path_len}, device, calls)


def benchmark_pack_accepted_paths(
    batch: int = 8, path_len: int = 9, *, device: str = "cpu", calls: int = 100
) -> MicrobenchResult:
    """Pack random accepted paths of at most `path_len` nodes."""
    return _card(registry()["pack_paths"], {"batch": batch, "width": path_len}, device, calls)


def _card(card: Card, case: Case, device: str, calls: int) -> MicrobenchResult:
    where = _device(device, case["batch"], calls)
    inputs = card.example(case, proof.generator(0, where), where)
    if device == "cpu":
        return _timed(card.name, device, case["batch"], calls, lambda: card.reference(case, inputs))
    launches = card.launches(_arch(), case, inputs, card.outputs(case, inputs))
    return _timed(card.name, device, case["batch"], calls, _bound(launches))


def _arch() -> str:
    from eagle3core.kernels import launch

    return launch.device_arch()


def _bound(launches: Sequence[Launch]) -> Callable[[], None]:
    from eagle3core.kernels import launch

    return launch.bind(launches)


def _device(device: str, batch: int, calls: int) -> torch.device:
    for name, number in (("batch", batch), ("calls", calls)):
        if number < 1:
            raise ConfigError(f"{name} is {number}", "an integer of at least 1", f"set {name}=8")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}", "'cpu' or 'cuda'", "name one of the two")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("device is 'cuda' and torch sees no CUDA device", "a CUDA device", "use device='cpu'")
    return torch.device(device)


def _timed(
    op: str, device: str, batch: int, calls: int, run: Callable[[], object], *, per_run: int = 1
) -> MicrobenchResult:
    """`run` makes `per_run` calls; it is repeated until at least `calls` were timed."""
    n_runs = -(-calls // per_run)
    for _ in range(WARM_UP):
        run()
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(n_runs):
            run()
        end.record()
        end.synchronize()
        total_ms = start.elapsed_time(end)
    else:
        begun = time.perf_counter()
        for _ in range(n_runs):
            run()
        total_ms = (time.perf_counter() - begun) * 1e3
    average = total_ms / (n_runs * per_run)
    return MicrobenchResult(op, device, batch, n_runs * per_run, average, 1e3 / average)


def main(options: BookkeepingOptions) -> int:
    """Print the three results, a JSON line each."""
    for benchmark in (benchmark_kv_cache_rewind, benchmark_accept_draft_tokens, benchmark_pack_accepted_paths):
        print(json.dumps(asdict(benchmark(batch=options.batch, device=options.device, calls=options.calls))))
    return EXIT_PASSED


if __name__ == "__main__":
    run_program(BookkeepingOptions, main)
