"""The form in which racecheck sees kernels it cannot follow: the same source, clean and equal in the emulator."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3core.kernels import cubins, proof, registry
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from lab.probes.sanitizer.form import in_form, is_in_form, names_in, variant_in_form, waiting_arrivals
from lab.probes.sanitizer.run import CPU, seen_by, variants

CARDS = registry()


def kernels(name: str) -> list[Any]:
    return variants([CARDS[name]], "sm_90a")


@pytest.mark.reference
def test_only_kernels_that_racecheck_cannot_follow_get_another_form() -> None:
    changed = {v.make.__name__ for card in CARDS for v in kernels(card) if variant_in_form(v) is not v}
    assert changed == {"make_attention_rows", "make_attention_group", "make_gemm_group", "make_walk"}


@pytest.mark.reference
def test_a_kernel_in_the_form_has_a_cubin_of_its_own_and_travels_to_other_processes() -> None:
    for name in ("gemm", "attention"):
        variant = next(v for v in kernels(name) if variant_in_form(v) is not v)
        changed = variant_in_form(variant)
        assert is_in_form(changed)
        assert not is_in_form(variant)
        assert cubins.digest(changed, "sm_90a") != cubins.digest(variant, "sm_90a")
        again = pickle.loads(pickle.dumps(changed))
        assert again.make == changed.make
        assert cubins.digest(again, "sm_90a") == cubins.digest(changed, "sm_90a")


@pytest.mark.compiled
def test_kernels_in_the_form_are_compiled_beside_others(tmp_path: Path) -> None:
    changed = next(variant_in_form(v) for v in kernels("gemm") if variant_in_form(v) is not v)
    assert cubins.build_cubins([changed], "sm_90a", tmp_path) == 1


@pytest.mark.reference
def test_names_are_found_in_the_functions_that_a_kernel_inlines() -> None:
    def outer(isa: Any) -> Any:
        def inner() -> None:
            isa.named_arrive(1, 64)

        def kernel() -> None:
            inner()

        return kernel

    assert "named_arrive" in names_in(outer(emulator))


@pytest.mark.reference
def test_memcheck_and_plants_named_as_written_see_what_the_engine_runs() -> None:
    from lab.probes.sanitizer.plants import WRITTEN

    assert seen_by("memcheck", CARDS["gemm"]) is CARDS["gemm"]
    assert all(seen_by("racecheck", card) is card for card in WRITTEN)


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["gemm", "attention"])
def test_a_kernel_in_the_form_gives_the_same_bits(name: str) -> None:
    card = CARDS[name]
    for case, setting in ((case, setting) for case in card.cases for setting in card.settings):
        inputs = card.example(case, proof.generator(1, CPU), CPU)
        planned = in_form(card).launches("sm_90a", case, inputs, card.outputs(case, inputs), **setting)
        if any(is_in_form(item.variant) for item in planned):
            break
    else:
        pytest.fail(f"no case of {name} takes a kernel that has another form")
    plain = proof.run(card, "sm_90a", case, inputs, emulator.execute, setting)
    other = proof.run(in_form(card), "sm_90a", case, inputs, emulator.execute, setting)
    assert {key: proof.differing(tensor, other[key]) for key, tensor in plain.items()} == dict.fromkeys(plain, 0)


@pytest.mark.emulated
def test_an_arrival_that_waits_where_nobody_comes_is_a_deadlock() -> None:
    from eagle3core.kernels.card import Variant, parameters

    def make(isa: Any) -> Any:
        def kernel(x: Any) -> None:
            isa.named_arrive(1, 64)

        return kernel

    variant = Variant("arrives", make, {}, parameters("x:in"), 32)
    x = torch.zeros(1)
    emulator.execute([variant.launch((1,), x=x)])
    with pytest.raises(EmulationError, match="deadlock"):
        emulator.execute([variant.launch((1,), x=x)], waiting_arrivals(emulator))
