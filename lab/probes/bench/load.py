"""What loading takes beyond the models: the most memory while they are made or read, against what they keep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from eagle3core.checkpoint import load_draft, load_target
from eagle3core.config import EngineConfig
from eagle3core.loading import packs_for
from eagle3core.weights import PackedDraft, PackedTarget, pack_checkpoints
from lab.errors import RunFailed
from lab.pairs.on_disk import Pair

MOST_BEYOND = 2 * 10**9  # bytes: what is asked for of loading
BETWEEN_LOOKS_S = 0.002
Models = tuple[PackedTarget, PackedDraft]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Load:
    """Bytes of one loading.

    Attributes:
        kept: of every weight of both models. peak: the most of the device's memory (of a CPU: of this process' own,
            without mapped files) while they were made, beyond what was held before.
    """

    kept: int
    peak: int

    @property
    def beyond(self) -> int:
        """The peak beyond what is kept; 0 where kept weights lie in mapped files."""
        return max(0, self.peak - self.kept)

    @property
    def holds(self) -> bool:
        """Whether it is as little as is asked for."""
        return self.beyond <= MOST_BEYOND

    def values(self) -> dict[str, int | bool]:
        """What its row says."""
        return {
            "kept_bytes": self.kept, "peak_bytes": self.peak, "beyond_bytes": self.beyond,
            "most_beyond_bytes": MOST_BEYOND, "holds": self.holds,
        }  # fmt: skip


def watched_load(make: Callable[[], Models], device: torch.device) -> tuple[Models, Load]:
    """Both models, and what making them took."""
    models, peak = watched(make, device)
    return models, Load(sum(map(_n_bytes, (model.own_tensors() for model in models))), peak)


def watched(make: Callable[[], Made], device: torch.device) -> tuple[Made, int]:
    """What `make` gives, and the most memory that it held at once beyond what was held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        made = make()
        return made, torch.cuda.max_memory_allocated(device) - before
    before, most, is_over = private_bytes(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(BETWEEN_LOOKS_S):
            most[0] = max(most[0], private_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        made = make()
    finally:
        is_over.set()
        watcher.join()
    return made, max(most[0], private_bytes()) - before


def private_bytes() -> int:
    """Memory of this process that is no file's.

    Raises:
        RunFailed: the system does not tell.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024  # Linux counts in KiB
    raise RunFailed("/proc/self/status has no RssAnon", "Linux 4.5 or later", "leave --load out")


def read_models(pair: Pair, dtype: torch.dtype, device: torch.device) -> Models:
    """Both models of checkpoints, as an engine reads them."""
    target = load_target(pair.target, dtype=dtype)
    draft = load_draft(pair.draft, target.geometry, dtype=dtype)
    block, packs = EngineConfig().block_size, packs_for(device, dtype, target.geometry, draft.geometry)
    packed, head = pack_checkpoints(target, draft, device=device, block=block, packs=packs)
    assert head is not None, "the pair has a draft"
    return packed, head


def _n_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
