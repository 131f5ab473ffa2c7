"""What a chunk of a prompt works on: its tokens, where its rows go, and the prefix that each span of them sees.

A chunk is C rows of one request from token `start` on, cut into spans of T rows that attention treats as sequences:
span i has prefix start + i T and sees its own rows by a triangular mask. Rows past the prompt are padding: token -1,
cache row -1; a span of padding alone is dead. The draft's entry j, which pairs position j with token j + 1, is placed
likewise; the last token has none yet. Source: docs/requirements.md R-46, R-82; house rule of fixed-size chunks.
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
from eagle3core.kernels.slots.slot_state import MOST_ENDS, N_REQUEST


class ChunkRows(NamedTuple):
    """What is written, int32.

    Attributes:
        tokens, positions, slots: `[C]`.
        prefix: `[C / T]` keys before each span, -1 for a dead one. tables: `[C / T, M]` cache blocks.
        entry_tokens, entry_slots: `[C]` of the draft's entries; cache row -1 where there is none.
        last: `[1]` row of the prompt's last token in this chunk, outside 0..C-1 if it is in another.
        seed: `[1]` `seed_row` + slot.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    prefix: Tensor
    tables: Tensor
    entry_tokens: Tensor
    entry_slots: Tensor
    last: Tensor
    seed: Tensor


def new_chunk_rows(rows: int, spans: int, entries: int, device: torch.device) -> ChunkRows:
    """Poisoned outputs."""
    shapes = ((rows,), (rows,), (rows,), (spans,), (spans, entries), (rows,), (rows,), (1,), (1,))
    return ChunkRows(*(poison(*shape, dtype=torch.int32, device=device) for shape in shapes))


def open_chunk_reference(
    request: Tensor, start: Tensor, prompt: Tensor, tables: Tensor, rows: int, spans: int, block: int, seed_row: int
) -> ChunkRows:
    """The rows of the chunk that begins at `start: [1]` of `prompt`, of the `request`'s slot."""
    slot, n_prompt = request[0].long(), request[1]
    table, row = tables[slot], torch.arange(rows, device=prompt.device)
    token, at = start + row, torch.arange(spans, device=prompt.device) * (rows // spans) + start
    is_real, is_entry = token < n_prompt, token + 1 < n_prompt
    where = place_in(table[None], token[None], block)[0]
    padded = torch.nn.functional.pad(prompt, (0, 1))
    last = len(prompt)  # of the padding
    return ChunkRows(
        tokens=padded[token.clamp_max(last)].where(is_real, -1).int(),
        positions=token.where(is_real, 0).int(),
        slots=where.where(is_real, -1).int(),
        prefix=at.where(at < n_prompt, -1).int(),
        tables=table.expand(spans, -1).int(),
        entry_tokens=padded[(token + 1).clamp_max(last)].where(is_entry, 0).int(),
        entry_slots=where.where(is_entry, -1).int(),
        last=(n_prompt - 1 - start).int(),
        seed=(seed_row + slot)[None].int(),
    )


def make_open_chunk(isa: Any, *, block: int, overlap: bool) -> Any:
    """Grid (blocks for the rows, then for the table, of a span; spans)."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    copy_table, look_up, row_in = make_copy_table(isa), make_look_up(isa, block), make_row_in(isa, block)

    def kernel(
        request: Any, start: Any, prompt: Any, slot_tables: Any, tokens: Any, positions: Any, slots: Any, prefix: Any,
        tables: Any, entry_tokens: Any, entry_slots: Any, last: Any, seed: Any, span_rows: Any, entries: Any,
        seed_row: Any,
    ) -> None:  # fmt: skip
        tid, part, span = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        of_rows = i32((span_rows + (THREADS - 1)) // THREADS)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        slot, n_prompt, first = isa.load_u32(request), isa.load_u32(request + 4), isa.load_u32(start)
        table = slot_tables + i64(slot) * entries * 4
        # Rows and the table's copy are different blocks: neither waits for the other's loads.
        if part >= of_rows:
            copy_table(table, tables + i64(span) * entries * 4, entries, i32(part - of_rows), slot)
        else:
            t = i32(part * THREADS + tid)
            row = i32(span * span_rows + t)
            at = i32(first + row)
            token, entry_token, held = i32(-1), i32(0), i32(-1)
            if t < span_rows and at < n_prompt:
                token, held = isa.load_u32(prompt + i64(at) * 4), look_up(table, at, entries)
                if at + 1 < n_prompt:
                    entry_token = isa.load_u32(prompt + (i64(at) + 1) * 4)
            if t < span_rows:
                # The draft reads a row less: its token is the next one of the prompt, which the last row does not have.
                where, entry_where = row_in(held, at), i32(-1)
                if at + 1 < n_prompt:
                    entry_where = where
                if at >= n_prompt:
                    at = i32(0)
                isa.store_u32(tokens + row * 4, token)
                isa.store_u32(positions + row * 4, at)
                isa.store_u32(slots + row * 4, where)
                isa.store_u32(entry_tokens + row * 4, entry_token)
                isa.store_u32(entry_slots + row * 4, entry_where)
            if t == 0:
                before = i32(first + row)
                if before >= n_prompt:
                    before = i32(-1)
                isa.store_u32(prefix + span * 4, before)
                if span == 0:
                    isa.store_u32(last, n_prompt - 1 - first)
                    isa.store_u32(seed, seed_row + slot)

    return kernel


def open_chunk_variant(arch: str, block: int) -> Variant:
    """The chunk for one block size.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    check_block(block)
    return Variant(
        name=f"open_chunk_{block}",
        make=make_open_chunk,
        constants={"block": block, "overlap": overlaps(arch)},
        parameters=parameters(
            "request:in start:in prompt:in slot_tables:in tokens:out positions:out slots:out prefix:out tables:out "
            "entry_tokens:out entry_slots:out last:out seed:out span_rows:i32 entries:i32 seed_row:i32"
        ),
        threads=THREADS,
        max_registers=48,
        dependent=overlaps(arch),
    )


def open_chunk(
    arch: str, request: Tensor, start: Tensor, prompt: Tensor, tables: Tensor, out: ChunkRows, block: int, seed_row: int
) -> list[Launch]:
    """`out` from `request: [N_REQUEST + MOST_ENDS]`, `start: [1]`, `prompt: [max]` and `tables: [S, M]`; int32.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    rows, (spans, entries) = len(out.tokens), out.tables.shape
    parts = parts_of(rows // spans) + parts_of(entries, COPIED)
    return [
        open_chunk_variant(arch, block).launch(
            (parts, spans), request=request, start=start, prompt=prompt, slot_tables=tables, **out._asdict(),
            span_rows=rows // spans, entries=entries, seed_row=seed_row,
        )
    ]  # fmt: skip


def open_chunk_meaning(
    request: Tensor, start: Tensor, prompt: Tensor, tables: Tensor, out: ChunkRows, block: int, seed_row: int
) -> None:
    """What `open_chunk` computes, in plain torch."""
    spans = len(out.prefix)
    made = open_chunk_reference(request, start, prompt, tables, len(out.tokens), spans, block, seed_row)
    for after, tensor in zip(made, out, strict=True):
        tensor.copy_(after)


OPEN_CHUNK = Op("open_chunk", open_chunk, open_chunk_meaning)


def open_chunk_cost(rows: int, spans: int, entries: int) -> Cost:
    """A token and a table entry in, five numbers out a row; table and prefix a span; request, last and seed."""
    return Cost(rows * 28 + spans * (8 * entries + 4) + 20)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    request = torch.full((N_REQUEST + MOST_ENDS,), -1, dtype=torch.int32, device=device)
    request[:2] = torch.tensor([case["slots"] - 1, case["prompt"]], dtype=torch.int32)
    return {
        "request": request, "start": torch.tensor([case["start"]], dtype=torch.int32, device=device),
        "prompt": integers(0, 99, case["prompt"] + 3), "tables": integers(0, 99, case["slots"], case["entries"]),
    }  # fmt: skip


CARD = Card(
    name="open_chunk",
    equation="row i = token start + i of the prompt, at cache row table[(start + i) / block] block + ...; -1 past it",
    source="derived here",
    example=_example,
    outputs=lambda case, inputs: dict(
        new_chunk_rows(case["rows"], case["spans"], case["entries"], inputs["prompt"].device)._asdict()
    ),
    reference=lambda case, inputs: dict(
        open_chunk_reference(
            **inputs, rows=case["rows"], spans=case["spans"], block=case["block"], seed_row=case["seed_row"]
        )._asdict()
    ),
    launches=lambda arch, case, inputs, outputs: open_chunk(
        arch, **inputs, out=ChunkRows(**outputs), block=case["block"], seed_row=case["seed_row"]
    ),
    cost=lambda case: open_chunk_cost(case["rows"], case["spans"], case["entries"]),
    variants=lambda arch: [open_chunk_variant(arch, 64)],
    slow_variants=lambda arch: [open_chunk_variant(arch, 16)],
    cases=(
        {"rows": 24, "spans": 3, "prompt": 33, "start": 24, "slots": 2, "entries": 9, "block": 8, "seed_row": 5},
        {"rows": 8, "spans": 1, "prompt": 33, "start": 8, "slots": 1, "entries": 70, "block": 8, "seed_row": 0},
    ),
    slow_cases=(
        {"rows": 256, "spans": 2, "prompt": 200, "start": 0, "slots": 3, "entries": 4, "block": 64, "seed_row": 8},
        {"rows": 140, "spans": 2, "prompt": 142, "start": 70, "slots": 2, "entries": 300, "block": 1, "seed_row": 1},
    ),
    shapes=(
        {"rows": 512, "spans": 8, "prompt": 512, "start": 0, "slots": 4, "entries": 513, "block": 64, "seed_row": 8},
    ),
    hand_counts=(({"rows": 4, "spans": 2, "entries": 3}, Cost(4 * 28 + 2 * 28 + 20)),),
)
