"""What is asked of the kernels on an H200, judged from the rows of one benchmark run.

`judge` gives named checks with value, threshold and outcome. A check whose cells were not all measured, whose libraries
were not all timed, or whose proof is not in the same file, is missing.

Source: docs/kernels.md, "What is asked of the kernels", says why the thresholds are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from lab.probes.kernels.roofline import (
    SLACK,
    Cell,
    Check,
    Proof,
    allowed_us,
    case_text,
    is_unmasked,
    on_every_cell,
    on_mean,
    peer_ratio,
    shape_text,
    values_of,
)

GEMM_SIZES = (
    (4096, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336), (34560, 2880), (4096, 5760), (2880, 8640),
    (4096, 12288), (6144, 8192), (32000, 4096), (128256, 4096), (201088, 2880),
)  # fmt: skip
HEADS = ((201088, 2880), (32768, 2880))  # of a draft for gpt-oss-120b: whole, and cut to its most frequent tokens
FEW_ROWS, MANY_ROWS = (1, 2, 3, 4, 5, 8), (16, 32, 64, 240)
ATTENTION_HEADS = {128: (32, 8), 64: (64, 8)}  # head size: query heads, key heads
ATTENTION_LENGTHS = ((1, 32768), (4, 16384))  # batch, keys
ATTENTION_TOKENS = (1, 4, 8, 16, 32, 64)
ATTENTION_SHARES = {1: {1: 0.80, 4: 0.77, 8: 0.71}, 4: {1: 0.85, 4: 0.81, 8: 0.76}}  # batch: tokens: least share
EXPERT_ROWS, EXPERT_SHARE = (1, 4, 16), 0.70
# Families of libraries that must have been timed under a mask, by what their names hold.
SDPA, MASKED_FAMILIES = "sdpa", ("sdpa", "flex", "merge")


def judge(
    cells: Sequence[Cell],
    proofs: Sequence[Proof],
    others: Mapping[str, Sequence[Mapping[str, Any]]],
    gb_per_s: float | None,
) -> list[Check]:
    """Every threshold on a benchmark's cells, the musts first.

    Args:
        cells: of one machine; of several with one op and shape the last counts.
        proofs: of the same file; the last of an op counts.
        others: every op beside gemm and attention, with the shapes that have to be measured.
        gb_per_s: the read rate that these are held to; without one their thresholds are missing.
    """
    known = {(cell.op, shape_text(cell.shape)): cell for cell in cells}
    proven = {proof.op: proof for proof in proofs}
    checks = [_proof_check(op, proven.get(op)) for op in ("gemm", "attention", *others)]
    checks += _gemm_checks(list(known.values()))
    checks += _attention_checks(list(known.values()))
    checks += _expert_checks(list(known.values()), others.get("experts", ()))
    for op, shapes in others.items():
        wanted = [(case_text(shape), known.get((op, shape_text(shape)))) for shape in shapes]
        checks.append(_small_check(op, wanted, gb_per_s))
    return sorted(checks, key=lambda check: not check.is_must)


def _proof_check(op: str, proof: Proof | None) -> Check:
    name = f"{op}: numbers and bits proven on the GPU"
    if proof is None:
        return Check(name, None, "at least", 1, None, "no proof row")
    return Check(name, float(proof.passed), "at least", 1, proof.passed, proof.reason or "every case passed")


def _small_check(op: str, wanted: Sequence[tuple[str, Cell | None]], gb_per_s: float | None) -> Check:
    name = f"{op}: time over {SLACK:g} x (bytes + passes), worst shape"
    if gb_per_s is None:
        return Check(
            name, None, "at most", 1.0, None, "no read ceiling: none was measured, and none is known of the GPU"
        )
    times = values_of(wanted, lambda cell: cell.us / allowed_us(cell.bytes, cell.dependent_passes, gb_per_s))
    return on_every_cell(name, times, "at most", 1.0)


def _gemm_checks(cells: Sequence[Cell]) -> list[Check]:
    def wanted(rows: Sequence[int], sizes: Sequence[tuple[int, int]] = GEMM_SIZES) -> list[tuple[str, Cell | None]]:
        found = {
            (c.shape.get("m"), c.shape.get("n"), c.shape.get("k")): c
            for c in cells
            if c.op == "gemm" and c.shape.get("kind") == "store" and c.shape.get("dtype") == "bf16"
        }
        return [(f"{m}x{n}x{k}", found.get((m, n, k))) for m, (n, k) in product(rows, sizes)]

    heads = {
        text: None if whole is None or cut is None else cut.us / whole.us
        for (_, whole), (text, cut) in zip(wanted(FEW_ROWS, HEADS[:1]), wanted(FEW_ROWS, HEADS[1:]), strict=True)
    }
    few, many, sixteen = wanted(FEW_ROWS), wanted(MANY_ROWS), wanted(MANY_ROWS[:1])
    ratio_few = values_of(few, peer_ratio)
    shares = values_of(few, lambda cell: cell.share)
    means = "geometric mean of"
    return [
        on_mean(f"gemm M <= 8: {means} time over F.linear", ratio_few, "at most", 0.92),
        on_every_cell("gemm M <= 8: time over F.linear, worst cell", ratio_few, "at most", 1.02),
        on_mean(f"gemm M <= 8: {means} share of floor", shares, "at least", 0.84),
        on_mean(f"gemm M 16..240: {means} time over F.linear", values_of(many, peer_ratio), "at most", 1.10),
        on_every_cell("gemm M <= 8: a head of 32,768 tokens over one of 201,088", heads, "at most", 0.25),
        on_mean(f"gemm M <= 8: {means} time over F.linear", ratio_few, "at most", 0.85, is_must=False),
        on_mean(f"gemm M <= 8: {means} share of floor", shares, "at least", 0.90, is_must=False),
        on_mean(
            f"gemm M 16: {means} time over F.linear", values_of(sixteen, peer_ratio), "at most", 0.98, is_must=False
        ),
    ]


def _attention_checks(cells: Sequence[Cell]) -> list[Check]:
    def wanted(dims: Sequence[int], lengths: Any, tokens: Sequence[int]) -> list[tuple[str, Cell | None]]:
        return [
            (f"d{dim} b{batch} T{t}", _attention_cell(cells, dim, batch, kv, t))
            for dim, (batch, kv), t in product(dims, lengths, tokens)
        ]

    both = tuple(ATTENTION_HEADS)
    checks = []
    for batch, kv in ATTENTION_LENGTHS:
        for tokens, least in ATTENTION_SHARES[batch].items():
            share = values_of(wanted((128,), ((batch, kv),), (tokens,)), lambda cell: cell.share)
            name = f"attention d=128 batch {batch} T={tokens}: share of floor"
            checks.append(on_every_cell(name, share, "at least", least))
            checks.append(on_every_cell(name, share, "at least", round(least + 0.06, 2), is_must=False))
    ones = values_of(wanted(both, ATTENTION_LENGTHS, (1,)), sdpa_ratio)
    checks.append(on_every_cell("attention T=1: time over SDPA's best backend, worst cell", ones, "at most", 1.03))
    trees = values_of(wanted(both, ATTENTION_LENGTHS, ATTENTION_TOKENS[1:]), masked_advantage)
    checks.append(on_every_cell("attention T >= 4: best library's time over ours, worst cell", trees, "at least", 1.2))
    flash = values_of(wanted((128,), ATTENTION_LENGTHS, (16,)), unmasked_ratio)
    name = "attention d=128 T=16: time over the best library without a mask, worst cell"
    return [*checks, on_every_cell(name, flash, "at most", 1.0, is_must=False)]


def _expert_checks(cells: Sequence[Cell], shapes: Sequence[Mapping[str, Any]]) -> list[Check]:
    known = {shape_text(cell.shape): cell for cell in cells if cell.op == "experts"}
    # In FP8 an expert of Qwen3-30B-A3B is so small that starting and draining take a third at one row.
    checks, asked = [], [shape for shape in shapes if not str(shape.get("form")).startswith("fp8")]
    for rows in EXPERT_ROWS if asked else ():
        wanted = [(case_text(shape), known.get(shape_text(shape))) for shape in asked if shape["m"] == rows]
        share = values_of(wanted, lambda cell: cell.share)
        name = f"experts of {rows} rows: share of floor, worst model"
        checks.append(on_every_cell(name, share, "at least", EXPERT_SHARE))
    return checks


def _attention_cell(cells: Sequence[Cell], dim: int, batch: int, kv: int, tokens: int) -> Cell | None:
    heads, kv_heads = ATTENTION_HEADS[dim]
    wanted: dict[str, Any] = {"dtype": "bf16", "dim": dim, "heads": heads, "kv_heads": kv_heads}
    wanted |= {"batch": batch, "kv": kv, "tokens": tokens, "earlier": None, "window": None}
    found = [
        c for c in cells
        if c.op == "attention" and all(c.shape.get(k) == v for k, v in wanted.items())
        and not c.shape.get("fp8") and not c.shape.get("paths")
    ]  # fmt: skip
    return found[-1] if found else None


def sdpa_ratio(cell: Cell) -> float | None:
    """Our time over the best of torch's SDPA backends; None when none was timed, or a library was left out."""
    timed = [us for name, us in cell.peers.items() if us is not None and SDPA in name.lower()]
    return cell.us / min(timed) if timed and cell.is_complete else None


def masked_advantage(cell: Cell) -> float | None:
    """Time of the best library under the same mask, quoted ones included, over ours.

    None unless every family of libraries was timed in the same run.
    """
    timed = {name.lower(): us for name, us in cell.peers.items() if us is not None and not is_unmasked(name)}
    if not all(any(family in name for name in timed) for family in MASKED_FAMILIES):
        return None
    return min(*timed.values(), *cell.quoted.values()) / cell.us


def unmasked_ratio(cell: Cell) -> float | None:
    """Our time under a mask over the best library without one; None when none was timed."""
    timed = [us for name, us in cell.peers.items() if us is not None and is_unmasked(name)]
    return cell.us / min(timed) if timed else None
