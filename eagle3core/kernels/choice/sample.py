"""A token drawn from each row of logits, at a temperature, from the whole distribution or its typical part.

p = softmax(logits / temperature). With epsilon > 0 tokens with p < min(epsilon, sqrt(epsilon) exp(-H(p))) are dropped
and the rest renormalised. The token is the first whose cumulative probability exceeds the row's uniform number, so a
row's token depends on nothing but its own logits and numbers. Temperature below 1e-6 gives the argmax. Three passes:
sums of pieces, masses of what is kept, the draw.
Source: typical acceptance, docs/requirements.md R-60 with 1.X-21; inverse-transform sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.choice.sample_kernels import (
    COLDEST,
    PIECE,
    THREADS,
    make_sample_draw,
    make_sample_masses,
    make_sample_sums,
)
from eagle3core.kernels.isa.by_row import alone, count, one_up, row_of

MOST_PIECES = THREADS // 2  # 524288 columns; the draw gives each piece a thread


def n_pieces(n_columns: int) -> int:
    """Blocks a row of the first two passes."""
    return -(-n_columns // PIECE)


def sample_reference(logits: Tensor, temperature: Tensor, epsilon: Tensor, uniform: Tensor) -> Tensor:
    """Drawn columns `[rows]` int64 of `logits: [rows, V]`; the rest `[rows]`, `uniform` in [0, 1)."""
    wide = one_up(logits.dtype)
    is_cold = (temperature < COLDEST)[:, None]
    scaled = logits.to(wide) / torch.where(is_cold, 1.0, temperature[:, None].to(wide))
    log_p = scaled.log_softmax(dim=-1)
    entropy = -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(dim=-1, keepdim=True)
    eps = epsilon[:, None].to(wide)
    threshold = torch.minimum(eps.log(), eps.log() / 2 - entropy)  # -inf for epsilon 0: everything is kept
    kept = torch.where(is_cold, scaled == scaled.max(dim=-1, keepdim=True).values, log_p >= threshold)
    mass = torch.where(kept, log_p.exp(), 0.0).cumsum(dim=-1)
    target = torch.where(is_cold, 0.0, uniform[:, None].to(wide)) * mass[:, -1:]
    return (kept & (mass > target)).int().argmax(dim=-1)


_SIGNATURES = {
    "sums": "logits:in temperature:in epsilon:in sums:out n_columns:i32 pieces:i32",
    "masses": "logits:in temperature:in uniform:in sums:in masses:out limits:out n_columns:i32",
    "draw": "logits:in masses:in limits:in ids:out n_columns:i32",
}


_MAKERS: dict[str, Callable[..., Any]] = {
    "sums": make_sample_sums,
    "masses": make_sample_masses,
    "draw": make_sample_draw,
}


def sample_variant(arch: str, what: str, dtype: str, pieces: int) -> Variant:
    """One pass: "sums" (which serves any number of pieces), "masses" or "draw".

    Raises:
        KernelLimit: more than 256 pieces (524288 columns).
    """
    if not 1 <= pieces <= MOST_PIECES:
        raise KernelLimit(f"{pieces * PIECE} columns", f"at most {MOST_PIECES * PIECE}", "use a smaller vocabulary")
    constants = {"dtype": dtype, "overlap": overlaps(arch)}
    return Variant(
        name=f"sample_{what}_{dtype}" + ("" if what == "sums" else f"_{pieces}"),
        make=_MAKERS[what],
        constants=constants if what == "sums" else {**constants, "pieces": pieces},
        parameters=parameters(_SIGNATURES[what]),
        threads=THREADS,
        max_registers=64,
        instructions={"MUFU": 8, "BAR": 1},
        dependent=overlaps(arch),
    )


def sample(
    arch: str,
    logits: Tensor,
    temperature: Tensor,
    epsilon: Tensor,
    uniform: Tensor,
    ids: Tensor,
    sums: Tensor,
    masses: Tensor,
    limits: Tensor,
) -> list[Launch]:
    """`ids: [rows]` int32 from `logits: [rows, V]` bf16 or fp16 and `temperature, epsilon, uniform: [rows]` f32.

    Scratch, f32: `sums: [rows, n, 4]`, `masses: [rows, n]`, `limits: [rows, 4]` with n = n_pieces(V). Uniform numbers
    lie in [0, 1); epsilon 0 keeps the whole distribution.

    Raises:
        KernelLimit: V is not a multiple of 8 up to 524288.
    """
    rows, n_columns = logits.shape
    if n_columns % 8:
        raise KernelLimit(f"{n_columns} logits a row", "a multiple of 8", "pad the vocabulary with -inf")
    dtype, pieces = DTYPES[logits.dtype], n_pieces(n_columns)
    read: dict[str, Any] = {"logits": logits, "n_columns": n_columns}
    first, second, third = (sample_variant(arch, what, dtype, pieces) for what in _SIGNATURES)
    return [
        first.launch((pieces, rows), **read, temperature=temperature, epsilon=epsilon, sums=sums, pieces=pieces),
        second.launch(
            (pieces, rows), **read, temperature=temperature, uniform=uniform, sums=sums, masses=masses, limits=limits
        ),
        third.launch((rows,), **read, masses=masses, limits=limits, ids=ids),
    ]


def sample_cost(rows: int, n_columns: int) -> Cost:
    """Every logit in once, though masses need sums of them all and read them again; three numbers in, an id out."""
    return Cost(rows * (n_columns * 2 + 16), rows * n_columns * 8, dependent_passes=3)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    rows = case["rows"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    temperature = torch.tensor([0.7, 0.0, 1.3, 1.0], device=device).repeat(rows)[:rows].contiguous()
    epsilon = torch.tensor([0.09, 0.3, 0.0], device=device).repeat(rows)[:rows].contiguous()
    uniform = torch.rand(rows, generator=generator, device=device)
    # Peaked, as a language model's are: the cumulative sums are then far apart where the draw usually falls.
    return {
        "logits": (6 * normal(rows, case["columns"])).to(case["dtype"]),
        "temperature": temperature,
        "epsilon": epsilon,
        "uniform": uniform,
    }


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    return {"ids": poison(case["rows"], dtype=torch.int32, device=inputs["logits"].device)}


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    rows, pieces, device = case["rows"], n_pieces(case["columns"]), inputs["logits"].device
    sums, masses, limits = (
        poison(*shape, dtype=torch.float32, device=device) for shape in ((rows, pieces, 4), (rows, pieces), (rows, 4))
    )
    return sample(arch, **inputs, ids=outputs["ids"], sums=sums, masses=masses, limits=limits)


CARD = Card(
    name="sample",
    equation="id = min{j : cumulative kept p[j] > uniform * kept p}; kept: p >= min(eps, sqrt(eps) exp(-H))",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: {"ids": sample_reference(**inputs).int()},
    launches=_launches,
    cost=lambda case: sample_cost(case["rows"], case["columns"]),
    variants=lambda arch: [sample_variant(arch, "draw", "bf16", n_pieces(128256))],
    slow_variants=lambda arch: [
        *(sample_variant(arch, what, "bf16", n_pieces(128256)) for what in ("sums", "masses")),
        *(sample_variant(arch, what, "f16", n_pieces(128256)) for what in _SIGNATURES),
        *(sample_variant(arch, what, "bf16", n_pieces(201088)) for what in ("masses", "draw")),
    ],
    cases=({"rows": 3, "columns": 2104, "dtype": torch.bfloat16},),
    slow_cases=(
        {"rows": 7, "columns": 72, "dtype": torch.float16},
        {"rows": 1, "columns": 70008, "dtype": torch.bfloat16},
    ),
    shapes=tuple({"rows": rows, "columns": 128256, "dtype": torch.bfloat16} for rows in (1, 4, 64)),
    hand_counts=(({"rows": 3, "columns": 1000}, Cost(3 * (2000 + 16), 24000, 3)),),
    order={"piece": "4096 columns: 16 a thread, butterfly, warps in order; pieces dealt round 32 lanes, butterfly"},
    alone=alone("rows", "logits", "temperature", "epsilon", "uniform"),
    row_of=row_of,
    n_rows=count("rows"),
)  # fmt: skip
