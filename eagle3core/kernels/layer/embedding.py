"""Embedding gather: h = table[map[token]], where the map takes draft-vocabulary ids to target ids.

With a gain it also writes what a GEMM with a fused norm reads (see `gemm.epilogue`): h * gain, and the sum of squares
of every 16 columns, zeros after the last. A negative token marks an empty row and gives zeros.
Source: EAGLE-3, arXiv 2503.01840, section 3; docs/requirements.md R-93, R-96.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, make_store, make_unpack, one_up, row_of, row_threads

PARTIAL = 16  # columns of one partial sum of squares
MOST_THREADS = 128  # a row of 4096 is spread over four blocks, so that few rows use many processors
PITCH = 128  # partial sums of a row are stored in a multiple of this many


def partials_pitch(width: int) -> int:
    """Floats of a row of partial sums of squares."""
    return -(-width // (PARTIAL * PITCH)) * PITCH


def embedding_reference(tokens: Tensor, table: Tensor, draft_to_target: Tensor | None) -> tuple[Tensor, Tensor]:
    """Target ids `[rows]` (-1 for an empty row) and their rows of `table: [V, E]`, zeros for an empty row."""
    is_empty = tokens < 0
    clamped = tokens.clamp_min(0).long()
    ids = clamped if draft_to_target is None else draft_to_target[clamped].long()
    rows = table[ids].masked_fill(is_empty[:, None], 0)
    return torch.where(is_empty, -1, ids), rows


def partial_squares_reference(h: Tensor) -> Tensor:
    """Sums of squares `[rows, partials_pitch(E)]` of every 16 columns of `h: [rows, E]`, fp32 (fp64 for a wide `h`)."""
    wide = h.to(one_up(h.dtype))
    padded = torch.nn.functional.pad(wide, (0, -h.shape[1] % PARTIAL)) if h.shape[1] % PARTIAL else wide
    squares = padded.square().view(len(h), -1, PARTIAL).sum(dim=-1)
    return torch.nn.functional.pad(squares, (0, partials_pitch(h.shape[1]) - squares.shape[1]))


def make_embedding(isa: Any, *, dtype: str, width: int, threads: int, maps: bool, scales: bool, overlap: bool) -> Any:
    """Grid (rows, pieces of a row), a thread 8 columns; two neighbouring ones hold the 16 of a partial sum."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    unpack, store, low, high = make_unpack(isa, dtype), make_store(isa, dtype), isa.LOW[dtype], isa.HIGH[dtype]
    vectors, zero = width // 8, np.float32(0)
    partials, pitch, blocks = width // PARTIAL, partials_pitch(width), -(-width // (8 * threads))

    def kernel(
        tokens: Any, draft_to_target: Any, table: Any, gain: Any, ids: Any, h: Any, scaled: Any, sums: Any
    ) -> None:
        tid, row = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        vector = i32(cuda.blockIdx.y * threads + tid)
        values = cuda.local.array(8, f32)
        loaded = gains = (i32(0), i32(0), i32(0), i32(0))
        if overlap:
            isa.let_next_start()
        if scales and vector < vectors:
            gains = isa.load_u32x4_const(gain + vector * 16)
        if overlap:
            isa.wait_previous()
        token = isa.load_u32(tokens + row * 4)
        if maps and token >= 0:
            token = isa.load_u32(draft_to_target + i64(token) * 4)
        if vector < vectors and token >= 0:
            loaded = isa.load_u32x4_const(table + i64(token) * (width * 2) + vector * 16)
        if vector == 0:
            isa.store_u32(ids + row * 4, max(token, -1))
        if vector < vectors:
            isa.store_u32x4(h + row * (width * 2) + vector * 16, loaded[0], loaded[1], loaded[2], loaded[3])
        if scales:
            unpack(loaded, values, 0)
            squares = zero
            for i in range(8):
                squares = squares + values[i] * values[i]
            # 16 columns: 8 of a lane upwards, then its neighbour's. All lanes take part, also those past the row's end.
            squares = squares + isa.shuffle_xor_f32(squares, 1)
            if vector < vectors:
                for i in range(4):
                    values[2 * i] = values[2 * i] * low(gains[i])
                    values[2 * i + 1] = values[2 * i + 1] * high(gains[i])
                store(scaled + row * (width * 2) + vector * 16, values, 0)
                if (tid & 1) == 0:
                    isa.store_f32(sums + (row * pitch + (vector >> 1)) * 4, squares)
            column = i32(partials + vector)
            # Zeros up to a whole group of partial sums, as readers take four a lane without asking.
            while column < pitch:
                isa.store_f32(sums + (row * pitch + column) * 4, zero)
                column = i32(column + blocks * threads)

    return kernel


def embedding_variant(arch: str, dtype: str, width: int, *, maps: bool, scales: bool) -> Variant:
    """The gather for rows of `width`, with a draft-to-target map or not, with h * gain and partial sums or not."""
    threads = min(row_threads(width)[0], MOST_THREADS)
    return Variant(
        name=f"embedding_{dtype}_{width}{'_map' if maps else ''}{'_scale' if scales else ''}",
        make=make_embedding,
        constants={
            "dtype": dtype, "width": width, "threads": threads, "maps": maps, "scales": scales,
            "overlap": overlaps(arch),
        },
        parameters=parameters(
            "tokens:in draft_to_target:const table:const gain:const ids:out h:out scaled:out sums:out"
        ),
        threads=threads,
        max_registers=64,
        dependent=overlaps(arch),
    )  # fmt: skip


def embedding(
    arch: str,
    tokens: Tensor,
    table: Tensor,
    ids: Tensor,
    h: Tensor,
    *,
    draft_to_target: Tensor | None = None,
    gain: Tensor | None = None,
    scaled: Tensor | None = None,
    sums: Tensor | None = None,
) -> list[Launch]:
    """`h: [rows, E]` and `ids: [rows]` int32 from `tokens: [rows]` int32.

    With `gain: [E]` also `scaled: [rows, E]` = h * gain and `sums: [rows, partials_pitch(E)]` fp32; E is then a
    multiple of 16.

    Raises:
        KernelLimit: E is not a multiple of 8 up to 16384.
    """
    variant = embedding_variant(
        arch, DTYPES[h.dtype], h.shape[1], maps=draft_to_target is not None, scales=gain is not None
    )
    blocks = -(-h.shape[1] // (8 * variant.threads))
    return [
        variant.launch(
            (len(h), blocks), tokens=tokens, draft_to_target=draft_to_target, table=table, gain=gain, ids=ids, h=h,
            scaled=scaled, sums=sums,
        )
    ]  # fmt: skip


def embedding_meaning(
    tokens: Tensor,
    table: Tensor,
    ids: Tensor,
    h: Tensor,
    *,
    draft_to_target: Tensor | None = None,
    gain: Tensor | None = None,
    scaled: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """What `embedding` computes, in plain torch, for any width and dtype."""
    named, rows = embedding_reference(tokens, table, draft_to_target)
    ids.copy_(named)
    h.copy_(rows)
    if gain is not None and scaled is not None and sums is not None:
        scaled.copy_(rows * gain)
        sums.copy_(partial_squares_reference(rows))


EMBEDDING = Op("embedding", embedding, embedding_meaning)


def embedding_cost(rows: int, width: int, *, maps: bool, scales: bool) -> Cost:
    """A row in and out, the token and its id; the map's entry; h * gain out, the partial sums, the gain once."""
    row = width * 2 * 2 + 8 + (4 if maps else 0) + (width * 2 + partials_pitch(width) * 4 if scales else 0)
    return Cost(rows * row + (width * 2 if scales else 0), rows * width * 3 if scales else 0)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    rows, vocabulary, width = case["rows"], case["vocabulary"], case["width"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case["dtype"])

    tokens = torch.randint(case["ids"], (rows,), generator=generator, device=device, dtype=torch.int32)
    if rows > 2:
        tokens[1] = -1
    made = {"tokens": tokens, "table": normal(vocabulary, width)}
    if case["maps"]:
        order = torch.randperm(vocabulary, generator=generator, device=device)[: case["ids"]]
        made["draft_to_target"] = order.sort().values.int()
    return {**made, "gain": 1 + normal(width) / 8} if case["scales"] else made


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    rows, width, table = case["rows"], case["width"], inputs["table"]
    made = {
        "ids": poison(rows, dtype=torch.int32, device=table.device),
        "h": poison(rows, width, dtype=table.dtype, device=table.device),
    }
    if case["scales"]:
        made["scaled"] = torch.full_like(made["h"], float("nan"))
        made["sums"] = poison(rows, partials_pitch(width), dtype=torch.float32, device=table.device)
    return made


def _reference(case: Case, inputs: Tensors) -> Tensors:
    ids, h = embedding_reference(inputs["tokens"], inputs["table"], inputs.get("draft_to_target"))
    made = {"ids": ids.int(), "h": h}
    return {**made, "scaled": h * inputs["gain"], "sums": partial_squares_reference(h)} if case["scales"] else made


_BF16 = torch.bfloat16

CARD = Card(
    name="embedding",
    equation="h = table[map[token]]; scaled = h * gain; sums = sum over 16 columns of h^2",
    source="EAGLE-3, arXiv 2503.01840, section 3",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=lambda arch, case, inputs, outputs: embedding(arch, **inputs, **outputs),
    cost=lambda case: embedding_cost(case["rows"], case["width"], maps=case["maps"], scales=case["scales"]),
    variants=lambda arch: [embedding_variant(arch, "bf16", 4096, maps=True, scales=True)],
    slow_variants=lambda arch: [
        embedding_variant(arch, "f16", 4096, maps=False, scales=True),
        *(embedding_variant(arch, "bf16", width, maps=m, scales=s) for width in (2880, 4096, 8192)
          for m, s in ((False, False), (False, True))),
    ],
    cases=(
        {"rows": 3, "width": 336, "vocabulary": 11, "ids": 6, "maps": True, "scales": True, "dtype": _BF16},
        {"rows": 3, "width": 40, "vocabulary": 5, "ids": 5, "maps": False, "scales": False, "dtype": torch.float16},
    ),
    slow_cases=(
        {"rows": 2, "width": 4112, "vocabulary": 5, "ids": 5, "maps": False, "scales": True, "dtype": _BF16},
        {"rows": 5, "width": 2880, "vocabulary": 9, "ids": 3, "maps": True, "scales": True, "dtype": torch.float16},
    ),
    shapes=tuple(
        {"rows": rows, "width": 4096, "vocabulary": 8192, "ids": 8000, "maps": m, "scales": s, "dtype": _BF16}
        for rows in (1, 4, 64) for m, s in ((False, True), (True, False))
    ),
    hand_counts=(
        ({"rows": 3, "width": 32, "maps": False, "scales": False}, Cost(3 * (64 + 64 + 8))),
        ({"rows": 3, "width": 32, "maps": True, "scales": True}, Cost(3 * (64 + 64 + 12 + 64 + 512) + 64, 288)),
    ),
    order={"sum": "8 columns in order, then the neighbour's 8"},
    exact=frozenset({"h"}),
    alone=alone("rows", "tokens"),
    row_of=row_of,
    n_rows=count("rows"),
)  # fmt: skip
