"""The experts' card: all three launches behind the router's, as they follow each other in a layer.

A case has m rows, so many experts, chosen of them a row, hidden, inner, the form of the matrices ("mxfp4", "plain",
"fp8", "fp8_blocks"), the gate ("clamped": biases too) and dtype. Rows choose so that as many experts are read as would
be on average if all were alike likely, each by about as many rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.kernels.card import DTYPES, E4M3, Card, Case, Cost, Launch, Tensors, Variant, poison
from eagle3core.kernels.experts.gates import GATES
from eagle3core.kernels.experts.maps.form import form_for, swept, x_tiles_for
from eagle3core.kernels.experts.maps.launcher import expert_down, expert_gate_up, walk_variant
from eagle3core.kernels.experts.maps.order import (
    ALTERNATE,
    COLUMNS,
    FP8,
    FP8_BLOCKS,
    HALVES,
    POWER_BIAS,
    TILE,
    UNIT,
    UNIT_BYTES,
    VALUE_BYTES,
    Pairs,
)
from eagle3core.kernels.experts.matrices import OrderedMatrices
from eagle3core.kernels.experts.mxfp4 import BIAS
from eagle3core.kernels.experts.route import choice_faults, chosen_of
from eagle3core.kernels.experts.routing.lists import Lists, Routed, lists_of
from eagle3core.kernels.experts.routing.lone import Choice
from eagle3core.kernels.experts.seats import new_seats
from eagle3core.kernels.experts.total import expert_sum, total_variant
from eagle3core.kernels.gemm.fp8.blocks import blocks_of
from eagle3core.kernels.isa.by_row import alone, count
from eagle3core.kernels.layer.embedding import PARTIAL, partial_squares_reference

_PAIRS: dict[str, Pairs] = {"clamped": ALTERNATE, "silu": HALVES}


def distinct(case: Case) -> int:
    """Experts that the rows of a case choose."""
    n, k = case["experts"], case["chosen"]
    return int(min(max(k, round(n * (1 - (1 - k / n) ** case["m"]))), case["m"] * k))


def _matrices(case: Case, rows: int, k: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """All experts' matrices of one map in the kernels' order, of scale 1 / sqrt(k)."""
    shape = case["experts"], rows // TILE, k // UNIT
    if case["form"] in (FP8, FP8_BLOCKS):  # any byte of the format but its two NaNs
        codes = torch.randint(0, 254, (*shape, TILE * UNIT), generator=generator, device=device, dtype=torch.int16)
        return (codes + (codes >= 127)).to(torch.uint8).view(E4M3)
    if case["form"] == "plain":
        values = torch.randn(*shape, TILE * UNIT, generator=generator, device=device, dtype=case["dtype"])
        return values.mul_(k**-0.5)
    made = torch.randint(256, (*shape, UNIT_BYTES["mxfp4"]), generator=generator, device=device, dtype=torch.uint8)
    unit = round(-torch.tensor(8.0 * k).log2().item() / 2) + BIAS + POWER_BIAS  # E2M1 has a mean square of about 8
    made[..., VALUE_BYTES:] = made[..., VALUE_BYTES:] % 3 + (unit - 1)
    return made


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    m, k, hidden, inner, dtype = case["m"], case["chosen"], case["hidden"], case["inner"], case["dtype"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    d = distinct(case)
    used = torch.randperm(case["experts"], generator=generator, device=device)[:d]
    chosen = used[torch.arange(m * k, device=device).view(m, k) % d].sort(dim=1).values
    logits = torch.randn(m, case["experts"], generator=generator, device=device)
    logits.scatter_(1, chosen, 10 + torch.randn(m, k, generator=generator, device=device))
    norms = 0.5 + torch.rand(m, generator=generator, device=device)
    made = {
        "x": normal(m, hidden), "norms": norms, "logits": logits,
        "shares": normal(m, k).float().softmax(1),
        "residual": normal(m, hidden), "gain": 1 + normal(hidden) / 8,
        "gate_up": _matrices(case, 2 * inner, hidden, generator, device),
        "down": _matrices(case, hidden, inner, generator, device),
    }  # fmt: skip
    if case["form"] in (FP8, FP8_BLOCKS):  # that bring what random bytes give to unit scale
        for name, n_rows, reads in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            shape = (n_rows,) if case["form"] == FP8 else (n_rows // TILE, blocks_of(reads), 2)
            scales = 1 + torch.rand(case["experts"], *shape, generator=generator, device=device)
            made[f"{name}_scales"] = scales * (reads**-0.5 / 150)
    if case["gate"] == "clamped":
        made["gate_up_bias"] = normal(case["experts"], 2 * inner)
        made["down_bias"] = normal(case["experts"], hidden)
    return made


def _maps(case: Case, inputs: Tensors) -> tuple[OrderedMatrices, OrderedMatrices]:
    given: list[tuple[str, Pairs]] = [("gate_up", _PAIRS[case["gate"]]), ("down", COLUMNS)]
    up, down = (
        OrderedMatrices(inputs[n], case["form"], p, inputs.get(f"{n}_bias"), inputs.get(f"{n}_scales"))
        for n, p in given
    )
    return up, down


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    (m, hidden), k, device, dtype = inputs["x"].shape, case["chosen"], inputs["x"].device, inputs["x"].dtype
    sums = torch.full_like(partial_squares_reference(inputs["x"]), torch.nan)
    sums[:, hidden // PARTIAL :] = 0  # padding that the engine zeroes once and no kernel writes
    return {
        "inner": poison(m, k, case["inner"], dtype=dtype, device=device),
        "parts": poison(m, k, hidden, dtype=torch.float32, device=device),
        "y": poison(m, hidden, dtype=dtype, device=device), "scaled": poison(m, hidden, dtype=dtype, device=device),
        "sums": sums,
    } | _choice(case, device)  # fmt: skip


def _choice(case: Case, device: torch.device) -> Tensors:
    """What the maps choose themselves, of one row; the sum has shares of its own, so that any row may stand alone."""
    if case["m"] > 1:
        return {}
    made = {"chosen": poison(1, case["chosen"], dtype=torch.int32, device=device)}
    return {**made, "chosen_shares": poison(1, case["chosen"], dtype=torch.float32, device=device)}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    """In the dtype of the rows, matrices decoded to it."""
    x, chosen, (up, down) = inputs["x"], chosen_of(inputs["logits"], case["chosen"]), _maps(case, inputs)
    inner = x.new_empty(*chosen.shape, case["inner"])
    parts = x.new_empty(*chosen.shape, case["hidden"])
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        v = F.linear(x[rows], up.of(expert, x.dtype)) * inputs["norms"][rows, None].to(x.dtype)
        bias, last = up.bias_of(expert), down.bias_of(expert)
        inner[rows, places] = GATES[case["gate"]](v if bias is None else v + bias)
        v = F.linear(inner[rows, places], down.of(expert, x.dtype))
        parts[rows, places] = v if last is None else v + last
    y = inputs["residual"] + (inputs["shares"].to(x.dtype)[..., None] * parts).sum(1)
    return {"inner": inner, "parts": parts, "y": y, "scaled": y * inputs["gain"], "sums": partial_squares_reference(y)}


def _x_tiles(case: Case, setting: Mapping[str, Any]) -> int:
    return int(setting.get("x_tiles", x_tiles_for(case["m"], case["chosen"], case["experts"])))


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors, **setting: Any) -> Sequence[Launch]:
    up, down = _maps(case, inputs)
    rows, chosen = 8 * _x_tiles(case, setting), chosen_of(inputs["logits"], case["chosen"]).int()
    seats = new_seats(inputs["x"].device, setting.get("processors"))
    lists = Lists(inputs["norms"], *lists_of(chosen, rows), seats, rows)
    routed = Routed(inputs["logits"], outputs.get("chosen", chosen), outputs.get("chosen_shares", inputs["shares"]))
    inner, parts = outputs["inner"], outputs["parts"]
    others = {name: outputs[name] for name in ("y", "scaled", "sums")}
    by: dict[str, Any] = {"is_normalised": True, "lists": lists, "setting": setting}
    return [
        *expert_gate_up(arch, inputs["x"], inputs["norms"], routed, up, inner, eps=0.0, gate=case["gate"], **by),
        *expert_down(arch, inner, routed, down, parts, **by),
        *expert_sum(arch, parts, inputs["shares"], inputs["residual"], inputs["gain"], **others),
    ]


def _invariants(case: Case, inputs: Tensors, outputs: Tensors) -> list[str]:
    if case["m"] > 1:
        return []
    return choice_faults(inputs["logits"], outputs["chosen"], outputs["chosen_shares"], is_normalised=True)


def _row_of(case: Case, inputs: Tensors, outputs: Tensors, row: int) -> Tensors:
    return {name: outputs[name][row] for name in ("inner", "parts", "y", "scaled", "sums")}


def _variants_of(arch: str, case: Case, **setting: Any) -> list[Variant]:
    made, dtype = [], DTYPES[case["dtype"]]
    own = {name: value for name, value in setting.items() if name not in ("x_tiles", "blocks", "processors")}
    choice = Choice(case["experts"], case["chosen"], True) if case["m"] == 1 else None
    for k, gate in ((case["hidden"], case["gate"]), (case["inner"], "")):
        cut = form_for(case["form"], k, _x_tiles(case, setting), own, is_lone=choice is not None)
        has_bias = case["gate"] == "clamped"
        made.append(walk_variant(arch, dtype, case["form"], k, gate, has_bias, cut, choice))
    return [*made, total_variant(arch, dtype, case["hidden"], case["chosen"])]


def _sweep(arch: str, case: Case) -> list[dict[str, Any]]:
    hidden, inner = case["hidden"], case["inner"]
    maps = [(hidden, 2 * inner // TILE), (inner, hidden // TILE)]
    return [asdict(cut) for cut in swept(arch, case["form"], _x_tiles(case, {}), maps)]


def _cost(case: Case) -> Cost:
    """Distinct experts' matrices; rows, logits or choices and the residual in, and out what the next map reads."""
    m, k, hidden, inner, d = case["m"], case["chosen"], case["hidden"], case["inner"], distinct(case)
    matrix = 3 * hidden * inner * UNIT_BYTES[case["form"]] // (TILE * UNIT)
    bias = 2 * (2 * inner + hidden) if case["gate"] == "clamped" else 0
    scales = {FP8: 2 * inner + hidden, FP8_BLOCKS: (2 * inner * blocks_of(hidden) + hidden * blocks_of(inner)) // 8}
    bias += 4 * scales.get(case["form"], 0)
    rows = m * (4 * 2 * hidden + hidden // 4 + 4 + 8 * k) + 2 * hidden
    if m == 1:
        rows += 4 * case["experts"]
    return Cost(d * (matrix + bias) + rows, 6 * m * k * hidden * inner, dependent_passes=3)


_BF16 = torch.bfloat16
_OSS = {"experts": 128, "chosen": 4, "hidden": 2880, "inner": 2880, "form": "mxfp4", "gate": "clamped", "dtype": _BF16}
_QWEN = {"experts": 128, "chosen": 8, "hidden": 2048, "inner": 768, "form": "plain", "gate": "silu", "dtype": _BF16}
_TINY = {"experts": 3, "chosen": 2, "hidden": 64, "inner": 32, "dtype": _BF16}

CARD = Card(
    name="experts",
    equation="y = r + sum over chosen experts, ascending, of share (W_down gate(W_gate_up x / rms + b) + b')",
    source="SwiGLU, arXiv 2002.05202; MXFP4: OCP Microscaling Formats 1.0",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=_cost,
    variants=lambda arch: _variants_of(arch, {"m": 1, **_OSS}),
    slow_variants=lambda arch: [
        *_variants_of(arch, {"m": 64, **_OSS, "experts": 32}),
        *_variants_of(arch, {"m": 1, **_QWEN}),
        *(_variants_of(arch, {"m": 1, **_QWEN, "form": FP8})[:2] if arch == "sm_90a" else ()),
        *_variants_of(arch, {"m": 1, **_QWEN, "form": FP8_BLOCKS})[:2],
        *(_variants_of(arch, {"m": 512, **_OSS, "experts": 32})[:2] if arch == "sm_90a" else ()),
        *(_variants_of(arch, {"m": 64, **_QWEN})[:2] if arch == "sm_90a" else ()),
        *(_variants_of(arch, {"m": 512, **_QWEN, "form": FP8_BLOCKS})[:2] if arch == "sm_90a" else ()),
    ],
    variants_of=_variants_of,
    invariants=_invariants,
    sweep=_sweep,
    cases=({"m": 3, **_TINY, "form": "mxfp4", "gate": "clamped"},),
    slow_cases=(
        {"m": 1, **_TINY, "experts": 35, "form": "mxfp4", "gate": "clamped"},
        {"m": 2, **_TINY, "form": "plain", "gate": "silu", "dtype": torch.float16},
        {"m": 11, **_TINY, "experts": 2, "form": "mxfp4", "gate": "silu"},
        {"m": 2, **_TINY, "hidden": 576, "form": "mxfp4", "gate": "clamped"},
        {"m": 9, **_TINY, "hidden": 128, "form": "plain", "gate": "clamped"},
        {"m": 3, **_TINY, "form": FP8, "gate": "silu"},
        {"m": 3, **_TINY, "hidden": 160, "form": FP8_BLOCKS, "gate": "silu"},
        {"m": 2, **_TINY, "experts": 2, "hidden": 512, "form": FP8_BLOCKS, "gate": "silu", "dtype": torch.float16},
    ),
    settings=(
        {},
        {"step": 1, "stage_steps": 2, "stages": 2, "blocks": 4, "processors": 2},
        {"x_tiles": 2, "step": 1, "stage_steps": 1, "stages": 3, "blocks": 1},
        {"x_tiles": 8, "w_tiles": 2, "step": 1, "stage_steps": 1, "stages": 2},
    ),
    shapes=tuple(
        {"m": m, **model}
        for model in (_OSS, {**_OSS, "experts": 32}, _QWEN, {**_QWEN, "form": FP8}, {**_QWEN, "form": FP8_BLOCKS})
        for m in (1, 4, 16, 64)
    ),
    hand_counts=(
        (
            {"m": 1, **_OSS},
            # four experts of 24,883,200 values at 17 bytes for 32, and 8640 biases; x, residual, y, y * gain, sums of
            # squares, 1 / rms, choice and shares, logits; the gain
            Cost(4 * (13_219_200 + 17_280) + 23_040 + 720 + 4 + 32 + 512 + 5_760, 199_065_600, 3),
        ),
        (
            {"m": 4, **_OSS, "experts": 4},
            Cost(4 * (13_219_200 + 17_280) + 4 * (23_040 + 720 + 4 + 32) + 5_760, 796_262_400, 3),
        ),
        (
            {"m": 1, **_QWEN, "form": FP8_BLOCKS},
            # eight experts of 4,718,592 values, and a scale of 4 bytes for 8 x 128 of them
            Cost(8 * (4_718_592 + 18_432) + 16_384 + 512 + 4 + 64 + 512 + 4_096, 75_497_472, 3),
        ),
    ),
    order={"streams": 4, "unit": UNIT},
    neutral={
        "x_tiles": "rows of an expert a block, by 8",
        "w_tiles": "rows of a matrix a block, by 16",
        "resident": "blocks that a multiprocessor holds",
        "step": "units between two looks at the ring",
        "stage_steps": "steps of a stage",
        "stages": "ring depth",
        "blocks": "blocks that walk",
        "processors": "that have seats for them",
    },
    alone=alone("m", "x", "norms", "logits", "shares", "residual"),
    row_of=_row_of,
    n_rows=count("m"),
)
