"""Where each row of a pass goes: its rotary position, and its slot in the paged cache.

Row t of sequence b is token lengths[b] + t of the cache and stands at position lengths[b] + depth; a tree's siblings
share a position but not a slot. A negative length marks a dead sequence: position 0, slot -1 (nothing is written).
Source: docs/requirements.md R-45, R-46, R-82; paging after Kwon et al., arXiv 2309.06180.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.card import Card, Case, Cost, Launch, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, row_of
from eagle3core.kernels.slots.cache_rows import check_block

THREADS = 64


def place_rows_reference(lengths: Tensor, depths: Tensor, block_tables: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Positions and slots `[B, T]` from `lengths: [B]`, `depths: [B, T]` and `block_tables: [B, M]`.

    A row whose block the table does not hold (-1, or past its end) gets slot -1.
    """
    tokens = lengths[:, None] + torch.arange(depths.shape[1], device=depths.device)
    index = tokens // block
    held = (lengths[:, None] >= 0) & (index < block_tables.shape[1])
    entry = block_tables.gather(1, index.clamp(0, block_tables.shape[1] - 1).long())
    slots = torch.where(held & (entry >= 0), entry * block + tokens % block, -1)
    return torch.where(lengths[:, None] >= 0, lengths[:, None] + depths, 0), slots


def make_place_rows(isa: Any, *, block: int, overlap: bool) -> Any:
    """Grid (tiles of T, sequences), a thread a row."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    shift, mask = block.bit_length() - 1, block - 1

    def kernel(
        lengths: Any, depths: Any, block_tables: Any, positions: Any, slots: Any, rows: Any, entries: Any
    ) -> None:
        t = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        sequence = i64(cuda.blockIdx.y)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        if t < rows:
            at = (sequence * rows + t) * 4
            length, depth = isa.load_u32(lengths + sequence * 4), isa.load_u32(depths + at)
            position, slot = i32(0), i32(-1)
            if length >= 0:
                # A node stands at its depth (rotary position) and lies at its index (cache row).
                position = i32(length + depth)
                index = i32((length + t) >> shift)
                if index < entries:
                    held = isa.load_u32(block_tables + (sequence * entries + index) * 4)
                    if held >= 0:
                        slot = i32((held << shift) + ((length + t) & mask))
            isa.store_u32(positions + at, position)
            isa.store_u32(slots + at, slot)

    return kernel


def place_rows_variant(arch: str, block: int) -> Variant:
    """The placement for one block size.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    check_block(block)
    return Variant(
        name=f"place_rows_{block}",
        make=make_place_rows,
        constants={"block": block, "overlap": overlaps(arch)},
        parameters=parameters(
            "lengths:in depths:in block_tables:in positions:out slots:out rows:i32 entries:i32"
        ),
        threads=THREADS,
        max_registers=32,
        dependent=overlaps(arch),
    )  # fmt: skip


def place_rows(
    arch: str, lengths: Tensor, depths: Tensor, block_tables: Tensor, positions: Tensor, slots: Tensor, block: int
) -> list[Launch]:
    """`positions, slots: [B, T]` from `lengths: [B]`, `depths: [B, T]`, `block_tables: [B, M]`, all int32.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    batch, rows = depths.shape
    return [
        place_rows_variant(arch, block).launch(
            (-(-rows // THREADS), batch), lengths=lengths, depths=depths, block_tables=block_tables,
            positions=positions, slots=slots, rows=rows, entries=block_tables.shape[1],
        )
    ]  # fmt: skip


def place_rows_cost(batch: int, rows: int) -> Cost:
    """A depth in, a position and a slot out, a table entry a row; a length a sequence."""
    return Cost(batch * (rows * 16 + 4))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    batch, entries = case["batch"], case["entries"]
    lengths = integers(0, (entries - 1) * case["block"], batch)
    if batch > 2:
        lengths[1] = -1
        lengths[2] = entries * case["block"] - 2  # the last rows fall past the table
    tables = integers(0, 1000, batch, entries)
    tables[0, -1] = -1
    return {"lengths": lengths, "depths": integers(0, 7, batch, case["rows"]), "block_tables": tables}


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    shape, device = inputs["depths"].shape, inputs["depths"].device
    return {name: poison(*shape, dtype=torch.int32, device=device) for name in ("positions", "slots")}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    positions, slots = place_rows_reference(**inputs, block=case["block"])
    return {"positions": positions.int(), "slots": slots.int()}


CARD = Card(
    name="place_rows",
    equation="position = length + depth; slot = table[(length + t) / block] * block + (length + t) mod block",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=lambda arch, case, inputs, outputs: place_rows(arch, **inputs, **outputs, block=case["block"]),
    cost=lambda case: place_rows_cost(case["batch"], case["rows"]),
    variants=lambda arch: [place_rows_variant(arch, 64)],
    slow_variants=lambda arch: [place_rows_variant(arch, 16)],
    cases=({"batch": 4, "rows": 5, "entries": 3, "block": 4},),
    slow_cases=({"batch": 3, "rows": 71, "entries": 5, "block": 32},),
    shapes=tuple({"batch": b, "rows": t, "entries": 512, "block": 64} for b in (1, 4, 16) for t in (1, 4, 64)),
    hand_counts=(({"batch": 2, "rows": 3}, Cost(2 * (3 * 16 + 4))),),
    alone=alone("batch", "lengths", "depths", "block_tables"),
    row_of=row_of,
    n_rows=count("batch"),
)
