"""The router's kernels over random shapes, and bugs planted in them, which the numbers find."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from planted_sources import rebuilt
from rings import seeds, slow_from

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof, registry
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.experts.routing import choose, launcher, pick, score

pytestmark = pytest.mark.emulated

CARD, CPU = registry()["route"], torch.device("cpu")
CASE: dict[str, Any] = {"m": 6, "experts": 40, "chosen": 3, "hidden": 48, "normalised": True, "bias": True,
                        "dtype": torch.bfloat16}  # fmt: skip
PLANTED = {
    # name: (module, factory, pattern, replacement)
    "all experts have the bias of the first": (score, "make_score", r"bias \+ i64\(expert\) \* 2", "bias + 0"),
    "columns at a row's end are left out": (
        score, "make_score", r"if vector < vectors:\n                v = isa\.load_u32x4\(x",
        "if vector < vectors - 1:\n                v = isa.load_u32x4(x",
    ),
    "warps leave their sums in one place": (
        score, "make_score", r"lane \* _WARPS \+ warp\) \* 4\), total", "lane * _WARPS) * 4), total",
    ),
    "an expert is picked again": (pick, "make_pick", r"keys\[j\] = i32\(_LEAST\)", "pass"),
    "of equal logits the higher expert is picked": (
        pick, "make_pick", r"range\(n_words - 1, -1, -1\)", "range(n_words)",
    ),
    "shares are of all experts": (pick, "make_leave", r"not is_normalised or \(taken", "True or (taken"),
}  # fmt: skip


def faults_of(case: dict[str, Any], seed: int, *, ties: bool = False) -> list[str]:
    inputs = CARD.example(case, proof.generator(seed, CPU), CPU)
    if ties:  # experts whose weights are alike, in other words of the bits
        inputs["weight"][32:], inputs["bias"][32:] = inputs["weight"][: len(inputs["weight"]) - 32], 9.0
        inputs["bias"][: len(inputs["weight"]) - 32] = 9.0
    outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute)
    far = [d.output for d in proof.deviations(CARD, case, inputs, outputs) if not d.passes]
    return far + list(CARD.invariants(case, inputs, outputs))


@pytest.mark.parametrize("seed", seeds(2, 6, 40))
def test_a_router_of_any_shape_chooses_its_largest_logits(seed: int) -> None:
    draw = Random(seed)
    experts = draw.choice([2, 5, 31, 32, 33, 64, 100, 128])
    case = {
        **CASE, "m": draw.choice([1, 2, 3, 4, 5, 9]), "experts": experts, "chosen": draw.randint(1, min(8, experts)),
        "hidden": 16 * draw.randint(1, 70), "normalised": draw.random() < 0.5, "bias": draw.random() < 0.5,
    }  # fmt: skip
    assert faults_of(case, seed) == [], case


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("change", [{"experts": 513}, {"chosen": 17}])
def test_more_than_a_warp_chooses_among_is_refused_for_one_row_too(rows: int, change: dict[str, int]) -> None:
    case = {**CASE, "m": rows, **change}
    inputs = CARD.example(case, proof.generator(0, CPU), CPU)
    with pytest.raises(KernelLimit, match="up to 512, 16 chosen"):
        CARD.launches("sm_90a", case, inputs, CARD.outputs(case, inputs))


@pytest.mark.parametrize("bug", slow_from(2, PLANTED))
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults_of(CASE, 5, ties=True) == []
    module, factory, pattern, replacement = PLANTED[bug]
    rebuilt(module, pattern, replacement, monkeypatch, factory, (choose, launcher))
    try:
        found = faults_of(CASE, 5, ties=True)
    except EmulationError as error:
        found = [str(error)]
    assert found, bug
