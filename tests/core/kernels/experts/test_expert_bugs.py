"""Bugs planted in the kernels of the experts' maps are found, by the numbers or by the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_sources import rebuilt
from rings import slow_from

from eagle3core.kernels import proof, registry
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.experts.maps import launcher, operands, steps, walk
from eagle3core.kernels.experts.routing import lone, pick
from eagle3core.kernels.gemm.fp8 import blocks

pytestmark = pytest.mark.emulated

CARD, CPU = registry()["experts"], torch.device("cpu")
TINY: dict[str, Any] = {"m": 3, "experts": 3, "chosen": 2, "hidden": 64, "inner": 32, "dtype": torch.bfloat16}
# Five units of 32: one of the four streams goes from a block of 128 into the next, others end within one.
BY_BLOCK = {**TINY, "hidden": 160, "form": "fp8_blocks", "gate": "silu"}
CASES: dict[str, dict[str, Any]] = {
    "blocks": BY_BLOCK,
    "two blocks": {**BY_BLOCK, "hidden": 256},  # half of the streams begin in the second
    "rows": {**TINY, "form": "fp8", "gate": "silu"},
    "more rows": {**TINY, "m": 9, "form": "fp8", "gate": "silu"},  # groups of 16, which look up what they need by tile
    "most rows": {**TINY, "m": 17, "form": "mxfp4", "gate": "clamped"},  # of 32, with one place for sums
    "mxfp4": {**TINY, "form": "mxfp4", "gate": "clamped"},
    "lone": {**TINY, "m": 1, "experts": 35, "chosen": 3, "form": "mxfp4", "gate": "clamped"},
    "wide and lone": {**TINY, "m": 1, "form": "mxfp4", "gate": "clamped"},  # with one place for sums
    "five pieces": {**TINY, "hidden": 160, "inner": 160, "form": "mxfp4", "gate": "clamped"},  # for four streams
    "stage by stage": {**TINY, "hidden": 160, "form": "mxfp4", "gate": "clamped"},  # some stages are asked for later
}
# Where a block goes on from tile to tile, to the bits of blocks that have one.
SETTINGS: dict[str, dict[str, Any]] = {
    "wide and lone": {"w_tiles": 4},
    "five pieces": {"blocks": 1, "stages": 2},
    "most rows": {"blocks": 1},
    "stage by stage": {"blocks": 1, "stages": 3, "first": 1, "step": 1, "stage_steps": 1},
}
PLANTED = {
    # name: (case, module, factory, pattern, replacement)
    "a stream begins with the scales of another block": (
        "two blocks", blocks, "make_block_walk", r"i64\(unit >> shift\) \* 8", "i64(0)",
    ),
    "a block that a stream ends within is left out": ("blocks", blocks, "make_block_walk", r" or is_last:", ":"),
    "the sum of a block goes on from the one before": (
        "blocks", blocks, "make_block_walk", r"accumulators\[q \+ c\] = zero", "pass",
    ),
    "the lower eight rows have the scale of the upper": (
        "blocks", blocks, "make_block_walk", r"fused\(accumulators\[q\], held\[2 \* r\]",
        "fused(accumulators[q], held[2 * r + 1]",
    ),
    "all experts have the scales of the first": (
        "blocks", walk, "make_walk", r"i64\(info\[0\]\) \* tiles \+ tile0", "i64(tile0)",
    ),
    "rows have the scales of the first expert": (
        "rows", walk, "make_walk", r"own = \(i64\(info\[0\]\) \* tiles \+ i32", "own = (i32",
    ),
    "rows of a larger group have the scales of the first expert": (
        "more rows", walk, "make_walk", r"own = \(i64\(info\[0\]\) \* tiles \+ i32", "own = (i32",
    ),
    "a pair of rows shares the scale of the other pair": (
        "mxfp4", operands, "make_load_operands", r"\(\(lane >> 2\) & 1\) \* 0x0202", "0",
    ),
    "sums are read before all streams have left theirs": (
        "mxfp4", walk, "make_walk", r"wait\(met, met_parity\)", "pass",
    ),
    "one warp too few leaves its sums before they are read": (
        "mxfp4", walk, "make_walk", r"STREAMS \* isa\.ARRIVING_LANES", "(STREAMS - 1) * isa.ARRIVING_LANES",
    ),
    "sums of most rows are read before all streams have left theirs": (
        "most rows", walk, "make_walk", r"cuda\.syncthreads\(\)\n                if not holds", "if not holds",
    ),
    "sums of most rows are left where others still read": (
        "most rows", walk, "make_walk", r"width, y\)\n                cuda\.syncthreads\(\)", "width, y)",
    ),
    "a tile is finished without its biases": (
        "five pieces", walk, "make_walk", r"last_bias\[j\] = held_scales\[j\], held_bias\[j\]",
        "last_bias[j] = held_scales[j], i32(0)",
    ),
    "both tiles under way leave their sums in one place": (
        "five pieces", walk, "make_walk", r"here, there, waits, last_tile = there, here,",
        "here, there, waits, last_tile = here, there,",
    ),
    "a warp leaves sums as those of the stream it began with": (
        "five pieces", walk, "make_walk", r"here, stream, g, t\)\n                cuda\.syncwarp",
        "here, warp, g, t)\n                cuda.syncwarp",
    ),
    "copies go on in the stream that a warp has had": (
        "five pieces", steps, "make_copies", r"stream = following\(stream, pieces\)", "pass",
    ),
    "the last tile of a block is not finished": (
        "five pieces", walk, "make_walk", r"if late and waits != 0", "if late and waits > 1",
    ),
    "what is asked for late lies where the last stage does": (
        "stage by stage", steps, "make_steps", r"ask, behind = after\(ask\), i32\(behind - 1\)",
        "behind = i32(behind - 1)",
    ),
    "more is asked for late than the ring has room for": (
        "stage by stage", steps, "make_steps", r"i32\(behind - 1\)", "i32(behind)",
    ),
    "what is asked for late is not the next stage": (
        "stage by stage", steps, "make_steps", r"if lags and behind > 0:\n                cursor = refill",
        "if lags and behind > 0:\n                refill",
    ),
    "a stage is filled again before all lanes have read it": (
        "stage by stage", steps, "make_steps", r"isa\.cuda\.syncwarp\(\)", "pass",
    ),
    "a stage that is used up is asked for in the place of the one after": (
        "stage by stage", walk, "make_walk", r"i32\(first % stages\)", "i32((first + 1) % stages)",
    ),
    "a lane has the values of the one before": (
        "mxfp4", operands, "make_load_operands", r"steady\(lane \* 8, lane\)", "steady(lane * 8, lane - (lane > 0))",
    ),
    "a lone row's experts leave their parts from the last place on": (
        "lone", lone, "make_groups", r"\(mine, place\), taken, top", "(mine, i32(n_chosen - 1 - place)), taken, top",
    ),
    "an expert is picked again": ("lone", pick, "make_pick", r"keys\[j\] = i32\(_LEAST\)", "pass"),
    "down takes its groups before the first warp has left them": (
        "lone", lone, "make_groups", r"isa\.cuda\.syncthreads\(\)", "pass",
    ),
    "sums are left where groups are still read": (
        "wide and lone", walk, "make_walk", r"meets = late or \(early and choice is not None\)", "meets = late",
    ),
    "a place is taken for its row of x": (
        "mxfp4", walk, "make_walk", r"i64\(isa\.quotient\(own_places\[m\], chosen\)\)", "i64(own_places[m])",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", slow_from(4, PLANTED))
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module, factory, pattern, replacement = PLANTED[bug]
    case = CASES[name]
    inputs = CARD.example(case, proof.generator(5, CPU), CPU)

    def is_right() -> bool:
        try:
            outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, SETTINGS.get(name))
            by_more = proof.run(CARD, "sm_90a", case, inputs, emulator.execute) if name in SETTINGS else outputs
        except EmulationError:
            return False
        if any(proof.differing(outputs[each], by_more[each]) for each in outputs):
            return False
        return all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))

    assert is_right()
    rebuilt(module, pattern, replacement, monkeypatch, factory, (walk, steps, launcher, lone))
    assert not is_right(), bug
