"""The router's card: cases, shapes worth measuring, hand counts.

A case has m rows, so many experts, how many of them are chosen, hidden, normalised, bias and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Tensors, Variant, poison
from eagle3core.kernels.experts.maps.form import x_tiles_for
from eagle3core.kernels.experts.route import Routed, choice_faults
from eagle3core.kernels.experts.routing.choose import choose_variant
from eagle3core.kernels.experts.routing.launcher import route
from eagle3core.kernels.experts.routing.lists import Lists, lists_of
from eagle3core.kernels.experts.routing.score import score_variant
from eagle3core.kernels.experts.seats import new_seats
from eagle3core.kernels.gemm.reference import EPS
from eagle3core.kernels.isa.by_row import alone, count
from eagle3core.kernels.layer.embedding import partial_squares_reference


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case["dtype"])

    h = normal(case["m"], case["hidden"])
    made = {"x": h * (1 + normal(case["hidden"]) / 8), "sums": partial_squares_reference(h)}
    made["weight"] = normal(case["experts"], case["hidden"]) * case["hidden"] ** -0.5
    return {**made, "bias": normal(case["experts"])} if case["bias"] else made


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    """What one row chooses is left to the maps, and is no output here."""
    n, k, device = case["m"], case["chosen"], inputs["x"].device
    shapes = {"logits": (n, case["experts"]), "norms": (n,)}
    made = {name: poison(*shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
    return made if case["m"] == 1 else made | _choice(n, k, device)


def _choice(n: int, k: int, device: torch.device) -> Tensors:
    ints = {"chosen": (n, k), "groups": (1 + n * k, 4), "places": (n * k,)}
    made = {name: poison(*shape, dtype=torch.int32, device=device) for name, shape in ints.items()}
    return {"shares": poison(n, k, dtype=torch.float32, device=device), **made}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    """The logits and norms; what is chosen by them is `_invariants`'."""
    x, mean = inputs["x"], inputs["sums"].sum(-1, keepdim=True) / case["hidden"]
    norm = torch.rsqrt(mean + EPS)
    logits = F.linear(x, inputs["weight"]) * norm.to(x.dtype)
    return {"logits": logits + inputs["bias"] if "bias" in inputs else logits, "norms": norm[:, 0]}


def _group_rows(case: Case) -> int:
    return 8 * x_tiles_for(case["m"], case["chosen"], case["experts"])


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
    left = _choice(case["m"], case["chosen"], inputs["x"].device) | outputs
    out = Routed(left["logits"], left["chosen"], left["shares"])
    seats = new_seats(inputs["x"].device)
    lists = Lists(left["norms"], left["groups"], left["places"], seats, _group_rows(case))
    return route(arch, out=out, eps=EPS, is_normalised=case["normalised"], lists=lists, **inputs)


def _variants_of(arch: str, case: Case) -> list[Variant]:
    made = [score_variant(arch, DTYPES[case["dtype"]], case["hidden"], case["bias"])]
    if case["m"] == 1:
        return made
    n, k = case["experts"], case["chosen"]
    return [*made, choose_variant(arch, n, k, case["normalised"], _group_rows(case), case["m"])]


def _invariants(case: Case, inputs: Tensors, outputs: Tensors) -> list[str]:
    """Of rows whose choice is not left to the maps: it is right, and lists say who goes where."""
    if case["m"] == 1:
        return []
    chosen = outputs["chosen"]
    faults = choice_faults(outputs["logits"], chosen, outputs["shares"], is_normalised=case["normalised"])
    groups, places = lists_of(chosen, _group_rows(case))
    n_groups = int(groups[0, 0]) + 1
    same = torch.equal(outputs["groups"][:n_groups], groups[:n_groups]) and torch.equal(outputs["places"], places)
    return faults if same else [*faults, "lists are not those of the choice"]


def _row_of(case: Case, inputs: Tensors, outputs: Tensors, row: int) -> Tensors:
    """What a row leaves that is alone too, and chooses elsewhere then."""
    return {name: outputs[name][row] for name in ("logits", "norms")}


def _cost(case: Case) -> Cost:
    """Weights, rows and their partial sums in; logits and norms out, of several rows choices, shares and lists too."""
    m, k, hidden, experts = case["m"], case["chosen"], case["hidden"], case["experts"]
    read = 2 * experts * hidden + (2 * experts if case["bias"] else 0) + m * (2 * hidden + hidden // 4)
    chosen = 0 if case["m"] == 1 else m * 4 * k * 7 + 16
    passes = 1 if case["m"] == 1 else 2
    return Cost(read + m * (4 * experts + 4) + chosen, 2 * m * experts * hidden, dependent_passes=passes)


_BF16 = torch.bfloat16
_OSS = {"experts": 128, "chosen": 4, "hidden": 2880, "normalised": True, "bias": True, "dtype": _BF16}
_QWEN = {"experts": 128, "chosen": 8, "hidden": 2048, "normalised": True, "bias": False, "dtype": _BF16}

CARD = Card(
    name="route",
    equation="logits = W_r x / rms; the largest k, ascending; shares = softmax over them, or over all",
    source="Shazeer et al., arXiv 1701.06538, section 2.1",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=_cost,
    variants=lambda arch: _variants_of(arch, {"m": 2, **_OSS}),
    slow_variants=lambda arch: [
        *_variants_of(arch, {"m": 64, **_QWEN}),
        *_variants_of(arch, {"m": 512, **_OSS, "experts": 32}),
    ],
    variants_of=_variants_of,
    invariants=_invariants,
    cases=({"m": 3, "experts": 40, "chosen": 3, "hidden": 48, "normalised": True, "bias": True, "dtype": _BF16},),
    slow_cases=(
        {"m": 1, "experts": 40, "chosen": 3, "hidden": 48, "normalised": True, "bias": True, "dtype": _BF16},
        {"m": 3, "experts": 7, "chosen": 2, "hidden": 32, "normalised": False, "bias": False, "dtype": torch.float16},
        {"m": 35, "experts": 6, "chosen": 4, "hidden": 1040, "normalised": True, "bias": False, "dtype": _BF16},
    ),
    shapes=tuple({"m": m, **model} for model in (_OSS, {**_OSS, "experts": 32}, _QWEN) for m in (1, 4, 16, 64)),
    hand_counts=(
        (
            {"m": 1, **_OSS},
            # W, bias, x and its sums; logits, 1 / rms
            Cost(737_280 + 256 + 5_760 + 720 + 512 + 4, 737_280, 1),
        ),
        (
            {"m": 16, **_OSS},
            # and 7 words for each of 4 chosen, the number of groups
            Cost(737_280 + 256 + 16 * (5_760 + 720 + 512 + 4 + 112) + 16, 16 * 737_280, 2),
        ),
    ),
    order={"sum": "8 columns in order, every 1024 on, lanes by a butterfly, four warps in order"},
    alone=alone("m", "x", "sums"),
    row_of=_row_of,
    n_rows=count("m"),
)
