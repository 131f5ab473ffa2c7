"""States that a draft will read later: of a step without drafts, rows of every tap to a place of their slot's own.

A later step writes over the rows of this one, and a draft that reads after every step costs as much as it may ever
gain where nothing is accepted. A slot has `n` places, a power of two, used in turn by position.
Source: derived here; docs/requirements.md R-82, R-85.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Value, Variant, overlaps, parameters

THREADS = 128
MOST_TABLES = 4
PIECE = 16  # bytes a thread moves


class Kept(NamedTuple):
    """Where a step without drafts keeps its states.

    Attributes:
        n: places of a slot, a power of two; 0: the states lie where the step wrote them.
        first: the first place of slot 0. is_unread: the draft has read nothing in this step, so what waits for it is
            one entry more; else this is the first.
    """

    n: int
    first: int
    is_unread: bool

    @property
    def constants(self) -> dict[str, int | bool]:
        """As a kernel's constants say it."""
        return {"n_kept": self.n, "unread": self.is_unread}

    @property
    def name(self) -> str:
        """As a kernel's name says it."""
        return f"_keeps_{self.n}{'_more' if self.is_unread else ''}" if self.n or self.is_unread else ""


NOT_KEPT = Kept(0, 0, False)


def kept_row(keeps: Kept, slot: Tensor, position: Tensor) -> Tensor:
    """Place of a position of a slot."""
    return keeps.first + slot * keeps.n + position % keeps.n


def make_keep_states(isa: Any, *, tables: int, n_kept: int, overlap: bool) -> Any:
    """Grid (tiles of a row, rows, tables), a thread 16 bytes."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64

    def kernel(
        active: Any, lengths: Any, table0: Any, table1: Any, table2: Any, table3: Any, pieces: Any, first: Any
    ) -> None:
        piece, row, which = (
            i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x),
            i32(cuda.blockIdx.y),
            i32(cuda.blockIdx.z),
        )
        # Kernel parameters have no index: which table a block copies in is chosen before the wait.
        table = table0
        if tables > 1 and which == 1:
            table = table1
        if tables > 2 and which == 2:
            table = table2
        if tables > 3 and which == 3:
            table = table3
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        slot, length = isa.load_u32(active + row * 4), isa.load_u32(lengths + row * 4)
        if piece < pieces and slot >= 0 and length >= 0:
            words = isa.load_u32x4(table + (i64(row) * pieces + piece) * PIECE)
            place = i64(i32(first + slot * n_kept + (length & (n_kept - 1))))
            isa.store_u32x4(table + (place * pieces + piece) * PIECE, words[0], words[1], words[2], words[3])

    return kernel


def keep_states_variant(arch: str, tables: int, n: int) -> Variant:
    """The copy inside `tables` tables, with `n` places a slot.

    Raises:
        KernelLimit: no table, more than four, or places that are no power of two.
    """
    if not 1 <= tables <= MOST_TABLES or n < 1 or n & (n - 1):
        raise KernelLimit(f"{tables} tables with {n} places", f"1..{MOST_TABLES} and a power of two", "change them")
    numbered = " ".join(f"table{i}:inout" for i in range(MOST_TABLES))
    return Variant(
        name=f"keep_states_{tables}_{n}",
        make=make_keep_states,
        constants={"tables": tables, "n_kept": n, "overlap": overlaps(arch)},
        parameters=parameters(f"active:in lengths:in {numbered} pieces:i32 first:i32"),
        threads=THREADS,
        max_registers=32,
        dependent=overlaps(arch),
    )


def keep_states(arch: str, active: Tensor, lengths: Tensor, tables: Sequence[Tensor], keeps: Kept) -> list[Launch]:
    """Copy rows 0..B-1 of every table `[m, E]` to their slots' places in it.

    Args:
        active: `[S]` int32 slot of each row, -1 past the last. lengths: `[B]` int32 position of each, -1 where dead.

    Raises:
        KernelLimit: as `keep_states_variant`, or rows that are not whole 16-byte pieces.
    """
    n_bytes = tables[0].shape[1] * tables[0].element_size()
    if n_bytes % PIECE:
        raise KernelLimit(f"rows of {n_bytes} bytes", f"multiples of {PIECE}", "pad the row")
    pieces = n_bytes // PIECE
    values: dict[str, Value] = {f"table{i}": tables[i] if i < len(tables) else None for i in range(MOST_TABLES)}
    return [
        keep_states_variant(arch, len(tables), keeps.n).launch(
            (-(-pieces // THREADS), len(lengths), len(tables)), active=active, lengths=lengths, **values, pieces=pieces,
            first=keeps.first,
        )
    ]  # fmt: skip


def keep_states_meaning(active: Tensor, lengths: Tensor, tables: Sequence[Tensor], keeps: Kept) -> None:
    """What `keep_states` computes, in plain torch."""
    rows = ((active[: len(lengths)] >= 0) & (lengths >= 0)).nonzero()[:, 0]
    places = kept_row(keeps, active[rows].long(), lengths[rows].long())
    for table in tables:
        table[places] = table[rows]


KEEP_STATES = Op("keep_states", keep_states, keep_states_meaning)


def keep_states_cost(batch: int, tables: int, width: int) -> Cost:
    """Two numbers a row; bf16 rows in and out."""
    return Cost(batch * (8 + tables * 4 * width))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    n_slots = case["slots"]
    order = torch.randperm(n_slots, generator=generator, device=device)[: case["active"]].sort().values.int()
    active = torch.full((n_slots,), -1, dtype=torch.int32, device=device)
    active[: case["active"]] = order
    lengths = torch.randint(0, 99, (case["batch"],), generator=generator, device=device, dtype=torch.int32)
    lengths[case["active"] :] = -1
    shape = (case["first"] + n_slots * case["n"], case["width"])
    tables = {
        f"table{i}": torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        for i in range(case["tables"])
    }
    return {"active": active, "lengths": lengths, **tables}


def _tables(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("table")}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    made = {name: tensor.clone() for name, tensor in _tables(inputs).items()}
    keep_states_meaning(inputs["active"], inputs["lengths"], list(made.values()), Kept(case["n"], case["first"], True))
    return made


CARD = Card(
    name="keep_states",
    equation="table[first + slot n + length mod n] = table[b], slot = active[b]",
    source="derived here",
    example=_example,
    outputs=lambda case, inputs: {name: tensor.clone() for name, tensor in _tables(inputs).items()},
    reference=_reference,
    launches=lambda arch, case, inputs, outputs: keep_states(
        arch, inputs["active"], inputs["lengths"], list(outputs.values()), Kept(case["n"], case["first"], True)
    ),
    cost=lambda case: keep_states_cost(case["batch"], case["tables"], case["width"]),
    variants=lambda arch: [keep_states_variant(arch, 3, 8)],
    slow_variants=lambda arch: [keep_states_variant(arch, n, 8) for n in (1, 2, 4)],
    cases=(
        {"batch": 3, "slots": 4, "active": 2, "tables": 3, "width": 24, "n": 4, "first": 9},
        {"batch": 1, "slots": 1, "active": 1, "tables": 1, "width": 8, "n": 1, "first": 2},
    ),
    slow_cases=({"batch": 5, "slots": 7, "active": 5, "tables": 2, "width": 2048, "n": 8, "first": 30},),
    shapes=tuple(
        {"batch": b, "slots": 16, "active": b, "tables": 3, "width": 4096, "n": 8, "first": 80} for b in (1, 4, 16)
    ),
    hand_counts=(({"batch": 2, "tables": 3, "width": 8}, Cost(2 * (8 + 3 * 32))),),
)
