"""Bugs in how a cache of FP8 is filled: with another scale than that of the checkpoint, or of the side that reads it.

Keys and values are right in a cache of 16 bits, and no stage of a pass is compared over one of FP8, so these are found
by whole runs against a right engine with the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle3core.kernels import Call
from lab.parity.derived import CacheWrite, cache_write
from lab.parity.faults.fault import Change, Place, after, entries_of
from lab.parity.faults.run_fault import RunFault

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max


def _rewritten(pages: Tensor, slots: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """The entries of `slots` as `change` makes them, rounded again."""
    hit, wide = entries_of(pages, slots), pages.float()
    made = change(torch.where(hit, wide, 0.0)).clamp(-_LARGEST, _LARGEST)
    pages.copy_(torch.where(hit, made, wide).to(_E4M3))  # what is not hit keeps its bytes


def _of_writes(of: str, edit: Callable[[Place, CacheWrite], None]) -> Change:
    """`edit` of what every call of the `of` model leaves in a cache of FP8."""

    def change(at: Place, call: Call) -> Sequence[Call]:
        write = cache_write(call)
        if write is None or write.k.dtype != _E4M3 or not at.stage.startswith(f"{of}."):
            return [call]
        return after(call, lambda: edit(at, write))

    return change


def _scaled_by_the_other(at: Place, write: CacheWrite) -> None:
    """Keys lie as values should, divided by their scale, and values as keys."""
    assert write.factors is not None, "a cache of FP8 has scales"
    ratio = write.factors[1] / write.factors[0]
    _rewritten(write.k, write.slots, lambda keys: keys * ratio)
    _rewritten(write.v, write.slots, lambda values: values / ratio)


def _scaled_by_the_batch(at: Place, write: CacheWrite) -> None:
    """In a step of several sequences keys and values are rounded with a scale of the largest of all of them."""
    if at.batch < 2:
        return
    for pages in (write.k, write.v):
        _rewritten(pages, write.slots, _rounded_by_the_largest)


def _rounded_by_the_largest(entries: Tensor) -> Tensor:
    scale = entries.abs().amax().clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
    return (entries / scale).to(_E4M3).float() * scale


def _halved(at: Place, write: CacheWrite) -> None:
    _rewritten(write.k, write.slots, lambda keys: keys / 2)


CACHE_FAULTS = (
    RunFault(
        "swapped_cache_scales", "keys in a cache of FP8 have the scale of values, and values that of keys", "caches",
        "tokens", change=_of_writes("target", _scaled_by_the_other),
    ),
    RunFault(
        "batch_scaled_cache", "a cache of FP8 is written with a scale of the batch, not of the checkpoint", "caches",
        "tokens", change=_of_writes("target", _scaled_by_the_batch),
    ),
    RunFault(
        "draft_cache_scale", "the draft's keys in a cache of FP8 are read with half their scale", "caches", "drafts",
        change=_of_writes("draft", _halved),
    ),
)  # fmt: skip
