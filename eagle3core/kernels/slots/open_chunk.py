"""What a pass over prompts works on: tokens, where their rows go, and the prefix that each span of them sees.

A pass has spans of T rows, which attention treats as sequences; a span holds tokens of one prompt, from token `start`
of it on. Spans of one prompt follow each other, and beside them may be those of others: span i has its own prefix and
table, and sees its own rows by a triangular mask. Rows without a token are padding: token -1, cache row -1; a span
without a slot is dead. The draft's entry j, which pairs position j with token j + 1, is placed likewise; the last token
of a prompt has none yet. Source: docs/requirements.md R-46, R-82; house rule of fixed-size chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.slots.cache_rows import (
    COPIED,
    THREADS,
    check_block,
    make_copy_table,
    make_look_up,
    make_row_in,
    parts_of,
    place_in,
)
from eagle3core.kernels.slots.slot_state import N_SPAN, SPAN_SLOT, SPAN_START


class ChunkRows(NamedTuple):
    """What is written, int32; C rows in C / T spans.

    Attributes:
        tokens, positions, slots: `[C]`.
        prefix: `[C / T]` keys before each span, -1 for a dead one. tables: `[C / T, M]` cache blocks.
        entry_tokens, entry_slots: `[C]` of the draft's entries; cache row -1 where there is none.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    prefix: Tensor
    tables: Tensor
    entry_tokens: Tensor
    entry_slots: Tensor


def new_chunk_rows(rows: int, spans: int, entries: int, device: torch.device) -> ChunkRows:
    """Poisoned outputs."""
    shapes = ((rows,), (rows,), (rows,), (spans,), (spans, entries), (rows,), (rows,))
    return ChunkRows(*(poison(*shape, dtype=torch.int32, device=device) for shape in shapes))


def open_chunk_reference(spans: Tensor, given: Tensor, tables: Tensor, block: int) -> ChunkRows:
    """The rows of `spans: [N_SPAN, n]` whose tokens are `given: [n, T + 1]`, -1 where there is none."""
    slot, start, length = spans[SPAN_SLOT], spans[SPAN_START], given.shape[1] - 1
    table = tables[slot.clamp_min(0).long()].where((slot >= 0)[:, None], -1)
    token, at = given[:, :-1], start[:, None] + torch.arange(length, device=given.device)
    is_real, is_entry = token >= 0, given[:, 1:] >= 0
    where = place_in(table, at, block)
    return ChunkRows(
        tokens=token.where(is_real, -1).flatten().int(),
        positions=at.where(is_real, 0).flatten().int(),
        slots=where.where(is_real, -1).flatten().int(),
        prefix=start.where(slot >= 0, -1).int(),
        tables=table.int(),
        entry_tokens=given[:, 1:].where(is_entry, 0).flatten().int(),
        entry_slots=where.where(is_entry, -1).flatten().int(),
    )


def make_open_chunk(isa: Any, *, block: int, overlap: bool) -> Any:
    """Grid (blocks for the rows, then for the table, of a span; spans)."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    copy_table, look_up, row_in = make_copy_table(isa), make_look_up(isa, block), make_row_in(isa, block)

    def kernel(
        spans: Any, given: Any, slot_tables: Any, tokens: Any, positions: Any, slots: Any, prefix: Any, tables: Any,
        entry_tokens: Any, entry_slots: Any, n_spans: Any, span_rows: Any, entries: Any,
    ) -> None:  # fmt: skip
        tid, part, span = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        of_rows = i32((span_rows + (THREADS - 1)) // THREADS)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        slot = isa.load_u32(spans + i64(SPAN_SLOT * n_spans + span) * 4)
        first = isa.load_u32(spans + i64(SPAN_START * n_spans + span) * 4)
        table = slot_tables + i64(slot) * entries * 4  # not read of a dead span
        # Rows and the table's copy are different blocks: neither waits for the other's loads.
        if part >= of_rows:
            copy_table(table, tables + i64(span) * entries * 4, entries, i32(part - of_rows), slot)
        else:
            t = i32(part * THREADS + tid)
            row = i32(span * span_rows + t)
            at = i32(first + t)
            token, following, held = i32(-1), i32(-1), i32(-1)
            if t < span_rows:
                source = given + (i64(span) * (span_rows + 1) + t) * 4
                token, following = isa.load_u32(source), isa.load_u32(source + 4)
                if token >= 0:
                    held = look_up(table, at, entries)
            if t < span_rows:
                # The draft reads a row less: its token is the next one of the prompt, which the last row does not have.
                where, entry_where = row_in(held, at), i32(-1)
                if following >= 0:
                    entry_where = where
                else:
                    following = i32(0)
                if token < 0:
                    at = i32(0)
                isa.store_u32(tokens + row * 4, token)
                isa.store_u32(positions + row * 4, at)
                isa.store_u32(slots + row * 4, where)
                isa.store_u32(entry_tokens + row * 4, following)
                isa.store_u32(entry_slots + row * 4, entry_where)
            if t == 0:
                if slot < 0:
                    first = i32(-1)
                isa.store_u32(prefix + span * 4, first)

    return kernel


def open_chunk_variant(arch: str, block: int) -> Variant:
    """The pass for one block size.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    check_block(block)
    return Variant(
        name=f"open_chunk_{block}",
        make=make_open_chunk,
        constants={"block": block, "overlap": overlaps(arch)},
        parameters=parameters(
            "spans:in given:in slot_tables:in tokens:out positions:out slots:out prefix:out tables:out "
            "entry_tokens:out entry_slots:out n_spans:i32 span_rows:i32 entries:i32"
        ),
        threads=THREADS,
        max_registers=48,
        dependent=overlaps(arch),
    )


def open_chunk(arch: str, spans: Tensor, given: Tensor, tables: Tensor, out: ChunkRows, block: int) -> list[Launch]:
    """`out` from `spans: [N_SPAN, n]`, their tokens `given: [n, T + 1]` and `tables: [S, M]`; int32.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    n_spans, entries = out.tables.shape
    span_rows = given.shape[1] - 1
    parts = parts_of(span_rows) + parts_of(entries, COPIED)
    return [
        open_chunk_variant(arch, block).launch(
            (parts, n_spans), spans=spans, given=given, slot_tables=tables, **out._asdict(), n_spans=n_spans,
            span_rows=span_rows, entries=entries,
        )
    ]  # fmt: skip


def open_chunk_meaning(spans: Tensor, given: Tensor, tables: Tensor, out: ChunkRows, block: int) -> None:
    """What `open_chunk` computes, in plain torch."""
    for after, tensor in zip(open_chunk_reference(spans, given, tables, block), out, strict=True):
        tensor.copy_(after)


OPEN_CHUNK = Op("open_chunk", open_chunk, open_chunk_meaning)


def open_chunk_cost(rows: int, spans: int, entries: int) -> Cost:
    """A token and a table entry in, five numbers out a row; of a span a token more, slot, start, table and prefix."""
    return Cost(rows * 28 + spans * (8 * entries + 16))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    n, length = case["spans"], case["rows"] // case["spans"]
    spans, given = integers(0, 9, N_SPAN, n), integers(0, 99, n, length + 1)
    for i, (slot, start, n_tokens) in enumerate(case["given"]):
        spans[SPAN_SLOT, i], spans[SPAN_START, i] = slot, start
        given[i, n_tokens:] = -1
    return {"spans": spans, "given": given, "tables": integers(0, 99, case["slots"], case["entries"])}


CARD = Card(
    name="open_chunk",
    equation="row t of span i = token start + t of its prompt, at cache row table[(start + t) / block] block + ...",
    source="derived here",
    example=_example,
    outputs=lambda case, inputs: dict(
        new_chunk_rows(case["rows"], case["spans"], case["entries"], inputs["given"].device)._asdict()
    ),
    reference=lambda case, inputs: dict(open_chunk_reference(**inputs, block=case["block"])._asdict()),
    launches=lambda arch, case, inputs, outputs: open_chunk(
        arch, **inputs, out=ChunkRows(**outputs), block=case["block"]
    ),
    cost=lambda case: open_chunk_cost(case["rows"], case["spans"], case["entries"]),
    variants=lambda arch: [open_chunk_variant(arch, 64)],
    slow_variants=lambda arch: [open_chunk_variant(arch, 16)],
    # By span its slot, its start, and how many tokens of it and of what follows are given.
    cases=(
        {"rows": 24, "spans": 3, "given": ((1, 24, 9), (1, 32, 1), (-1, 0, 0)), "slots": 2, "entries": 9, "block": 8},
        {"rows": 24, "spans": 3, "given": ((2, 16, 4), (0, 0, 9), (0, 8, 8)), "slots": 3, "entries": 9, "block": 8},
        {"rows": 8, "spans": 1, "given": ((0, 8, 9),), "slots": 1, "entries": 70, "block": 8},
    ),
    slow_cases=(
        {"rows": 256, "spans": 2, "given": ((2, 0, 129), (0, 128, 72)), "slots": 3, "entries": 4, "block": 64},
        {"rows": 140, "spans": 2, "given": ((1, 70, 71), (1, 140, 2)), "slots": 2, "entries": 300, "block": 1},
    ),
    shapes=(
        {"rows": 512, "spans": 8, "given": tuple((3, 64 * i, 64 + (i < 7)) for i in range(8)), "slots": 4,
         "entries": 513, "block": 64},
    ),
    hand_counts=(({"rows": 4, "spans": 2, "entries": 3}, Cost(4 * 28 + 2 * (24 + 16))),),
)  # fmt: skip
