"""A step's kernels are given to its stages by place, and a stage's floor is its part of the step's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3core.kernels.card import Call, Launch, Variant
from eagle3core.step.program import Program, Stage
from lab.errors import RunFailed
from lab.pairs.planted import GEOMETRIES
from lab.probes.bench.floors import step_floor, token_bytes, weight_bytes
from lab.probes.proofs.gpu_trace import Span
from lab.probes.proofs.steps import BETWEEN_STEPS, EDGE_STEPS, StepProfile, taken_apart
from lab.probes.speed.stages import profiled_values

pytestmark = pytest.mark.reference


# -- a step's kernels


def make_nothing(isa: Any) -> Any:
    raise AssertionError("a program of names is never compiled")


def launch_of(letter: str) -> Launch:
    return Variant(letter, make_nothing, {}, (), 32).launch((1,))


def program(*stages: tuple[str, str]) -> Program:
    """Stages with a call of one launch a letter, each letter a variant."""
    return tuple(
        Stage(name, tuple(Call(letter, {}, print, (launch_of(letter),)) for letter in letters))
        for name, letters in stages
    )


PROGRAM = program(
    ("tree.masks", "t"), ("target.0.attn", "qa"), ("target.1.attn", "qa"), ("accept", "x"), ("rewind", "")
)
# Begin and end of each kernel: the third begins before the second has ended, the fourth after a gap of 2.
STEP = (("t", 0.0, 3.0), ("q", 3.5, 10.0), ("a", 8.0, 14.0), ("q", 16.0, 20.0), ("a", 19.0, 19.5), ("x", 20.0, 21.0))


def kernels(n_steps: int, period: float = 25.0) -> list[Span]:
    return [Span(name, at * period + a, at * period + b) for at in range(n_steps) for name, a, b in STEP]


def test_own_times_are_those_counted_by_hand_and_sum_to_the_step() -> None:
    n = EDGE_STEPS + 4
    found = taken_apart(kernels(n), PROGRAM, n, 100.0)
    assert [stage.stage for stage in found.stages] == ["tree", "target.attn", "accept", BETWEEN_STEPS]
    own = {stage.stage: stage.own_us[0] for stage in found.stages}
    gaps = {stage.stage: stage.gap_us[0] for stage in found.stages}
    assert own == pytest.approx({"tree": 3.0, "target.attn": 17.0, "accept": 1.0, BETWEEN_STEPS: 4.0})
    assert gaps == pytest.approx({"tree": 0.0, "target.attn": 2.5, "accept": 0.0, BETWEEN_STEPS: 4.0})
    assert [stage.n_kernels for stage in found.stages] == [1, 4, 1, 0]
    assert found.step_us == pytest.approx([25.0] * 3), "the first steps are left out, the last has no next one"
    assert found.sum_over_step == pytest.approx(1.0)


def test_a_profile_of_other_kernels_is_refused() -> None:
    n = EDGE_STEPS + 2
    whole, one = kernels(n), Span("t", 1e6, 1e6 + 1)
    for n_lost in (1, len(STEP), EDGE_STEPS * len(STEP)):  # while the profiler starts
        assert taken_apart(whole[n_lost:], PROGRAM, n, 100.0) == taken_apart(whole, PROGRAM, n, 100.0)
    for other in (whole[EDGE_STEPS * len(STEP) + 1 :], [*whole, one]):
        with pytest.raises(RunFailed, match=f"holds {len(other)} kernels"):
            taken_apart(other, PROGRAM, n, 100.0)
    for shifted in ([*whole[1:], one], whole[:-1], [*whole[:14], *whole[15:]]):  # places no longer say what ran
        with pytest.raises(RunFailed, match="ran as"):
            taken_apart(shifted, PROGRAM, n, 100.0)


def test_a_stage_is_floor_and_kernels_above_it_and_gaps_and_the_row_says_if_the_parts_are_the_whole() -> None:
    n = EDGE_STEPS + 4
    profile = taken_apart(kernels(n), PROGRAM, n, 100.0)
    geometry = GEOMETRIES["nano"]
    floor = step_floor(geometry.target, None, k=0, batch=1, cached=100.0, itemsize=2)
    gb_per_s = floor.stages["target.attn"] / 10.0 / 1e3  # then its bytes take 10 us
    values = profiled_values(profile, floor, gb_per_s, timed_us=25.1)
    attn = values["target.attn"]
    assert [attn[name] for name in ("floor_us", "kernel_us", "gap_us", "own_us")] == pytest.approx([10, 4.5, 2.5, 17])
    between = values[BETWEEN_STEPS]
    assert (between["floor_us"], between["kernel_us"], between["gap_us"]) == (0.0, 0.0, 4.0)
    assert attn["sums_to_step"] is True
    assert attn["profile_is_true"] is True
    assert profiled_values(profile, floor, gb_per_s, timed_us=20.0)["accept"]["profile_is_true"] is False
    lossy = StepProfile(profile.stages, tuple(us * 1.05 for us in profile.step_us), 100.0)
    assert profiled_values(lossy, floor, gb_per_s, timed_us=25.0)["accept"]["sums_to_step"] is False


# -- floors


@pytest.mark.parametrize("geometry", ["nano", "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_floors_of_the_stages_sum_to_the_step_as_counted_whole(geometry: str, tied: bool) -> None:
    shapes = GEOMETRIES[geometry]
    target, draft = replace(shapes.target, tie_word_embeddings=tied), shapes.draft
    floor = step_floor(target, draft, k=3, batch=4, cached=1000.0, itemsize=2)
    table = 0 if tied else target.vocab_size * target.block.hidden_size * 2
    base = weight_bytes(target, 2) - table + 4000 * token_bytes(target.block, target.n_layers, 2)
    assert sum(n for stage, n in floor.stages.items() if stage.startswith("target")) == floor.base_bytes == base
    assert sum(floor.stages.values()) == floor.step_bytes
    total_us = sum(floor.stage_us(stage, 4578.0) for stage in floor.stages)
    assert total_us == pytest.approx(1e3 * floor.ms(4578.0))
    assert floor.stage_us("accept", 4578.0) == 0.0
    hidden, inner = target.block.hidden_size, target.block.intermediate_size
    assert floor.stages["target.mlp"] == target.n_layers * (3 * hidden * inner + hidden) * 2, "and its norm"
    assert floor.stages["draft.head"] == 3 * (draft.draft_vocab_size * hidden + hidden) * 2
    assert "draft.fc" not in step_floor(target, draft, k=0, batch=1, cached=10.0, itemsize=2).stages
