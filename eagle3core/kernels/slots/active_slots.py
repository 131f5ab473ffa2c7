"""Which slots a step works on: their indices in ascending order, the inverse map, and their number.

Where the step's results go is settled here too: to the other block than the last program's.

A slot is active when it holds a request that has not finished: occupied, shorter than its limit, last token no end.
Source: docs/requirements.md R-81, R-87.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.slots.slot_state import RESULT_BLOCKS

MOST_SLOTS = 1024


def active_slots_reference(
    occupied: Tensor, lengths: Tensor, limits: Tensor, tokens: Tensor, ends: Tensor, turn: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`active: [S]` slot indices then -1, `inverse: [S]` place among them or -1, `count: [1]`, the next `turn: [1]`.

    `occupied, lengths, limits, tokens: [S]` int32, `ends: [E]` end tokens, `turn: [1]` block of the last results.
    """
    is_active = (occupied != 0) & (lengths < limits) & ~torch.isin(tokens, ends)
    place = is_active.cumsum(0) - 1
    slots = torch.arange(len(lengths), device=lengths.device)
    order = torch.argsort(~is_active, stable=True)  # active slots first, both kinds ascending
    active = torch.where(slots < is_active.sum(), order, -1).to(lengths.dtype)
    inverse = torch.where(is_active, place, -1).to(lengths.dtype)
    return active, inverse, is_active.sum().to(lengths.dtype)[None], (turn + 1) % RESULT_BLOCKS


def make_active_slots(isa: Any, *, slots: int, overlap: bool) -> Any:
    """One block, a thread a slot: ballots give every warp's active lanes, their counts the places."""
    cuda, i32 = isa.cuda, isa.i32
    words = -(-slots // 32)

    def kernel(
        occupied: Any, lengths: Any, limits: Any, tokens: Any, ends: Any, active: Any, inverse: Any, count: Any,
        turn: Any, n_ends: Any,
    ) -> None:  # fmt: skip
        me = i32(cuda.threadIdx.x)
        bits = isa.shared_address(cuda.shared.array(words, i32))
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        is_active = i32(0)
        if me < slots:
            token, length = isa.load_u32(tokens + me * 4), isa.load_u32(lengths + me * 4)
            limit, held = isa.load_u32(limits + me * 4), isa.load_u32(occupied + me * 4)
            if held != 0 and length < limit:
                is_active = i32(1)
            for e in range(n_ends):
                if isa.load_u32(ends + e * 4) == token:
                    is_active = i32(0)
        # A slot's place is the number of active slots before it: words of votes, and set bits counted.
        word = isa.ballot(is_active)
        if (me & 31) == 0:
            isa.shared_store_u32(bits + (me >> 5) * 4, word)
        cuda.syncthreads()
        place, total = i32(0), i32(0)
        for w in range(words):
            word = isa.shared_load_u32(bits + w * 4)
            n = isa.popcount(word)
            total = i32(total + n)
            if w < (me >> 5):
                place = i32(place + n)
            elif w == (me >> 5):
                place = i32(place + isa.popcount(i32(word & ((1 << (me & 31)) - 1))))
        if me < slots:
            if is_active == 1:
                isa.store_u32(active + place * 4, me)
            else:
                place = i32(-1)
            isa.store_u32(inverse + me * 4, place)
            # The list's tail, by the threads that have no place in it.
            if me >= total:
                isa.store_u32(active + me * 4, -1)
        if me == 0:
            isa.store_u32(count, total)
            # Once a step, here: every later kernel of the step reads one number.
            isa.store_u32(turn, i32((isa.load_u32(turn) + 1) & (RESULT_BLOCKS - 1)))

    return kernel


def active_slots_variant(arch: str, slots: int) -> Variant:
    """The map of `slots` slots.

    Raises:
        KernelLimit: not in 1..1024.
    """
    if not 1 <= slots <= MOST_SLOTS:
        raise KernelLimit(f"{slots} slots", f"1..{MOST_SLOTS}", "lower max_batch_size")
    return Variant(
        name=f"active_slots_{slots}",
        make=make_active_slots,
        constants={"slots": slots, "overlap": overlaps(arch)},
        parameters=parameters(
            "occupied:in lengths:in limits:in tokens:in ends:const active:out inverse:out count:out turn:inout "
            "n_ends:i32"
        ),
        threads=-(-slots // 32) * 32,
        max_registers=64,
        instructions={"VOTE": 1, "POPC": 1},
        dependent=overlaps(arch),
    )


def active_slots(
    arch: str,
    occupied: Tensor,
    lengths: Tensor,
    limits: Tensor,
    tokens: Tensor,
    ends: Tensor,
    active: Tensor,
    inverse: Tensor,
    count: Tensor,
    turn: Tensor,
) -> list[Launch]:
    """Outputs as the reference's, from the same inputs; int32. `turn` is read and written.

    Raises:
        KernelLimit: more than 1024 slots.
    """
    read = {"occupied": occupied, "lengths": lengths, "limits": limits, "tokens": tokens, "ends": ends}
    written = {"active": active, "inverse": inverse, "count": count, "turn": turn}
    return [active_slots_variant(arch, len(lengths)).launch((1,), **read, **written, n_ends=len(ends))]


def active_slots_meaning(
    occupied: Tensor,
    lengths: Tensor,
    limits: Tensor,
    tokens: Tensor,
    ends: Tensor,
    active: Tensor,
    inverse: Tensor,
    count: Tensor,
    turn: Tensor,
) -> None:
    """What `active_slots` computes, in plain torch."""
    made = active_slots_reference(occupied, lengths, limits, tokens, ends, turn)
    for after, tensor in zip(made, (active, inverse, count, turn), strict=True):
        tensor.copy_(after)


ACTIVE_SLOTS = Op("active_slots", active_slots, active_slots_meaning)


def active_slots_cost(slots: int) -> Cost:
    """Four numbers a slot in, two out, the count, and the turn in and out."""
    return Cost(slots * 24 + 12)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (case["slots"],), generator=generator, device=device, dtype=torch.int32)

    made = {"occupied": (integers(0, 4) > 0).int(), "lengths": integers(0, 9), "limits": integers(5, 12)}
    made["turn"] = integers(0, RESULT_BLOCKS)[:1]
    return {**made, "tokens": integers(0, 9), "ends": torch.tensor([3, 7], dtype=torch.int32, device=device)}


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    sizes, device = {"active": case["slots"], "inverse": case["slots"], "count": 1}, inputs["lengths"].device
    made = {name: poison(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    return {**made, "turn": inputs["turn"].clone()}


CARD = Card(
    name="active_slots",
    equation="active = slots with occupied, length < limit and token not in ends; inverse[active[i]] = i",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: dict(
        zip(("active", "inverse", "count", "turn"), active_slots_reference(**inputs), strict=True)
    ),
    launches=lambda arch, case, inputs, outputs: active_slots(arch, **{**inputs, **outputs}),
    cost=lambda case: active_slots_cost(case["slots"]),
    variants=lambda arch: [active_slots_variant(arch, 64)],
    slow_variants=lambda arch: [active_slots_variant(arch, slots) for slots in (1, 4, 16, 1024)],
    cases=({"slots": 75},),
    slow_cases=({"slots": 1}, {"slots": 4}, {"slots": 300}),
    shapes=tuple({"slots": slots} for slots in (1, 4, 64)),
    hand_counts=(({"slots": 5}, Cost(132)),),
)
