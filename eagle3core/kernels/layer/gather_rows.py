"""Rows by index, or a fill where the index is negative: out[i] = source[index[i]].

With the active slots as index it gathers a compact batch; with their inverse map it scatters the batch's results back,
and dead slots get the fill (accepted length 0, draft token -1, packed mask 0).
Source: docs/requirements.md R-82, R-84, R-85.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, row_of

THREADS = 128
_TYPES = {"int32": torch.int32, "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def gather_rows_reference(source: Tensor, index: Tensor, fill: int) -> Tensor:
    """`[n, ...]` rows of `source: [m, ...]` by `index: [n]`, `fill` (its bits, for 4-byte words) where negative."""
    taken = source[index.clamp_min(0).long()].contiguous()
    words = taken.view(torch.int32)
    words[index < 0] = fill
    return taken


def make_gather_rows(isa: Any, *, vector: int, overlap: bool) -> Any:
    """Grid (tiles of a row, rows), a thread `vector` 4-byte words."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64

    def kernel(source: Any, index: Any, out: Any, pieces: Any, fill: Any) -> None:
        piece, row = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), i64(cuda.blockIdx.y)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        if piece < pieces:
            # One load deep: the index; a row of index -1 is filled and not read.
            place = isa.load_u32(index + row * 4)
            target = out + (row * pieces + piece) * (vector * 4)
            at = source + (i64(place) * pieces + piece) * (vector * 4)
            if vector == 4:
                words = (fill, fill, fill, fill)
                if place >= 0:
                    words = isa.load_u32x4(at)
                isa.store_u32x4(target, words[0], words[1], words[2], words[3])
            else:
                word = fill
                if place >= 0:
                    word = isa.load_u32(at)
                isa.store_u32(target, word)

    return kernel


def gather_rows_variant(arch: str, vector: int) -> Variant:
    """The gather in pieces of `vector` words, 1 or 4."""
    return Variant(
        name=f"gather_rows_{vector}",
        make=make_gather_rows,
        constants={"vector": vector, "overlap": overlaps(arch)},
        parameters=parameters("source:in index:in out:out pieces:i32 fill:i32"),
        threads=THREADS,
        max_registers=32,
        dependent=overlaps(arch),
    )


def gather_rows(arch: str, source: Tensor, index: Tensor, out: Tensor, fill: int = 0) -> list[Launch]:
    """`out: [n, ...]` from `source: [m, ...]` of the same dtype, `index: [n]` int32, `fill` a 4-byte pattern.

    Raises:
        KernelLimit: a row is not a whole number of 4-byte words.
    """
    row_bytes = out.nbytes // len(out)
    if row_bytes % 4:
        raise KernelLimit(f"rows of {row_bytes} bytes", "a multiple of 4", "pad the rows")
    vector = 4 if row_bytes % 16 == 0 else 1
    pieces = row_bytes // (4 * vector)
    values: dict[str, Any] = {"source": source, "index": index, "out": out, "pieces": pieces, "fill": fill}
    return [gather_rows_variant(arch, vector).launch((-(-pieces // THREADS), len(out)), **values)]


def gather_rows_meaning(source: Tensor, index: Tensor, out: Tensor, fill: int = 0) -> None:
    """What `gather_rows` computes, in plain torch."""
    out.copy_(gather_rows_reference(source, index, fill))


GATHER_ROWS = Op("gather_rows", gather_rows, gather_rows_meaning)


def gather_rows_cost(rows: int, row_bytes: int) -> Cost:
    """Every row in and out, and its index."""
    return Cost(rows * (2 * row_bytes + 4))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    shape = (case["sources"], case["width"])
    values = torch.randint(-99, 99, shape, generator=generator, device=device).to(_TYPES[case["type"]])
    index = torch.randint(case["sources"], (case["rows"],), generator=generator, device=device, dtype=torch.int32)
    if case["rows"] > 1:
        index[1] = -1
    return {"source": values, "index": index}


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    source = inputs["source"]
    return {"out": poison(case["rows"], case["width"], dtype=source.dtype, device=source.device)}


CARD = Card(
    name="gather_rows",
    equation="out[i] = source[index[i]], or the fill where index[i] < 0",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: {"out": gather_rows_reference(**inputs, fill=case["fill"])},
    launches=lambda arch, case, inputs, outputs: gather_rows(arch, **inputs, **outputs, fill=case["fill"]),
    cost=lambda case: gather_rows_cost(case["rows"], case["width"] * _TYPES[case["type"]].itemsize),
    variants=lambda arch: [gather_rows_variant(arch, 4)],
    slow_variants=lambda arch: [gather_rows_variant(arch, 1)],
    cases=(
        {"rows": 5, "sources": 3, "width": 24, "type": "bf16", "fill": 0},
        {"rows": 3, "sources": 4, "width": 5, "type": "int32", "fill": -1},
    ),
    slow_cases=({"rows": 2, "sources": 2, "width": 1100, "type": "f16", "fill": 0},),
    shapes=tuple(
        {"rows": rows, "sources": 64, "width": width, "type": "bf16", "fill": 0}
        for rows in (1, 4, 64) for width in (64, 12288)
    ),
    hand_counts=(({"rows": 3, "width": 10, "type": "int32"}, Cost(3 * 84)),),
    exact=frozenset({"out"}),
    alone=alone("rows", "index"),
    row_of=row_of,
    n_rows=count("rows"),
)  # fmt: skip
