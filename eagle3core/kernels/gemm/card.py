"""The GEMM's card: cases, shapes worth measuring, variants to compile, hand counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.card import Card, Case, Cost, Launch, Tensors, Variant
from eagle3core.kernels.gemm.candidates import check_tiling, fp8_candidates, gemm_candidates
from eagle3core.kernels.gemm.fp8.tiling import Fp8Tiling, choose_fp8_tiling, takes
from eagle3core.kernels.gemm.launcher import gemm, gemm_cost, gemm_variant
from eagle3core.kernels.gemm.order.pack import pack_variant
from eagle3core.kernels.gemm.products import STREAMS, UNIT
from eagle3core.kernels.gemm.reference import (
    epilogue_of,
    gemm_alone,
    gemm_example,
    gemm_invariants,
    gemm_outputs,
    gemm_reference,
    gemm_row_of,
    n_weight_rows,
    packed_inputs,
)
from eagle3core.kernels.gemm.scratch import scratch_words
from eagle3core.kernels.gemm.tiling import Tiling, choose_tiling, fitted


def gemm_launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors, **setting: Any) -> Sequence[Launch]:
    """The launch of a case; `setting` replaces fields of the chosen tiling."""
    epilogue = epilogue_of(case)
    inputs = packed_inputs(case, inputs)
    tiling = _tiling(arch, case, setting)
    others = {name: t for name, t in {**inputs, **outputs}.items() if name not in ("x", "w", "y")}
    return gemm(
        arch, epilogue, x=inputs["x"], w=inputs["w"], y=outputs["y"], k=case["k"], packed=bool(case.get("packed")),
        weight_rows=n_weight_rows(case), tiling=tiling, q_heads=case.get("q_heads", 0),
        kv_heads=case.get("kv_heads", 0), scratch=workspace_of(inputs["x"].device, case, tiling), operands=others,
    )  # fmt: skip


def _tiling(arch: str, case: Case, setting: Mapping[str, Any]) -> Tiling:
    """The chosen tiling with `setting` in it; a setting that asks for a kernel that there is not is left out."""
    packed, fp8 = bool(case.get("packed")), bool(case.get("fp8"))
    blocks = case.get("fp8") == "blocks"
    sizes = arch, case["m"], n_weight_rows(case) // 16, case["k"]
    tiling = choose_fp8_tiling(*sizes, case["dtype"], blocks) if fp8 else choose_tiling(*sizes, packed, case["dtype"])
    exists = {
        "group": packed and arch == "sm_90a",
        "bulk": packed and arch != "sm_80" and case["k"] % UNIT == 0,
    }
    if not setting or not exists.get(setting.get("kernel", ""), True):
        return tiling
    if "kernel" in setting:  # of the chosen one, which may be another kernel's, only what every kernel has
        tiling = replace(tiling, warps_x=1, warps_w=1, cluster=1, held=False, resident=0, paced=0)
    asked = fitted(arch, replace(tiling, **setting))
    return asked if not isinstance(asked, Fp8Tiling) or takes(asked, case["k"]) else tiling


def workspace_of(device: torch.device, case: Case, tiling: Tiling) -> tuple[Tensor, Tensor] | None:
    """Scratch of exactly the size that a case needs, so that the emulator sees any access beyond it."""
    n_tiles = n_weight_rows(case) // 16
    words = sum(scratch_words(tiling, case["m"], n_tiles, case["k"]))
    if not words:
        return None
    blocks = -(-case["m"] // (8 * tiling.x_tiles)) * -(-n_tiles // tiling.w_tiles)
    return torch.full((words,), float("nan"), device=device), torch.zeros(blocks, dtype=torch.int32, device=device)


def _shapes() -> tuple[Case, ...]:
    sizes = (
        (4096, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336), (34560, 2880), (4096, 5760),
        (2880, 8640), (4096, 12288), (6144, 8192), (32000, 4096), (128256, 4096), (201088, 2880),
        (32768, 2880),
    )  # fmt: skip
    rows = (1, 2, 3, 4, 5, 8, 16, 32, 64, 240)
    return tuple(
        {"kind": "store", "m": m, "n": n, "k": k, "dtype": "bf16", "packed": True} for n, k in sizes for m in rows
    )


def gemm_variants_of(arch: str, case: Case, **setting: Any) -> list[Variant]:
    """The variants that `gemm_launches` uses for a case, the GEMM itself last."""
    tiling = _tiling(arch, case, setting)
    check_tiling(tiling, arch, n_weight_rows(case) // 16, case["k"], bool(case.get("packed")))
    ragged = case["k"] % UNIT != 0
    variant = gemm_variant(arch, case["dtype"], epilogue_of(case), tiling, bool(case.get("packed")), ragged)
    return [pack_variant(arch), variant] if tiling.kernel == "group" else [variant]


def gemm_sweep(arch: str, case: Case) -> list[Mapping[str, Any]]:
    """Tilings to time for one case."""
    n_tiles = n_weight_rows(case) // 16
    found = gemm_candidates(arch, case["m"], n_tiles, case["k"], bool(case.get("packed")))
    if case.get("fp8"):
        found = fp8_candidates(arch, case["m"], n_tiles, case["k"], case["fp8"] == "blocks")
    return [asdict(tiling) for tiling in found]


def gemm_variants(arch: str) -> list[Variant]:
    """One ring and one tile configuration with the richest epilogues; `gemm_slow_variants` has the others."""
    return _engine_variants(arch, {"residual": (1,), "qkv": (64,)})


def gemm_slow_variants(arch: str) -> list[Variant]:
    """The other regimes of rows of a layer and its head, and samples of fp16, row-major weights and ragged K.

    Of architectures other than Hopper's, one with few rows and one with many.
    """
    regimes = (1, 16, 32, 64, 240) if arch == "sm_90a" else (1, 64)
    made = _engine_variants(arch, dict.fromkeys(("residual", "swiglu", "qkv", "head", "store"), regimes))
    made += _engine_variants(arch, {"residual": (1,), "qkv": (32,)}, dtype="f16")
    made += _engine_variants(arch, {"residual": (1,), "swiglu": (64,)}, packed=False)
    made += _fp8_variants(arch)
    whole = {**LLAMA_8B[0], "dtype": "bf16", "packed": True, "e4m3_cache": True}
    made += [gemm_variants_of(arch, {**whole, "m": m})[-1] for m in ((1, 240) if arch == "sm_90a" else (1,))]
    for m in (4, 16, 64):
        made += gemm_variants_of(arch, {"kind": "store", "m": m, "n": 2880, "k": 2896, "dtype": "bf16"})
    unique = {variant.name: variant for variant in made}
    return [unique[name] for name in sorted(unique.keys() - {v.name for v in gemm_variants(arch)})]


def _engine_variants(
    arch: str, rows: dict[str, tuple[int, ...]], dtype: str = "bf16", packed: bool = True
) -> list[Variant]:
    found = []
    for case in LLAMA_8B:
        for m in rows.get(case["kind"], ()):
            tiling = choose_tiling(arch, m, n_weight_rows(case) // 16, case["k"], packed, dtype)
            found.append(gemm_variant(arch, dtype, epilogue_of(case), tiling, packed, False))
    return list({variant.name: variant for variant in found}.values())


def _fp8_variants(arch: str) -> list[Variant]:
    """Samples of the kernels of maps in FP8: of a step of one sequence and of four, of a chunk; and scales by block."""
    rows: dict[str, tuple[int, ...]] = {"residual": (1,), "store": (64,)}
    of_blocks: dict[str, tuple[int, ...]] = {"residual": (1,)}
    if arch == "sm_90a":
        rows = {"qkv": (1, 64), "residual": (1, 16, 512), "swiglu": (1,), "store": (64,)}
        of_blocks = {"residual": (1, 16), "swiglu": (16, 64), "qkv": (512,)}
    made = []
    for fp8, regimes in ((True, rows), ("blocks", of_blocks)):
        cases = [{**case, "m": m} for case in LLAMA_8B if case["k"] == 4096 for m in regimes.get(case["kind"], ())]
        made += [gemm_variants_of(arch, {**case, "dtype": "bf16", "packed": True, "fp8": fp8})[-1] for case in cases]
    return made


# The five linear maps of one layer and the head of Llama-3.1-8B.
LLAMA_8B: tuple[Case, ...] = (
    {"kind": "qkv", "k": 4096, "norm": True, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "block": 64},
    {"kind": "residual", "k": 4096, "n": 4096},
    {"kind": "swiglu", "k": 4096, "n": 14336, "norm": True},
    {"kind": "residual", "k": 14336, "n": 4096},
    {"kind": "head", "k": 4096, "n": 128256, "norm": True},
    {"kind": "head", "k": 4096, "n": 32000, "norm": True, "powers": True},
    {"kind": "store", "k": 4096, "n": 4096},
)

_SMALL: Case = {"kind": "store", "m": 3, "n": 48, "k": 272, "dtype": "bf16", "packed": False}
_QKV: Case = {"kind": "qkv", "m": 3, "k": 128, "dtype": "bf16", "packed": True, "norm": True, "q_heads": 3,
              "kv_heads": 1, "head_dim": 32, "block": 16}  # fmt: skip

CARD = Card(
    name="gemm",
    equation="y = epilogue(x W^T), sums in fp32 as ((s0 + s1) + s2) + s3 over four contiguous ranges of K",
    source="derived here",
    example=gemm_example,
    outputs=gemm_outputs,
    reference=gemm_reference,
    launches=gemm_launches,
    cost=gemm_cost,
    variants=gemm_variants,
    slow_variants=gemm_slow_variants,
    invariants=gemm_invariants,
    order={"streams": STREAMS, "unit": UNIT},
    neutral={
        "kernel": "ring, bulk (packed W, not sm_80), tile, or group (sm_90a, packed W)",
        "x_tiles": "rows of x a block",
        "w_tiles": "rows of W a block",
        "units": "units of 32 k a stage",
        "stages": "ring depth",
        "split": "blocks that share K",
        "together": "whether those add the sums together",
        "cluster": "blocks of x that fetch W for each other",
        "held": "totals in registers that those who fetch give up",
        "resident": "blocks of a grid that take several blocks' tiles each, 0: one each",
        "paced": "cycles between requests of a starting block of `bulk`, 0: all at once",
        "packed": "layout of W",
    },
    cases=(
        _SMALL,
        {"kind": "residual", "m": 9, "n": 32, "k": 256, "dtype": "f16", "packed": True, "bias": True},
        {"kind": "swiglu", "m": 2, "n": 24, "k": 144, "dtype": "bf16", "packed": True, "norm": True},
        _QKV,
        {"kind": "head", "m": 5, "n": 64, "k": 96, "dtype": "f16", "packed": False, "norm": True, "bias": True},
        {"kind": "head", "m": 3, "n": 32, "k": 64, "dtype": "bf16", "packed": True, "powers": True},
        {"kind": "residual", "m": 3, "n": 32, "k": 128, "dtype": "bf16", "packed": True, "fp8": True, "bias": True},
        {"kind": "residual", "m": 2, "n": 32, "k": 512, "dtype": "bf16", "packed": True, "fp8": "blocks"},
    ),
    slow_cases=(
        {"kind": "residual", "m": 3, "n": 64, "k": 144, "dtype": "bf16", "packed": False, "residual": False},
        {"kind": "swiglu", "m": 17, "n": 16, "k": 160, "dtype": "f16", "packed": False, "bias": True},
        {**_QKV, "m": 19, "k": 64, "packed": False, "bias": True, "head_dim": 64},
        {"kind": "head", "m": 33, "n": 48, "k": 64, "dtype": "bf16", "packed": True},
        {"kind": "store", "m": 70, "n": 16, "k": 48, "dtype": "bf16", "packed": True},
        {"kind": "store", "m": 2, "n": 32, "k": 16, "dtype": "f16", "packed": True},
        {**_QKV, "m": 9, "fp8": True},
        {"kind": "swiglu", "m": 17, "n": 16, "k": 144, "dtype": "f16", "packed": True, "norm": True, "fp8": True},
        {"kind": "head", "m": 2, "n": 32, "k": 64, "dtype": "f16", "packed": True, "norm": True, "fp8": True},
        {**_QKV, "m": 2, "k": 336, "fp8": "blocks"},
        {"kind": "swiglu", "m": 17, "n": 16, "k": 512, "dtype": "f16", "packed": True, "norm": True, "fp8": "blocks"},
    ),
    settings=(
        {},
        {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3},
        {"kernel": "bulk", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3},
        {"kernel": "bulk", "x_tiles": 2, "w_tiles": 1, "units": 1, "stages": 2},
        {"kernel": "tile", "x_tiles": 2, "w_tiles": 2, "warps_x": 2, "warps_w": 1, "units": 1, "stages": 3},
        {"kernel": "tile", "x_tiles": 1, "w_tiles": 4, "warps_x": 1, "warps_w": 2, "units": 1, "stages": 2, "split": 4},
        {"kernel": "group", "x_tiles": 2, "w_tiles": 4, "units": 1, "stages": 3, "split": 1},
        {"kernel": "group", "x_tiles": 1, "w_tiles": 4, "units": 1, "stages": 2, "split": 4, "together": True},
    ),
    shapes=_shapes(),
    hand_counts=(
        (
            {"kind": "store", "m": 1, "n": 4096, "k": 4096, "dtype": "bf16", "packed": True},
            Cost(bytes=33_554_432 + 8_192 + 8_192, flops=33_554_432),
        ),
        (
            {"kind": "residual", "m": 4, "n": 4096, "k": 14336, "dtype": "bf16", "packed": True},
            # W, x, y, second, residual, gain, partial sums
            Cost(bytes=117_440_512 + 114_688 + 3 * 32_768 + 8_192 + 4_096, flops=469_762_048),
        ),
        (
            {**_QKV, "m": 2},
            # W 160 x 128, x, q 2 x 96, k and v 2 x 32 each, sums 2 x 8, table 2 x 16 pairs, two int32 a row
            Cost(bytes=40_960 + 512 + 384 + 256 + 64 + 256 + 16, flops=81_920),
        ),
        (
            {"kind": "store", "m": 1, "n": 4096, "k": 4096, "dtype": "bf16", "packed": True, "fp8": True},
            Cost(bytes=16_777_216 + 16_384 + 8_192 + 8_192, flops=33_554_432),  # W, its scales, x, y
        ),
        (
            {"kind": "store", "m": 1, "n": 4096, "k": 4096, "dtype": "bf16", "packed": True, "fp8": "blocks"},
            Cost(bytes=16_777_216 + 65_536 + 8_192 + 8_192, flops=33_554_432),  # scales of 512 x 32 pieces of W
        ),
    ),
    alone=gemm_alone,
    row_of=gemm_row_of,
    n_rows=lambda case: int(case["m"]),
    variants_of=gemm_variants_of,
    sweep=gemm_sweep,
)
