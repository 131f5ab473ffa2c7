"""The kernels of router and experts where rows crowd one expert, have no numbers, or change places; lane by lane."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof, registry
from eagle3core.kernels.card import Variant, parameters
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.experts.route import chosen_of
from eagle3core.kernels.experts.routing.choose import choose_variant
from eagle3core.kernels.experts.routing.lists import lists_of
from eagle3core.kernels.experts.routing.lone import Choice, make_groups
from eagle3core.kernels.experts.routing.pick import words_of
from lab.probes.profiles.costs import launch_bytes

pytestmark = pytest.mark.emulated

CPU = torch.device("cpu")
ROUTE, EXPERTS = registry()["route"], registry()["experts"]
OF_ROUTE: dict[str, Any] = {"experts": 40, "chosen": 3, "hidden": 32, "normalised": True, "bias": False,
                            "dtype": torch.bfloat16}  # fmt: skip
OF_EXPERTS: dict[str, Any] = {"experts": 2, "chosen": 1, "hidden": 32, "inner": 32, "form": "mxfp4", "gate": "clamped",
                              "dtype": torch.bfloat16}  # fmt: skip


def chosen_by_kernel(logits: Tensor, k: int, group_rows: int = 8) -> tuple[Tensor, ...]:
    """(chosen, shares, groups, places) of `logits: [n, X]`."""
    n, experts = logits.shape
    chosen, places = torch.full((n, k), -9, dtype=torch.int32), torch.full((n * k,), -9, dtype=torch.int32)
    shares, groups = torch.full((n, k), torch.nan), torch.full((1 + n * k, 4), -9, dtype=torch.int32)
    variant = choose_variant("sm_90a", experts, k, True, group_rows, n)
    made = {"chosen": chosen, "shares": shares, "groups": groups, "places": places}
    emulator.execute([variant.launch((1,), logits=logits, rows=n, **made)])
    return chosen, shares, groups, places


def make_lone(isa: Any, *, choice: Choice) -> Any:
    """What a warp of the maps knows of a row that it has chosen for, brought out."""
    i32, i64, cuda, (find, group_of, place_of, leave_choice) = isa.i32, isa.i64, isa.cuda, make_groups(isa, choice)
    n_words = words_of(choice.experts)

    def lone(logits: Any, chosen: Any, shares: Any, groups: Any, places: Any) -> None:
        lane, values = i32(cuda.threadIdx.x), cuda.local.array(n_words, isa.f32)
        n_groups, work, taken, top = find(0, values, logits, 0, i32(0), lane)
        leave_choice(values, taken, top, chosen, shares, lane)
        for i in range(n_groups):
            expert, first, count, nothing = group_of(work, i32(i))
            if lane == 0:
                isa.store_u32x4(groups + 16 + i64(i) * 16, expert, first, count, nothing)
                isa.store_u32(places + i64(i) * 4, place_of(0, first))
        if lane == 0:
            isa.store_u32x4(groups, n_groups, i32(0), i32(0), i32(0))

    return lone


def chosen_by_lone(logits: Tensor, k: int) -> tuple[Tensor, ...]:
    """As `chosen_by_kernel`, row by row, as the maps choose for one; groups by expert."""
    found = []
    for one in logits:
        choice = Choice(len(one), k, True)
        chosen, places = torch.full((1, k), -9, dtype=torch.int32), torch.full((k,), -9, dtype=torch.int32)
        shares, groups = torch.full((1, k), torch.nan), torch.full((1 + k, 4), -9, dtype=torch.int32)
        made = {"chosen": chosen, "shares": shares, "groups": groups, "places": places}
        variant = Variant(
            f"lone{choice.name}", make_lone, {"choice": choice},
            parameters("logits:in chosen:out shares:out groups:out places:out"), 32,
        )  # fmt: skip
        emulator.execute([variant.launch((1,), logits=one, **made)])
        ascending = groups[1:, 0].sort().indices + 1
        found.append((chosen, shares, torch.cat([groups[:1], groups[ascending]]), places.sort().values))
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


BOTH = pytest.mark.parametrize("choose", [chosen_by_kernel, chosen_by_lone])


@BOTH
def test_of_equal_logits_the_lower_expert_is_chosen_by_the_kernel_too(choose: Any) -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0])[torch.arange(70) % 5].repeat(2, 1)
    logits[1] = 0.0
    logits[1, 1] = -0.0
    chosen, shares, _, _ = choose(logits, 4)
    assert torch.equal(chosen.long(), chosen_of(logits, 4))
    assert chosen.tolist() == [[1, 2, 4, 6], [0, 1, 2, 3]]
    assert torch.equal(shares, torch.full_like(shares, 0.25))


@BOTH
def test_a_row_of_no_numbers_has_experts_and_disturbs_no_other(choose: Any) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    alone = choose(logits[2:], 3)
    logits[0] = torch.nan
    logits[1, ::2] = torch.inf
    chosen, shares, _, _ = choose(logits, 3)
    assert chosen[0].tolist() == [0, 1, 2]
    assert bool(shares[0].isnan().all())
    assert torch.equal(chosen[2], alone[0][0])
    assert torch.equal(shares[2], alone[1][0])


@BOTH
def test_of_logits_far_apart_the_largest_has_the_whole_share(choose: Any) -> None:
    logits = torch.full((1, 40), -1e4)
    logits[0, 7], logits[0, 3] = 3e3, 1e3
    chosen, shares, _, _ = choose(logits, 3)
    assert chosen.tolist() == [[0, 3, 7]]
    assert shares.tolist() == [[0.0, 0.0, 1.0]]


def test_neighbours_in_any_order_of_size_have_their_places() -> None:
    logits = torch.zeros(1, 70)
    logits[0, [1, 0, 33, 32, 31, 64]] = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    for theirs, ours in zip(chosen_by_kernel(logits, 6), chosen_by_lone(logits, 6), strict=True):
        assert proof.differing(theirs, ours) == 0


def test_rows_with_and_without_numbers_are_listed() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    logits[0] = torch.nan
    chosen, _, groups, places = chosen_by_kernel(logits, 3)
    expected = lists_of(chosen, 8)
    assert torch.equal(places, expected[1])
    assert torch.equal(groups[: 1 + int(groups[0, 0])], expected[0][: 1 + int(groups[0, 0])])


@pytest.mark.parametrize("experts", [5, 31, 32, 33, 128, 200])
def test_a_warp_chooses_for_one_row_as_a_launch_of_its_own_does(experts: int) -> None:
    logits = torch.randn(1, experts, generator=torch.Generator().manual_seed(experts)) * 4
    for theirs, ours in zip(chosen_by_kernel(logits, 4), chosen_by_lone(logits, 4), strict=True):
        assert proof.differing(theirs, ours) == 0


def test_rows_that_all_want_one_expert_are_listed_in_groups() -> None:
    logits = torch.zeros(19, 33)
    logits[:, 32] = 1.0
    _, _, groups, places = chosen_by_kernel(logits, 2)
    assert groups[:7].tolist() == [
        [6, 0, 0, 0], [0, 0, 8, 0], [0, 8, 8, 0], [0, 16, 3, 0], [32, 19, 8, 0], [32, 27, 8, 0], [32, 35, 3, 0],
    ]  # fmt: skip
    assert places.tolist() == [*range(0, 38, 2), *range(1, 38, 2)]


def want(inputs: dict[str, Tensor], experts: list[int]) -> None:
    """A row's logits are largest at its expert."""
    inputs["logits"][:] = inputs["logits"].clamp(max=5.0)
    inputs["logits"][range(len(experts)), experts] = 9.0


def test_rows_that_change_places_keep_their_bits() -> None:
    case = {**OF_EXPERTS, "m": 9}
    inputs = EXPERTS.example(case, proof.generator(3, CPU), CPU)
    want(inputs, [1, 1, 1, 1, 0, 1, 1, 1, 1])  # a group of eight rows, and one of one
    there = proof.run(EXPERTS, "sm_90a", case, inputs, emulator.execute, {"x_tiles": 1})
    order = torch.tensor([8, 4, 0, 7, 1, 6, 2, 5, 3])
    turned = {name: t[order] if name in ("x", "norms", "logits", "shares", "residual") else t
              for name, t in inputs.items()}  # fmt: skip
    back = proof.run(EXPERTS, "sm_90a", case, turned, emulator.execute, {"x_tiles": 1, "blocks": 1})
    assert all(proof.differing(there[name][order], back[name]) == 0 for name in there)


def test_a_row_of_no_numbers_spoils_no_row_of_its_expert() -> None:
    case = {**OF_EXPERTS, "m": 3}
    inputs = EXPERTS.example(case, proof.generator(4, CPU), CPU)
    want(inputs, [1, 1, 1])
    whole = proof.run(EXPERTS, "sm_90a", case, inputs, emulator.execute)
    inputs["x"][1] = torch.nan
    spoilt = proof.run(EXPERTS, "sm_90a", case, inputs, emulator.execute)
    assert bool(spoilt["y"][1].isnan().all())
    assert all(proof.differing(whole[name][::2], spoilt[name][::2]) == 0 for name in whole)


def test_a_launch_counts_the_experts_that_its_rows_choose_on_average() -> None:
    case = {**OF_EXPERTS, "experts": 4, "chosen": 2, "m": 2}
    inputs = EXPERTS.example(case, proof.generator(0, CPU), CPU)
    first = EXPERTS.launches("sm_90a", case, inputs, EXPERTS.outputs(case, inputs))[0]
    one = 64 * 32 * 17 // 32 + 2 * 64  # an expert's 17 bytes for 32 values, and its biases
    rows = 2 * 2 * 32 + 2 * 2 * 32 * 2 + 4 * 4  # x, what is left of it, and places
    assert launch_bytes(first, 0.0) == 3 * one + rows  # of four, a row misses half: both miss one


@pytest.mark.parametrize("change", [{"experts": 513}, {"chosen": 17}])
def test_more_experts_than_a_block_chooses_among_are_refused(change: dict[str, int]) -> None:
    case = {**OF_ROUTE, **change}
    with pytest.raises(KernelLimit, match="up to 512, 16 chosen"):
        choose_variant("sm_90a", case["experts"], case["chosen"], True, 8, 1)


def test_more_rows_than_a_router_has_bits_for_are_refused() -> None:
    with pytest.raises(KernelLimit, match="100000 rows for a router of 128 experts"):
        choose_variant("sm_90a", 128, 4, True, 8, 100_000)


def test_wrong_shares_and_lists_of_a_router_are_found() -> None:
    case = {**OF_ROUTE, "m": 3, "experts": 5, "normalised": False}
    inputs = ROUTE.example(case, proof.generator(5, CPU), CPU)
    outputs = proof.run(ROUTE, "sm_90a", case, inputs, emulator.execute)
    assert ROUTE.invariants(case, inputs, outputs) == []
    outputs["shares"][2] *= 1.001
    outputs["places"][5] += 1
    assert len(ROUTE.invariants(case, inputs, outputs)) == 2
