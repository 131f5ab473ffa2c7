"""Every cut that is worth timing gives the default's bits, lane by lane, and compiles without spills."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof, registry
from eagle3core.kernels.card import ARCHES
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.now import lane
from eagle3core.kernels.experts.maps.form import Form, form_for, swept
from eagle3core.kernels.experts.maps.launcher import walk_variant
from eagle3core.kernels.experts.maps.order import UNIT_BYTES
from eagle3core.kernels.experts.routing.lone import Choice

CPU, CARD = torch.device("cpu"), registry()["experts"]
# Pieces of six units (of four with scales of blocks), and of one: steps of several units and ragged stages.
TINY: dict[str, Any] = {"experts": 3, "chosen": 1, "hidden": 768, "inner": 96, "gate": "silu", "dtype": torch.bfloat16}
CROWD = [2] * 9 + [0]  # a group of eight rows of one expert and a group of one; an expert with a row, one without


def settings_for(form: str, x_tiles: int, arch: str = "sm_90a") -> list[dict[str, Any]]:
    """What is worth timing where gate and up have 12 tiles and down has 48."""
    cuts = swept(arch, form, x_tiles, [(TINY["hidden"], 12), (TINY["inner"], 48)])
    return [{"x_tiles": x_tiles, **asdict(cut)} for cut in cuts]


def unequal(case: dict[str, Any], chosen: list[int], settings: list[dict[str, Any]], **default: Any) -> list[str]:
    """Outputs that a setting gives other bits in than the default."""
    inputs = CARD.example(case, proof.generator(6, CPU), CPU)
    inputs["logits"][range(len(chosen)), chosen] = 20.0
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, default)
    found = []
    for setting in settings:
        ours = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)
        found += [f"{name} with {setting}" for name in expected if proof.differing(ours[name], expected[name])]
    return found


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.exhaustive  # on a GPU `bench --settings` holds each cut to the default's bits before it is timed
@pytest.mark.parametrize("form", UNIT_BYTES)
def test_every_cut_gives_the_defaults_bits(form: str) -> None:
    case, settings = {**TINY, "m": len(CROWD), "form": form}, settings_for(form, 1)
    assert len(settings) >= 4
    assert unequal(case, CROWD, settings, x_tiles=1) == []


@pytest.mark.emulated
def test_a_cut_gives_the_defaults_bits_with_few_blocks_that_walk_over_several_experts() -> None:
    case = {**TINY, "m": 3, "hidden": 96, "inner": 32, "form": "mxfp4", "gate": "clamped"}
    settings = [{"w_tiles": 2, "resident": 4, "step": 3, "stage_steps": 2, "stages": 3, "blocks": n} for n in (1, 3)]
    assert unequal(case, [0, 1, 2], settings) == []


@pytest.mark.emulated
@pytest.mark.parametrize(("first", "expected"), [(0, "AAAWAWAWA"), (1, "AWAAWAAWA"), (2, "AAWAAWAWA")])
def test_a_stage_that_lands_brings_one_of_those_not_asked_for_at_first(
    first: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a warp asks for (A) and waits for (W) in its first tile, of three stages."""
    done: list[str] = []

    def told(name: str, letter: str) -> None:
        call = getattr(emulator, name)

        def noted(*operands: Any) -> Any:
            if lane().index == 0:
                done.append(letter)
            return call(*operands)

        monkeypatch.setattr(emulator, name, noted)

    told("warp_bulk_fill", "A")
    told("mbarrier_wait", "W")
    case = {**TINY, "m": 1, "experts": 2, "hidden": 384, "inner": 32, "form": "mxfp4"}
    inputs = CARD.example(case, proof.generator(7, CPU), CPU)
    cut = {"w_tiles": 1, "step": 1, "stage_steps": 1, "stages": 3, "first": first, "blocks": 1}
    proof.run(CARD, "sm_90a", case, inputs, emulator.execute, cut)
    assert "".join(done).startswith(expected)


@pytest.mark.emulated
def test_a_row_of_no_numbers_leaves_nothing_to_a_smaller_group_behind_its_own() -> None:
    """A lane keeps x of the group before where the next one has no such row."""
    case = {**TINY, "m": len(CROWD), "form": "mxfp4"}
    inputs = CARD.example(case, proof.generator(8, CPU), CPU)
    inputs["logits"][range(len(CROWD)), CROWD] = 20.0
    clean = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {"blocks": 1})
    spoilt = 5  # in the group of eight; the one behind it has a single row
    inputs["x"][spoilt] = torch.nan
    ours = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {"blocks": 1})
    others = [row for row in range(len(CROWD)) if row != spoilt]
    assert not ours["parts"][spoilt].isfinite().any()
    assert [name for name in clean if proof.differing(ours[name][others], clean[name][others])] == []


@pytest.mark.reference
def test_gate_and_up_of_one_row_alone_ask_stage_by_stage_and_down_for_all_at_once() -> None:
    """Down asks before the launch before it has ended, when nobody waits for its first stage."""
    shape = next(case for case in CARD.shapes if case["m"] == 1 and case["form"] == "mxfp4")
    for rows, first in ((1, 1), (4, 3)):
        up, down = CARD.variants_of("sm_90a", {**shape, "m": rows})[:2]
        assert (up.constants["first"], down.constants["first"]) == (first, down.constants["stages"])
        assert up.constants["stages"] == down.constants["stages"] == (2 if rows == 1 else 3)


@pytest.mark.reference
@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_launched_is_what_the_card_says_is_compiled(rows: int) -> None:
    case = {**TINY, "m": rows, "form": "mxfp4"}
    inputs = CARD.example(case, proof.generator(9, CPU), CPU)
    launched = [one.variant.name for one in CARD.launches("sm_90a", case, inputs, CARD.outputs(case, inputs))]
    assert launched == [variant.name for variant in CARD.variants_of("sm_90a", case)]


@pytest.mark.reference
def test_cuts_are_those_that_fit_a_processor_and_divide_the_tiles() -> None:
    whole = [(2880, 360), (2880, 180)]
    assert len(swept("sm_90a", "mxfp4", 1, whole)) == 13
    assert len(swept("sm_90a", "fp8", 1, [(2048, 96), (768, 128)])) == 12, "all fit where they are to be timed"
    fewer = swept("sm_90a", "mxfp4", 1, [(2880, 361), (2880, 180)])
    assert {cut.w_tiles for cut in fewer} == {1}
    for cut in swept("sm_80", "mxfp4", 1, whole):
        assert form_for("mxfp4", 2880, 1, asdict(cut)).resident_on("sm_80", "mxfp4") == cut.resident
    assert len(swept("sm_80", "mxfp4", 1, whole)) < len(swept("sm_90a", "mxfp4", 1, whole))
    assert form_for("fp8", 2048, 1, {"step": 6}).step == 4, "pieces of four units"


@pytest.mark.reference
def test_a_step_that_does_not_divide_the_pieces_is_refused() -> None:
    odd = walk_variant("sm_90a", "bf16", "mxfp4", 2880, "", False, Form(1, 1, 3, 4, 1, 3))
    with pytest.raises(KernelLimit, match="a step of 4 units in pieces of 6"):
        odd.make(emulator, **odd.constants)


@pytest.mark.reference
@pytest.mark.parametrize("first", [-1, 4])
def test_more_stages_at_first_than_there_are_is_refused(first: int) -> None:
    hasty = walk_variant("sm_90a", "bf16", "mxfp4", 2880, "silu", False, Form(1, 1, 3, 6, 1, 3, first))
    with pytest.raises(KernelLimit, match=f"{first} stages at first of 3"):
        hasty.make(emulator, **hasty.constants)


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.exhaustive  # about 600 kernels; those that a target launches are compiled with their card's
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("form", "x_tiles"), [("mxfp4", 1), ("mxfp4", 2), ("fp8", 1), ("fp8_blocks", 1), ("plain", 1)])
def test_every_cut_compiles_without_spills(form: str, x_tiles: int, arch: str) -> None:
    gate, hidden, inner = ("clamped", 2880, 2880) if form == "mxfp4" else ("silu", 2048, 768)
    for cut in swept(arch, form, x_tiles, [(hidden, 2 * inner // 16), (inner, hidden // 16)]):
        for k, kind in ((hidden, gate), (inner, "")):
            made = form_for(form, k, x_tiles, asdict(cut))
            variant = walk_variant(arch, "bf16", form, k, kind, gate == "clamped", made)
            assert compile_variant(variant, arch, disassemble=True).faults(variant) == [], variant.name


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch != "sm_90a"])
def test_maps_that_finish_tiles_late_compile_for_other_architectures(arch: str) -> None:
    """Barriers that a warp waits at differ there, and nothing else of every change compiles this cut for them."""
    cut = form_for("mxfp4", 2880, 1)
    assert cut.buffers == 2
    for gate, choice in (("clamped", Choice(128, 4, True)), ("", None)):
        variant = walk_variant(arch, "bf16", "mxfp4", 2880, gate, True, cut, choice)
        assert compile_variant(variant, arch, disassemble=True).faults(variant) == []


@pytest.mark.emulated
@pytest.mark.parametrize("form", ["mxfp4", "fp8", "fp8_blocks"])
def test_blocks_that_go_on_to_further_tiles_give_the_defaults_bits(form: str) -> None:
    """Few blocks, which go on to further tiles, groups and experts, with a ring that wraps within a tile."""
    case = {**TINY, "m": 5, "hidden": 160, "inner": 32, "form": form, "gate": "clamped" if form == "mxfp4" else "silu"}
    settings = [
        {"x_tiles": 1, "w_tiles": w, "stage_steps": 2, "stages": 2, "blocks": n}
        for w, n in ((1, 2), (2, 1), (1, 1), (2, 3))
    ]
    settings.append({"x_tiles": 8, "step": 1, "stages": 2})  # more items than are held
    assert unequal(case, [2, 0, 2, 2, 0], settings, x_tiles=1) == []
