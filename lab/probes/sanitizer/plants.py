"""Bugs planted on purpose, each beside the same kernel without it: what a sanitizer must find, and must not.

They are op cards outside the registry, so that they take the very path of the cards that are checked.
Source: derived here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels import Card, Case, Cost, Launch, Tensors, Variant, parameters, poison
from lab.probes.sanitizer.handover import PIECE, make_copied, make_staged, make_turns

PARAMETERS = parameters("x:in y:out n:i32")
_THREADS = 128
_WITHOUT_BULK_COPIES = ("sm_80",)

Pair = tuple[Card, Card]  # the kernel with the bug, the same kernel without it


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


def _card(
    variant: Variant, n: int, n_in: int, n_out: int, reference: Callable[[Tensor], Tensor], without: Sequence[str] = ()
) -> Card:
    """A card named as its variant: x of `n_in` small integers, whose sums are exact in any order, y of `n_out`."""

    def example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
        return {"x": torch.randint(-8, 9, (n_in,), generator=generator, device=device).float()}

    def outputs(case: Case, inputs: Tensors) -> Tensors:
        return {"y": poison(n_out, dtype=torch.float32, device=inputs["x"].device)}

    def launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        return [variant.launch((1,), x=inputs["x"], y=outputs["y"], n=n)]

    case, cost = {"n": n}, Cost(4 * (n_in + n_out), n_in)
    return Card(
        variant.name, "planted", "derived here", example, outputs, lambda case, inputs: {"y": reference(inputs["x"])},
        launches, lambda case: cost, lambda arch: [] if arch in without else [variant], cases=(case,), shapes=(),
        hand_counts=((case, cost),),
    )  # fmt: skip


def _pair(name: str, make: Any, switch: Mapping[str, tuple[Any, Any]], threads: int, shared: int, **card: Any) -> Pair:
    """Cards `name` and `name`_undone; `switch` gives the constants of the two."""

    def made(i: int, full_name: str) -> Card:
        constants = {key: values[i] for key, values in switch.items()}
        return _card(Variant(full_name, make, constants, PARAMETERS, threads, shared), **card)

    return made(0, name), made(1, f"{name}_undone")


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


# The block of the first two is larger than n, so that its last warp is ragged.
_WRITE = _pair("planted_write", make_doubled, {"beyond": (1, 0)}, _THREADS, 0, n=109, n_in=109, n_out=109,
               reference=_doubled)  # fmt: skip
_RACE = _pair("planted_race", make_block_total, {"threads": (_THREADS, _THREADS), "barrier": (False, True)}, _THREADS,
              4 * _THREADS, n=109, n_in=109, n_out=1, reference=lambda x: x.sum(0, keepdim=True))  # fmt: skip
_COPY = _pair("planted_copy", make_copied, {"barrier": (False, True)}, _THREADS, 4096, n=5, n_in=5 * 512,
              n_out=5 * 512, reference=_doubled)  # fmt: skip
_TURN = _pair("planted_turn", make_turns, {"in_turn": (False, True)}, _THREADS, 128, n=11, n_in=11 * 32, n_out=32,
              reference=lambda x: x.view(-1, 32).sum(0))  # fmt: skip
_STAGE = _pair("planted_stage", make_staged, {"waits": (False, True)}, 96, 2 * PIECE + 32, n=7, n_in=7 * 256,
               n_out=256, reference=lambda x: x.view(-1, 256).sum(0), without=_WITHOUT_BULK_COPIES)  # fmt: skip

# The tool that must tell each pair apart. Racecheck sees kernels in the other form (`form`), plants too.
PLANTS: Mapping[str, tuple[Pair, ...]] = {"memcheck": (_WRITE,), "racecheck": (_RACE, _COPY, _TURN, _STAGE)}
# Right kernels that racecheck sees as they are written: if it blames them, it cannot follow what they do.
WRITTEN = tuple(replace(undone, name=f"{planted.name}_as_written") for planted, undone in (_TURN, _STAGE))


def plants_of(arch: str) -> dict[str, tuple[Pair, ...]]:
    """The pairs of `PLANTS` whose instructions exist on `arch`."""
    return {name: tuple(pair for pair in pairs if pair[0].variants(arch)) for name, pairs in PLANTS.items()}


def written_on(arch: str) -> list[Card]:
    """Those of `WRITTEN`."""
    return [card for card in WRITTEN if card.variants(arch)]
