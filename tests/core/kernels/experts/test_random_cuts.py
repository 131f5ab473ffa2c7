"""Experts of random shapes: any cut of their maps gives the default's bits, and those are near enough to the truth."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from rings import seeds

from eagle3core.kernels import proof, registry
from eagle3core.kernels.card import SHARED_BYTES
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.experts.maps.form import form_for
from eagle3core.kernels.experts.maps.order import UNIT_BYTES
from eagle3core.kernels.layer.embedding import partial_squares_reference

CARD, CPU = registry()["experts"], torch.device("cpu")


def drawn_case(draw: Random) -> dict[str, Any]:
    form, experts = draw.choice(sorted(UNIT_BYTES)), draw.randint(2, 5)
    return {
        "m": draw.choice([1, 1, 2, 3, 5, 9, 17, 33]), "experts": experts, "chosen": draw.randint(1, min(3, experts)),
        "hidden": 32 * draw.choice([1, 2, 3, 5, 6, 8, 9, 12, 15]), "inner": 32 * draw.choice([1, 2, 3, 5]),
        "form": form, "gate": "clamped" if form == "mxfp4" else "silu", "dtype": torch.bfloat16,
    }  # fmt: skip


def drawn_setting(draw: Random) -> dict[str, Any]:
    """Few blocks, which go on from tile to tile and expert to expert, with rings that wrap within a tile."""
    return {
        "blocks": draw.randint(1, 6), "processors": draw.randint(1, 3), "stages": draw.randint(2, 4),
        "stage_steps": draw.randint(1, 3), "step": draw.choice([1, 2, 3, 6]), "w_tiles": draw.choice([1, 2]),
        "x_tiles": draw.choice([1, 1, 2, 4, 8]), "first": draw.randint(0, 2),
    }  # fmt: skip


def has_room(setting: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether a block has the shared memory for it, in both maps."""
    own = {name: value for name, value in setting.items() if name not in ("blocks", "processors", "x_tiles")}
    cuts = (form_for(case["form"], case[k], setting["x_tiles"], own) for k in ("hidden", "inner"))
    return all(cut.shared_bytes(case["form"]) <= SHARED_BYTES["sm_90a"] for cut in cuts)


@pytest.mark.emulated
@pytest.mark.parametrize("seed", seeds(2, 6, 192))
def test_any_cut_of_any_experts_gives_the_defaults_bits(seed: int) -> None:
    draw = Random(seed)
    case = drawn_case(draw)
    inputs = CARD.example(case, proof.generator(seed, CPU), CPU)
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute)
    # Of a row so narrow there may be two sums of squares: too few for a rule about the largest error of many.
    failing = {d.output for d in proof.deviations(CARD, case, inputs, expected) if not d.passes}
    assert failing <= {"sums"}, case
    squares = partial_squares_reference(expected["y"].double())
    assert torch.allclose(expected["sums"].double(), squares, rtol=1e-5, atol=0.0), case
    for _ in range(2):
        setting = next(filter(lambda made: has_room(made, case), iter(lambda: drawn_setting(draw), None)))
        ours = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)
        assert [name for name in expected if proof.differing(ours[name], expected[name])] == [], (case, setting)
