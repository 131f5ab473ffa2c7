"""Attention by warpgroups has the bits of the other kernels, in the emulator and on a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from warpgroup_cases import (
    ARCH,
    BUNDLE,
    BUNDLES,
    CHUNK,
    LONG,
    MANY_BUNDLES,
    ONE,
    PAIR,
    ROWS,
    SHAPE,
    SHORT,
    SHORT_BUNDLE,
    SHORT_ONE,
    SHORT_TWO_GROUPS,
    STREAMS,
    TINY,
    TREE,
    TWO_GROUPS,
    TWO_STREAMS,
    WHOLE_SETS,
)

from eagle3core.kernels import proof
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.plan import ruled_plan
from eagle3core.kernels.card import Case
from eagle3core.kernels.emulator import instructions as emulator

CPU = torch.device("cpu")
slow = pytest.mark.slow


def outputs(case: Case, setting: dict[str, Any], isa: Any = None, seed: int = 3) -> dict[str, torch.Tensor]:
    inputs = CARD.example(case, proof.generator(seed, CPU), CPU)
    made = CARD.outputs(case, inputs)
    emulator.execute(CARD.launches(ARCH, case, inputs, made, **setting), isa=isa)
    return made


def differing(case: Case, setting: dict[str, Any], isa: Any = None, wanted: dict[str, Any] = ROWS) -> int:
    ours, theirs = outputs(case, setting, isa), outputs(case, wanted)
    assert ours["out"].isfinite().all()
    return sum(proof.differing(ours[name], theirs[name]) for name in ours)


CASES = [
    (CHUNK, ONE),
    (PAIR, ONE),
    ({**SHORT, "tokens": 16, "prefix": (150, -1)}, SHORT_BUNDLE),
    (SHORT, SHORT_BUNDLE),
    (SHORT, {**SHORT_ONE, "run": 1}),
    ({**SHORT, "order": (2, 4), "prefix": (120, 56, -1, 0), "sinks": True}, SHORT_ONE),
    ({**SHORT, "heads": 2, "order": (2, 4), "prefix": (70, 56, -1, 0), "counting": True}, SHORT_ONE),
    ({**SHORT, "kv_heads": 2, "prefix": (200, 30), "window": 20, "sinks": True}, SHORT_BUNDLE),
    ({**SHORT, "prefix": (200, 90), "tokens": 8, "paths": True, "tree": "random"}, BUNDLE),
    ({**SHORT, "order": (2, 8), "prefix": (200, 90)}, SHORT_ONE),
    (MANY_BUNDLES, {**ONE, "run": 16}),
    (BUNDLES, {**ONE, "run": 8}),
    pytest.param({**BUNDLES, "prefix": (-1, 77), "window": 50, "sinks": True}, {**ONE, "run": 8}, marks=slow),
    pytest.param(
        {**SHORT, "dim": 128, "order": (2, 4), "prefix": (100, 140), "tokens": 17, "window": 40},
        {**SHORT_TWO_GROUPS, "stages": 2},
        marks=slow,
    ),
    pytest.param(
        {**SHORT, "heads": 4, "dim": 128, "order": (32, 4), "prefix": (1100,), "tokens": 17, "sinks": True},
        {**SHORT_TWO_GROUPS, "run": 32, "stages": 2},
        marks=pytest.mark.exhaustive,
    ),
    (WHOLE_SETS, ONE),
    (BUNDLES, {**ONE, "run": 4}),
    ({**BUNDLES, "kv_heads": 2, "prefix": (30,)}, {**ONE, "run": 4}),
    pytest.param({**BUNDLES, "window": 90, "sinks": True}, {**ONE, "run": 8}, marks=slow),
    pytest.param({**BUNDLES, "tokens": 6, "paths": True, "tree": "random"}, {**TWO_GROUPS, "run": 8}, marks=slow),
    pytest.param(BUNDLES, {**TWO_STREAMS, "run": 4}, marks=slow),
    pytest.param(BUNDLES, {**ONE, "run": 3}, marks=slow),
    (TREE, ONE),
    ({**TINY, "prefix": (75, -3), "window": 20, "sinks": True, "counting": True, "tokens": 2}, ONE),
    pytest.param({**TINY, "prefix": (93, 14), "tokens": 3, "tree": "chain"}, TWO_STREAMS, marks=slow),
    pytest.param(
        {**TINY, "prefix": (75, 9), "earlier": 5, "window": 20, "tokens": 3, "counting": True}, ONE, marks=slow
    ),
    pytest.param({**TINY, "heads": 4, "prefix": (300, 9), "tokens": 17, "paths": True}, TWO_STREAMS, marks=slow),
    pytest.param(
        {**TINY, "heads": 4, "dim": 128, "prefix": (129, -1, 0), "tokens": 18, "tree": "chain"},
        {**TWO_GROUPS, "stages": 2},
        marks=slow,
    ),
    pytest.param({**TREE, "prefix": (150,), "window": 40, "sinks": True}, ONE, marks=slow),
    pytest.param(
        {
            **TINY,
            "heads": 4,
            "dim": 128,
            "order": (4, 2),
            "prefix": (0, 64),
            "tokens": 7,
            "paths": True,
            "dtype": "f16",
        },
        TWO_STREAMS,
        marks=slow,
    ),
    pytest.param(
        {**TINY, "heads": 4, "prefix": (300,), "tokens": 40, "paths": True}, TWO_GROUPS, marks=pytest.mark.exhaustive
    ),
    pytest.param(
        {**TINY, "heads": 16, "order": (2, 4), "prefix": (200,), "tokens": 9, "window": 33, "tree": "chain"},
        {**TWO_GROUPS, "stages": 2},
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.emulated
@pytest.mark.parametrize(("case", "setting"), CASES)
def test_warpgroups_give_the_bits_of_warps(case: Case, setting: dict[str, Any]) -> None:
    assert differing(case, setting) == 0


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({**TINY, "heads": 4, "dim": 128, "prefix": (150, -1), "tokens": 4, "tree": "chain", "dtype": "f16"}, ONE),
        pytest.param({**TINY, "prefix": (93, 14), "tokens": 3, "window": 20}, TWO_STREAMS, marks=slow),
    ],
)
def test_warpgroups_give_the_bits_of_streams(case: Case, setting: dict[str, Any]) -> None:
    assert differing(case, setting, wanted=STREAMS) == 0


@slow
@pytest.mark.emulated
def test_maxima_that_move_in_one_warp_alone_move_in_its_place() -> None:
    """Rows of one warp see scores far apart; the others of its group add their units one by one beside it."""
    case = {**TINY, "heads": 8, "prefix": (400,), "tokens": 8, "paths": True}
    inputs = CARD.example(case, proof.generator(4, CPU), CPU)
    inputs["q"][:, :2] *= 9
    inputs["k"] = inputs["k"] * torch.linspace(0.2, 6, 64)[:, None].to(torch.bfloat16)
    made = []
    for setting in (ONE, ROWS):
        made.append(CARD.outputs(case, inputs))
        emulator.execute(CARD.launches(ARCH, case, inputs, made[-1], **setting))
    assert proof.differing(made[0]["out"], made[1]["out"]) == 0
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, made[0]))


# ---- on a GPU


def hopper(gpu: Any) -> tuple[torch.device, Any]:
    """The device and its executor, where it is one whose warpgroups multiply."""
    device, arch, execute = gpu
    if arch != ARCH:
        pytest.skip(f"warpgroups multiply on {ARCH} alone, and this is {arch}")
    return device, execute


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "setting"), [getattr(each, "values", each) for each in CASES])
def test_warpgroups_give_the_bits_of_warps_on_the_gpu(case: Case, setting: dict[str, Any], gpu: Any) -> None:
    device, execute = hopper(gpu)
    inputs = CARD.example(case, proof.generator(3, device), device)
    ours, theirs = (proof.run(CARD, ARCH, case, inputs, execute, each) for each in (setting, ROWS))
    assert {name: proof.differing(ours[name], theirs[name]) for name in ours} == dict.fromkeys(ours, 0)
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, ours))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "setting"), [(16, {}), (16, {"stages": 2}), (32, {}), (64, {})])
def test_a_tree_over_32768_keys_has_the_bits_of_warps_on_the_gpu(
    tokens: int, setting: dict[str, Any], gpu: Any
) -> None:
    device, execute = hopper(gpu)
    case = {**LONG, "tokens": tokens}
    inputs = CARD.example(case, proof.generator(tokens, device), device)
    by_warps, by_groups = (
        asdict(ruled_plan(ARCH, SHAPE, tokens, 1, 8, paths=True, grouped=grouped)) for grouped in (False, True)
    )
    del by_warps["counting"], by_groups["counting"]
    first = proof.run(CARD, ARCH, case, inputs, execute, by_warps)["out"]
    for _ in range(5):  # who waits for whom changes from run to run
        again = proof.run(CARD, ARCH, case, inputs, execute, {**by_groups, **setting})["out"]
        assert proof.differing(first, again) == 0
