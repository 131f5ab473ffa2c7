"""Bugs planted on purpose, each beside the same kernel without it: what a sanitizer must find, and must not.

They are op cards outside the registry, so that they take the very path of the cards that are checked.
Source: derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.card import Card, Case, Cost, Launch, Tensors, Variant, parameters, poison

PARAMETERS = parameters("x:in y:out n:i32")
_THREADS = 128
_CASE: Case = {"n": 109}  # odd, and less than the block, so that the last warp is ragged


def make_block_total(isa: Any, *, threads: int, barrier: bool) -> Any:
    """y[0] = the sum of n floats, handed to lane 0 in shared memory; without `barrier` lane 0 may read too early."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32

    def block_total(x: Any, y: Any, n: Any) -> None:
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        tid = i32(cuda.threadIdx.x)
        value = f32(0)
        if tid < n:
            value = isa.load_f32(x + i64(tid) * 4)
        isa.shared_store_f32(i32(base + tid * 4), value)
        if barrier:
            cuda.syncthreads()
        if tid == 0:
            total = f32(0)
            for lane in range(threads):
                total = total + isa.shared_load_f32(i32(base + lane * 4))
            isa.store_f32(y, total)

    return block_total


def make_doubled(isa: Any, *, beyond: int) -> Any:
    """y = 2 x for n floats, and for the `beyond` places after them, which are not y's."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64

    def doubled(x: Any, y: Any, n: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        if tid < n + beyond:
            value = isa.load_f32(x + i64(min(tid, i32(n - 1))) * 4)
            isa.store_f32(y + i64(tid) * 4, value + value)

    return doubled


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    # Small integers, whose sums are exact in any order: only the planted bugs may be wrong.
    return {"x": torch.randint(-8, 9, (case["n"],), generator=generator, device=device).float()}


def _card(name: str, equation: str, variant: Variant, n_out: int, reference: Any) -> Card:
    def outputs(case: Case, inputs: Tensors) -> Tensors:
        return {"y": poison(n_out, dtype=torch.float32, device=inputs["x"].device)}

    def launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        return [variant.launch((1,), x=inputs["x"], y=outputs["y"], n=case["n"])]

    n = _CASE["n"]
    cost = Cost(4 * (n + n_out), n)
    return Card(
        name, equation, "derived here", _example, outputs, reference, launches, lambda case: cost,
        lambda arch: [variant], cases=(_CASE,), shapes=(), hand_counts=((_CASE, cost),),
    )  # fmt: skip


def _total(case: Case, inputs: Tensors) -> dict[str, Tensor]:
    return {"y": inputs["x"].sum(0, keepdim=True)}


def _doubled(case: Case, inputs: Tensors) -> dict[str, Tensor]:
    return {"y": 2 * inputs["x"]}


def _block_total(name: str, *, barrier: bool) -> Card:
    constants = {"threads": _THREADS, "barrier": barrier}
    variant = Variant(name, make_block_total, constants, PARAMETERS, _THREADS, shared_bytes=4 * _THREADS)
    return _card(name, "y = sum(x)", variant, 1, _total)


def _doubling(name: str, *, beyond: int) -> Card:
    variant = Variant(name, make_doubled, {"beyond": beyond}, PARAMETERS, _THREADS)
    return _card(name, "y = 2 x", variant, _CASE["n"], _doubled)


# The tool that must find it -> (the kernel with the bug, the same kernel without it).
PLANTS = {
    "memcheck": (_doubling("planted_write", beyond=1), _doubling("planted_write_undone", beyond=0)),
    "racecheck": (_block_total("planted_race", barrier=False), _block_total("planted_race_undone", barrier=True)),
}
