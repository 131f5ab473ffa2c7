"""The draft layer's attention input: normed token embedding first, normed hidden state second, side by side.

x = [norm(table[token]) * embed_gain, norm(hidden) * hidden_gain]. Two blocks a row, one for each half. A beam of a tree
continues from rows of the pass before, in an order of its own: given `rows`, row i reads hidden[rows[i]] and leaves it
in `taken` as well, where the pass finds its residual stream.
Source: EAGLE-3, arXiv 2503.01840, section 3; docs/requirements.md R-23.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, make_store, make_unpack, row_of, row_threads
from eagle3core.kernels.isa.reductions import make_block_sum
from eagle3core.kernels.layer.rms_norm import EPS, rms_norm_reference


class TakenRows(NamedTuple):
    """Which rows of `hidden` are read, `rows: [n]` int32 (none negative), and `taken: [n, E]` where they are put."""

    rows: Tensor
    taken: Tensor


def draft_input_reference(
    tokens: Tensor, table: Tensor, hidden: Tensor, embed_gain: Tensor, hidden_gain: Tensor, eps: float
) -> Tensor:
    """`[rows, 2 E]` from target ids `tokens: [rows]`, the embedding `table: [V, E]` and `hidden: [rows, E]`."""
    embedded = table[tokens.clamp_min(0).long()]
    normed = (rms_norm_reference(embedded, embed_gain, eps), rms_norm_reference(hidden, hidden_gain, eps))
    return torch.cat(normed, dim=-1)


def make_draft_input(
    isa: Any, *, dtype: str, width: int, threads: int, pieces: int, takes: bool, overlap: bool
) -> Any:  # fmt: skip
    """Block (row, half); the token's table row is read only after the wait, since a kernel chose the token.

    With `takes` the other half's row is chosen by a kernel too, and is copied as it is read.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    unpack, store, low, high = make_unpack(isa, dtype), make_store(isa, dtype), isa.LOW[dtype], isa.HIGH[dtype]
    warps, kept, words, vectors = threads // 32, pieces * 8, pieces * 4, width // 8
    block_sum, inverse_width, zero = make_block_sum(isa, warps), np.float32(1 / width), np.float32(0)

    def kernel(
        tokens: Any, table: Any, hidden: Any, rows: Any, embed_gain: Any, hidden_gain: Any, taken: Any, x: Any, eps: Any
    ) -> None:
        tid = i32(cuda.threadIdx.x)
        row, half = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        scratch = isa.shared_address(cuda.shared.array(warps, f32))
        values = cuda.local.array(kept, f32)
        gains = cuda.local.array(words, i32)
        gain = embed_gain
        if half == 1:
            gain = hidden_gain
        if overlap:
            isa.let_next_start()
        # Both gains are constant: read before the wait.
        for p in range(pieces):
            for i in range(4):
                gains[p * 4 + i] = i32(0)
            if tid + p * threads < vectors:
                loaded = isa.load_u32x4_const(gain + (tid + p * threads) * 16)
                for i in range(4):
                    gains[p * 4 + i] = loaded[i]
        if overlap:
            isa.wait_previous()
        source = hidden
        if takes and half == 1:
            source += i64(isa.load_u32(rows + i64(row) * 4)) * (width * 2)
        elif half == 1:
            source += i64(row) * (width * 2)
        else:
            source = table + i64(max(isa.load_u32(tokens + i64(row) * 4), 0)) * (width * 2)
        squares = zero
        for p in range(pieces):
            for i in range(8):
                values[p * 8 + i] = zero
            if tid + p * threads < vectors:
                loaded = isa.load_u32x4(source + (tid + p * threads) * 16)
                unpack(loaded, values, p * 8)
                if takes and half == 1:
                    copy = taken + i64(row) * (width * 2) + (tid + p * threads) * 16
                    isa.store_u32x4(copy, loaded[0], loaded[1], loaded[2], loaded[3])
            for i in range(8):
                squares = squares + values[p * 8 + i] * values[p * 8 + i]
        scale = isa.rsqrt(block_sum(squares, scratch, tid) * inverse_width + eps)
        # [row][embedding, hidden][width]
        target = x + (i64(row) * 2 + half) * (width * 2)
        for p in range(pieces):
            if tid + p * threads < vectors:
                for i in range(4):
                    values[p * 8 + 2 * i] = values[p * 8 + 2 * i] * scale * low(gains[p * 4 + i])
                    values[p * 8 + 2 * i + 1] = values[p * 8 + 2 * i + 1] * scale * high(gains[p * 4 + i])
                store(target + (tid + p * threads) * 16, values, p * 8)

    return kernel


def draft_input_variant(arch: str, dtype: str, width: int, *, takes: bool = False) -> Variant:
    """The two norms over halves of `width`; `takes`: of rows by an index."""
    threads, pieces = row_threads(width)
    return Variant(
        name=f"draft_input_{dtype}_{width}{'_taken' if takes else ''}",
        make=make_draft_input,
        constants={
            "dtype": dtype, "width": width, "threads": threads, "pieces": pieces, "takes": takes,
            "overlap": overlaps(arch),
        },
        parameters=parameters(
            "tokens:in table:const hidden:in rows:in embed_gain:const hidden_gain:const taken:out x:out eps:f32"
        ),
        threads=threads,
        max_registers=64 if pieces <= 2 else 112,  # a piece in flight is 8 values and 4 words of gains
        instructions={"SHFL": 5, "MUFU": 1},
        dependent=overlaps(arch),
    )  # fmt: skip


def draft_input(
    arch: str,
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_gain: Tensor,
    hidden_gain: Tensor,
    x: Tensor,
    eps: float,
    by: TakenRows | None = None,
) -> list[Launch]:
    """`x: [rows, 2 E]` from `tokens: [rows]` int32 target ids (a negative one counts as 0), `table: [V, E]` and
    `hidden: [rows, E]`, or those of its rows that `by` names.

    Raises:
        KernelLimit: E is not a multiple of 8 up to 16384.
    """
    variant = draft_input_variant(arch, DTYPES[hidden.dtype], hidden.shape[1], takes=by is not None)
    rows, taken = by or (None, None)
    return [
        variant.launch(
            (len(x), 2), tokens=tokens, table=table, hidden=hidden, rows=rows, embed_gain=embed_gain,
            hidden_gain=hidden_gain, taken=taken, x=x, eps=eps,
        )
    ]  # fmt: skip


def draft_input_meaning(
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_gain: Tensor,
    hidden_gain: Tensor,
    x: Tensor,
    eps: float,
    by: TakenRows | None = None,
) -> None:
    """What `draft_input` computes, in plain torch, for any width and dtype."""
    if by is not None:
        hidden = by.taken.copy_(hidden[by.rows.long()])
    x.copy_(draft_input_reference(tokens, table, hidden, embed_gain, hidden_gain, eps))


DRAFT_INPUT = Op("draft_input", draft_input, draft_input_meaning)


def draft_input_cost(rows: int, width: int, *, takes: bool = False) -> Cost:
    """A table row and a hidden row in and two out a row; both gains once; the token. Taken: a number and a copy."""
    taken = rows * (width * 2 + 4) if takes else 0
    return Cost(rows * (width * 2 * 4 + 4) + 2 * width * 2 + taken, 2 * rows * width * 4)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    rows, vocabulary, width = case["rows"], case["vocabulary"], case["width"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case["dtype"])

    tokens = torch.randint(vocabulary, (rows,), generator=generator, device=device, dtype=torch.int32)
    tokens[-1] = -1  # what a choice among logits that are not finite gives
    held = case.get("held", rows)
    made = {"tokens": tokens, "table": normal(vocabulary, width), "hidden": 4 * normal(held, width)}
    made |= {"embed_gain": 1 + normal(width) / 8, "hidden_gain": 1 + normal(width) / 8}
    if case.get("takes"):
        made["rows"] = torch.randint(held, (rows,), generator=generator, device=device, dtype=torch.int32)
    return made


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    hidden, rows, width = inputs["hidden"], case["rows"], case["width"]
    shapes = {"x": 2 * width, **({"taken": width} if case.get("takes") else {})}
    return {name: poison(rows, n, dtype=hidden.dtype, device=hidden.device) for name, n in shapes.items()}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    read = {name: tensor for name, tensor in inputs.items() if name != "rows"}
    if not case.get("takes"):
        return {"x": draft_input_reference(**read, eps=EPS)}
    taken = inputs["hidden"][inputs["rows"].long()]
    return {"x": draft_input_reference(**{**read, "hidden": taken}, eps=EPS), "taken": taken}


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    read = {name: tensor for name, tensor in inputs.items() if name != "rows"}
    by = TakenRows(inputs["rows"], outputs["taken"]) if case.get("takes") else None
    return draft_input(arch, **read, x=outputs["x"], eps=EPS, by=by)


def _alone(case: Case, inputs: Tensors, row: int) -> tuple[Case, Tensors]:
    """The row by itself; one that is taken keeps its number among all of `hidden`."""
    return alone("rows", "tokens", "rows" if case.get("takes") else "hidden")(case, inputs, row)


_BF16 = torch.bfloat16

CARD = Card(
    name="draft_input",
    equation="x = [rms_norm(table[token]) * embed_gain, rms_norm(hidden) * hidden_gain]",
    source="EAGLE-3, arXiv 2503.01840, section 3",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: draft_input_cost(case["rows"], case["width"], takes=case.get("takes", False)),
    variants=lambda arch: [draft_input_variant(arch, "bf16", 4096)],
    slow_variants=lambda arch: [
        *(draft_input_variant(arch, *sizes) for sizes in (("bf16", 2880), ("bf16", 8192), ("f16", 4096))),
        *(draft_input_variant(arch, "bf16", width, takes=True) for width in (2880, 4096, 8192)),
    ],
    cases=(
        {"rows": 3, "width": 40, "vocabulary": 7, "dtype": _BF16},
        {"rows": 3, "width": 40, "vocabulary": 7, "dtype": _BF16, "takes": True, "held": 5},
    ),
    slow_cases=(
        {"rows": 2, "width": 4104, "vocabulary": 5, "dtype": _BF16},
        {"rows": 5, "width": 520, "vocabulary": 3, "dtype": torch.float16},
    ),
    shapes=(
        *({"rows": rows, "width": width, "vocabulary": 8192, "dtype": _BF16}
          for width in (4096, 2880) for rows in (1, 4, 40)),
        {"rows": 10, "width": 4096, "vocabulary": 8192, "dtype": _BF16, "takes": True, "held": 10},
    ),
    hand_counts=(
        ({"rows": 3, "width": 16, "vocabulary": 9, "dtype": _BF16}, Cost(3 * (4 * 32 + 4) + 64, 384)),
        ({"rows": 3, "width": 16, "vocabulary": 9, "takes": True}, Cost(3 * (5 * 32 + 8) + 64, 384)),
    ),
    exact=frozenset({"taken"}),
    order={"threads": "at most 512, 16-byte pieces dealt round them", "sum": "butterfly, then warps in order"},
    alone=_alone,
    row_of=row_of,
    n_rows=count("rows"),
)  # fmt: skip
