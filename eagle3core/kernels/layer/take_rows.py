"""Rows of up to four tables by one index, each into a table of its own: out_s[into[i]] = source_s[index[i]].

Side by side when the outputs are the parts of one wide row (the taps a draft reads), apart when they are not (the last
row of every sequence, with what its norm needs). A negative index gives zeros, a negative `into` writes nothing.
Source: docs/requirements.md R-82, R-85; EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Value, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count

THREADS = 128
MOST_SOURCES = 4
PIECE = 16  # bytes a thread moves


def take_rows_reference(sources: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """`[n, ...]` rows of every source `[m, ...]` by `index: [n]`, zeros where it is negative."""
    held = (index >= 0).view(-1, 1)
    return [torch.where(held, source[index.clamp_min(0).long()], 0) for source in sources]


def make_take_rows(isa: Any, *, sources: int, scatters: bool, overlap: bool) -> Any:
    """Grid (tiles of the widest row, rows, sources), a thread 16 bytes."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64

    def kernel(
        index: Any, into: Any, source0: Any, source1: Any, source2: Any, source3: Any, out0: Any, out1: Any, out2: Any,
        out3: Any, pieces0: Any, pieces1: Any, pieces2: Any, pieces3: Any, pitch0: Any, pitch1: Any, pitch2: Any,
        pitch3: Any,
    ) -> None:  # fmt: skip
        piece, row = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), i64(cuda.blockIdx.y)
        which = i32(cuda.blockIdx.z)
        # Kernel parameters have no index: which source a block copies is chosen before the wait.
        source, out, pieces, pitch = source0, out0, pieces0, pitch0
        if sources > 1 and which == 1:
            source, out, pieces, pitch = source1, out1, pieces1, pitch1
        if sources > 2 and which == 2:
            source, out, pieces, pitch = source2, out2, pieces2, pitch2
        if sources > 3 and which == 3:
            source, out, pieces, pitch = source3, out3, pieces3, pitch3
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        if piece < pieces:
            place, target = isa.load_u32(index + row * 4), row
            if scatters:
                target = i64(isa.load_u32(into + row * 4))
            words = (i32(0), i32(0), i32(0), i32(0))
            if place >= 0:
                words = isa.load_u32x4(source + (i64(place) * pieces + piece) * PIECE)
            if target >= 0:
                isa.store_u32x4(out + (target * pitch + piece) * PIECE, words[0], words[1], words[2], words[3])

    return kernel


def take_rows_variant(arch: str, sources: int, scatters: bool) -> Variant:
    """The copy of rows of `sources` tables.

    Raises:
        KernelLimit: none, or more than four.
    """
    if not 1 <= sources <= MOST_SOURCES:
        raise KernelLimit(f"{sources} tables", f"1..{MOST_SOURCES}", "launch it twice")
    numbered = [f"{name}{i}:{role}" for name, role in (("source", "in"), ("out", "out"), ("pieces", "i32"),
                ("pitch", "i32")) for i in range(MOST_SOURCES)]  # fmt: skip
    return Variant(
        name=f"take_rows_{sources}{'_into' if scatters else ''}",
        make=make_take_rows,
        constants={"sources": sources, "scatters": scatters, "overlap": overlaps(arch)},
        parameters=parameters(" ".join(["index:in into:in", *numbered])),
        threads=THREADS,
        max_registers=48,
        dependent=overlaps(arch),
    )


def take_rows(
    arch: str,
    sources: Sequence[Tensor],
    index: Tensor,
    outs: Sequence[Tensor],
    *,
    into: Tensor | None = None,
) -> list[Launch]:
    """Rows `index: [n]` int32 of every `sources[s]: [m, w_s]` to rows 0..n-1, or `into: [n]`, of `outs[s]: [n', w_s]`.

    An output may be columns of a wider table whose rows are a multiple of 16 bytes.

    Raises:
        KernelLimit: no or too many tables, or rows that are not whole 16-byte pieces.
    """
    variant = take_rows_variant(arch, len(sources), into is not None)
    values: dict[str, Value] = {"index": index, "into": into}
    widest = 0
    for i in range(MOST_SOURCES):
        here = i < len(sources)
        pieces, pitch = (_pieces(sources[i]), _pieces(outs[i])) if here else (0, 0)
        widest = max(widest, pieces)
        values |= {f"source{i}": sources[i] if here else None, f"out{i}": _rest(outs[i]) if here else None}
        values |= {f"pieces{i}": pieces, f"pitch{i}": pitch}
    return [variant.launch((-(-widest // THREADS), len(index), len(sources)), **values)]


def take_rows_meaning(
    sources: Sequence[Tensor],
    index: Tensor,
    outs: Sequence[Tensor],
    *,
    into: Tensor | None = None,
) -> None:
    """What `take_rows` computes, in plain torch, for any number of tables and any width."""
    for rows, out in zip(take_rows_reference(sources, index), outs, strict=True):
        if into is None:
            out[: len(index)] = rows
        else:
            out[into[into >= 0].long()] = rows[into >= 0]


TAKE_ROWS = Op("take_rows", take_rows, take_rows_meaning)


def _pieces(table: Tensor) -> int:
    pitch = table.stride(0) * table.element_size()
    if pitch % PIECE or table.data_ptr() % PIECE or table.shape[1] * table.element_size() % PIECE:
        raise KernelLimit(f"rows of {pitch} bytes", f"a multiple of {PIECE}, aligned", "pad the rows")
    return pitch // PIECE


def _rest(table: Tensor) -> Tensor:
    """The storage from the table's first element to its last, as the flat tensor a launch takes."""
    n = (len(table) - 1) * table.stride(0) + table.shape[1]
    return table.as_strided((n,), (1,))


def take_rows_cost(rows: int, row_bytes: int) -> Cost:
    """Every row in and out, and its index; `row_bytes` of all tables together."""
    return Cost(rows * (2 * row_bytes + 4))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    made: Tensors = {}
    for i, width in enumerate(case["widths"]):
        values = torch.randn(case["sources"], width, generator=generator, device=device)
        made[f"source{i}"] = values.to(case["dtype"])
    index = torch.randint(case["sources"], (case["rows"],), generator=generator, device=device, dtype=torch.int32)
    if case["rows"] > 1:
        index[1] = -1
    made["index"] = index
    if case.get("into"):
        made["into"] = torch.randperm(case["rows"], generator=generator, device=device).int()
    return made


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    rows, device = case["rows"], inputs["index"].device
    if case.get("beside"):
        return {"out": poison(rows, sum(case["widths"]), dtype=case["dtype"], device=device)}
    return {f"out{i}": poison(rows, w, dtype=case["dtype"], device=device) for i, w in enumerate(case["widths"])}


def _sources(case: Case, inputs: Tensors) -> list[Tensor]:
    return [inputs[f"source{i}"] for i in range(len(case["widths"]))]


def _columns(table: Tensor, widths: Sequence[int]) -> list[Tensor]:
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [table[:, at : at + width] for at, width in zip(starts, widths, strict=True)]


def _reference(case: Case, inputs: Tensors) -> Tensors:
    taken = take_rows_reference(_sources(case, inputs), inputs["index"])
    if case.get("into"):
        order = inputs["into"].long().argsort()
        taken = [rows[order] for rows in taken]
    if case.get("beside"):
        return {"out": torch.cat(taken, dim=1)}
    return {f"out{i}": rows for i, rows in enumerate(taken)}


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    outs = _columns(outputs["out"], case["widths"]) if case.get("beside") else list(outputs.values())
    return take_rows(arch, _sources(case, inputs), inputs["index"], outs, into=inputs.get("into"))


_BF16 = torch.bfloat16

CARD = Card(
    name="take_rows",
    equation="out_s[into[i]] = source_s[index[i]], zeros where index[i] < 0",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: take_rows_cost(case["rows"], sum(case["widths"]) * case["dtype"].itemsize),
    variants=lambda arch: [take_rows_variant(arch, 3, False)],
    slow_variants=lambda arch: [
        take_rows_variant(arch, n, into) for n in (1, 2, 3, 4) for into in (False, True) if (n, into) != (3, False)
    ],
    cases=(
        {"rows": 3, "sources": 4, "widths": (16, 16, 16), "beside": True, "dtype": _BF16},
        {"rows": 3, "sources": 5, "widths": (8, 24), "into": True, "dtype": _BF16},
    ),
    slow_cases=(
        {"rows": 2, "sources": 3, "widths": (1040,), "dtype": torch.float16},
        {"rows": 4, "sources": 9, "widths": (8, 16, 4, 12), "dtype": torch.float32},
    ),
    shapes=tuple(
        {"rows": rows, "sources": 64, "widths": [4096] * 3, "beside": True, "dtype": _BF16} for rows in (1, 4, 16)
    ),
    hand_counts=(({"rows": 3, "widths": (8, 16), "dtype": _BF16}, Cost(3 * (96 + 4))),),
    exact=frozenset({"out", "out0", "out1", "out2", "out3"}),
    alone=alone("rows", "index"),
    row_of=lambda case, inputs, outputs, row: {
        name: output[int(inputs["into"][row]) if case.get("into") else row] for name, output in outputs.items()
    },
    n_rows=lambda case: 0 if case.get("into") else count("rows")(case),
)  # fmt: skip
