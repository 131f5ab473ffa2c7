"""What an EAGLE-1 head's fc reads: a token's embedding first, the state before it second, side by side.

x = [table[token], state], where a state of the target is normed by its final norm and one fed back is taken as it is.
Source: EAGLE, arXiv 2401.15077, section 3; SafeAILab/EAGLE, eagle/model/cnets1.py, `Model.forward`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, make_store, make_unpack, row_of, row_threads
from eagle3core.kernels.isa.reductions import make_block_sum
from eagle3core.kernels.layer.rms_norm import EPS, rms_norm_reference


def feature_input_reference(tokens: Tensor, table: Tensor, state: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """`[rows, 2 E]` from target ids `tokens: [rows]`, the embedding `table: [V, E]` and `state: [rows, E]`."""
    normed = state if gain is None else rms_norm_reference(state, gain, eps)
    return torch.cat([table[tokens.clamp_min(0).long()], normed], dim=-1)


def make_feature_input(
    isa: Any, *, dtype: str, width: int, threads: int, pieces: int, normed: bool, overlap: bool
) -> Any:
    """Block (row, half); the token's table row is read only after the wait, since a kernel chose the token."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    unpack, store, low, high = make_unpack(isa, dtype), make_store(isa, dtype), isa.LOW[dtype], isa.HIGH[dtype]
    warps, kept, words, vectors = threads // 32, pieces * 8, pieces * 4, width // 8
    block_sum, inverse_width, zero, one = (
        make_block_sum(isa, warps),
        np.float32(1 / width),
        np.float32(0),
        np.float32(1),
    )

    def kernel(tokens: Any, table: Any, state: Any, gain: Any, x: Any, eps: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        row, half = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        scratch = isa.shared_address(cuda.shared.array(warps, f32))
        values = cuda.local.array(kept, f32)
        gains = cuda.local.array(words, i32)
        if overlap:
            isa.let_next_start()
        # The gain is constant: read before the wait.
        for p in range(pieces):
            for i in range(4):
                gains[p * 4 + i] = i32(0)
            if normed and tid + p * threads < vectors:
                loaded = isa.load_u32x4_const(gain + (tid + p * threads) * 16)
                for i in range(4):
                    gains[p * 4 + i] = loaded[i]
        if overlap:
            isa.wait_previous()
        source = state + i64(row) * (width * 2)
        if half == 0:
            source = table + i64(max(isa.load_u32(tokens + i64(row) * 4), 0)) * (width * 2)
        squares = zero
        for p in range(pieces):
            for i in range(8):
                values[p * 8 + i] = zero
            if tid + p * threads < vectors:
                unpack(isa.load_u32x4(source + (tid + p * threads) * 16), values, p * 8)
            for i in range(8):
                squares = squares + values[p * 8 + i] * values[p * 8 + i]
        scale = one
        if normed and half == 1:  # a block has one half, so all its threads meet in the sum or none does
            scale = isa.rsqrt(block_sum(squares, scratch, tid) * inverse_width + eps)
        # [row][embedding, state][width]
        target = x + (i64(row) * 2 + half) * (width * 2)
        for p in range(pieces):
            if tid + p * threads < vectors:
                if normed and half == 1:
                    for i in range(4):
                        values[p * 8 + 2 * i] = values[p * 8 + 2 * i] * scale * low(gains[p * 4 + i])
                        values[p * 8 + 2 * i + 1] = values[p * 8 + 2 * i + 1] * scale * high(gains[p * 4 + i])
                store(target + (tid + p * threads) * 16, values, p * 8)

    return kernel


def feature_input_variant(arch: str, dtype: str, width: int, normed: bool) -> Variant:
    """Rows of halves of `width`; `normed`: the state's half is normed."""
    threads, pieces = row_threads(width)
    return Variant(
        name=f"feature_input_{dtype}_{width}{'_normed' if normed else ''}",
        make=make_feature_input,
        constants={
            "dtype": dtype, "width": width, "threads": threads, "pieces": pieces, "normed": normed,
            "overlap": overlaps(arch),
        },
        parameters=parameters("tokens:in table:const state:in gain:const x:out eps:f32"),
        threads=threads,
        max_registers=64 if pieces <= 2 else 112,  # a piece in flight is 8 values and 4 words of gains
        instructions={"SHFL": 5, "MUFU": 1} if normed else {},
        dependent=overlaps(arch),
    )  # fmt: skip


def feature_input(
    arch: str, tokens: Tensor, table: Tensor, state: Tensor, gain: Tensor | None, x: Tensor, eps: float
) -> list[Launch]:
    """`x: [rows, 2 E]` from `tokens: [rows]` int32 target ids (a negative one counts as 0), `table: [V, E]` and
    `state: [rows, E]`, normed with `gain: [E]` where there is one.

    Raises:
        KernelLimit: E is not a multiple of 8 up to 16384.
    """
    variant = feature_input_variant(arch, DTYPES[state.dtype], state.shape[1], gain is not None)
    return [
        variant.launch((len(state), 2), tokens=tokens, table=table, state=state, gain=gain, x=x, eps=eps),
    ]


def feature_input_meaning(
    tokens: Tensor, table: Tensor, state: Tensor, gain: Tensor | None, x: Tensor, eps: float
) -> None:
    """What `feature_input` computes, in plain torch, for any width and dtype."""
    x.copy_(feature_input_reference(tokens, table, state, gain, eps))


FEATURE_INPUT = Op("feature_input", feature_input, feature_input_meaning)


def feature_input_cost(rows: int, width: int, normed: bool) -> Cost:
    """A table row and a state in and two out a row; the gain once; the token."""
    return Cost(rows * (width * 2 * 4 + 4) + width * 2 * normed, rows * width * 4 * normed)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    rows, vocabulary, width = case["rows"], case["vocabulary"], case["width"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case["dtype"])

    tokens = torch.randint(vocabulary, (rows,), generator=generator, device=device, dtype=torch.int32)
    tokens[-1] = -1  # what a choice among logits that are not finite gives
    made = {"tokens": tokens, "table": normal(vocabulary, width), "state": 4 * normal(rows, width)}
    return {**made, "gain": 1 + normal(width) / 8} if case["normed"] else made


def _operands(inputs: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return inputs["tokens"], inputs["table"], inputs["state"], inputs.get("gain")


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    state = inputs["state"]
    return {"x": poison(len(state), 2 * case["width"], dtype=state.dtype, device=state.device)}


_BF16 = torch.bfloat16

CARD = Card(
    name="feature_input",
    equation="x = [table[token], rms_norm(state) * gain], or [table[token], state]",
    source="EAGLE, arXiv 2401.15077, section 3",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: {"x": feature_input_reference(*_operands(inputs), eps=EPS)},
    launches=lambda arch, case, inputs, outputs: feature_input(arch, *_operands(inputs), x=outputs["x"], eps=EPS),
    cost=lambda case: feature_input_cost(case["rows"], case["width"], case["normed"]),
    variants=lambda arch: [feature_input_variant(arch, "bf16", 4096, normed) for normed in (True, False)],
    slow_variants=lambda arch: [feature_input_variant(arch, "f16", width, True) for width in (4096, 8192)],
    cases=(
        {"rows": 3, "width": 40, "vocabulary": 7, "normed": True, "dtype": _BF16},
        {"rows": 2, "width": 24, "vocabulary": 5, "normed": False, "dtype": _BF16},
    ),
    slow_cases=({"rows": 5, "width": 520, "vocabulary": 3, "normed": True, "dtype": torch.float16},),
    shapes=tuple(
        {"rows": rows, "width": 4096, "vocabulary": 8192, "normed": normed, "dtype": _BF16}
        for rows in (1, 4, 40) for normed in (True, False)
    ),
    hand_counts=(
        ({"rows": 3, "width": 16, "vocabulary": 9, "normed": True, "dtype": _BF16}, Cost(3 * (4 * 32 + 4) + 32, 192)),
    ),
    order={"threads": "at most 512, 16-byte pieces dealt round them", "sum": "butterfly, then warps in order"},
    alone=alone("rows", "tokens", "state"),
    row_of=row_of,
    n_rows=count("rows"),
)  # fmt: skip
