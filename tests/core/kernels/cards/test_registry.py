"""Derived from the registry: every card proves its numbers, its bits, its machine code and its cost."""

import dataclasses
import re
import subprocess
import sys

import pytest
import torch

from eagle3core.kernels import proof, registry
from eagle3core.kernels.card import ARCHES, case_id
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator

CARDS = registry()
CPU = torch.device("cpu")
EXHAUSTIVE = pytest.mark.exhaustive
# Of a GEMM: its epilogues, its ways to feed the tensor cores, layouts of W, and the other dtype.
KINDS = {"store", "residual", "swiglu", "qkv", "head"}
WAYS = {"ring", "tile", "group", "bulk", "rows", "ragged", "f16"}


def cases(field: str):
    return [
        pytest.param(name, case, id=f"{name}: {case_id(case)}")
        for name, card in CARDS.items()
        for case in getattr(card, field)
    ]


HOPPER = ("sm_90a",)  # what the kernels are tuned for; its machine code is looked at first
ELSEWHERE = tuple(arch for arch in ARCHES if arch not in HOPPER)


def variants(field: str, arches=ARCHES):
    """(variant, arch) pairs that share name and constants, hence one pass of the compiler's front end."""
    grouped = {}
    for card in CARDS.values():
        for arch in arches:
            for variant in getattr(card, field)(arch):
                key = (variant.name, repr(variant.constants), variant.threads, variant.blocks_per_sm)
                grouped.setdefault(key, []).append((variant, arch))
    return [pytest.param(pairs, id=" ".join([key[0], *(arch for _, arch in pairs)])) for key, pairs in grouped.items()]


def one_of_each_form(given):
    """Of variants whose names differ in numbers and dtype alone the first; of GEMMs, whose ways to feed the tensor
    cores and whose epilogues meet in registers alone, each way and each epilogue once. Every second of these runs in
    the slow ring, the rest by hand."""
    seen, kept = set(), set()
    for each in given:
        parts = each.id.split(" ")[0].replace("_bf16", "").split("_")
        form = re.sub(r"\d+", "#", "_".join(part for part in parts if part != "f16"))
        epilogue = next((part for part in parts if part in KINDS), form)
        new = {epilogue, *WAYS.intersection(parts)} if parts[0] == "gemm" else {form}
        kept |= {each.id} if new - seen else set()
        seen |= new
    ids = [each.id for each in given]
    return by_hand(given, {*ids} - {*[one for one in ids if one in kept][::2]})


def one_in_five_of_long_ones(given):
    """These take ten seconds a case: a fifth of theirs runs in the slow ring, the others by hand."""
    long = [each.id for each in given if each.values[0] in ("attention", "gemm", "experts", "grow_tree", "route")]
    return by_hand(given, {*long} - {*long[::5]})


COSTLY = ("attention", "gemm", "sample", "select", "grow_tree", "accept", "commit")


def of_the_costly(given, unless=None):
    """The same; of small kernels, of which the fast ring compiles a variant each for Hopper, those without `unless` in
    their id are run by hand."""
    return by_hand(
        given, {p.id for p in given if not p.id.startswith(COSTLY) and (unless is None or unless not in p.id)}
    )


def slow_where(start, given):
    """The same; those whose id begins with `start` (or one of several), which take longest, run in the slow ring."""
    marks = pytest.mark.slow
    return [pytest.param(*p.values, id=p.id, marks=marks) if p.id.startswith(start) else p for p in given]


def by_hand(given, ids):
    """The same, those with these ids marked as run by hand alone."""
    return [pytest.param(*each.values, id=each.id, marks=EXHAUSTIVE) if each.id in ids else each for each in given]


def further_variants_elsewhere():
    """Those of `slow_variants`; what is for sm_80 alone only where it shows a value of a constant that none before did.

    sm_80 has a front end of its own, since it waits for no previous kernel. All else of these kernels goes through that
    of their Hopper variant as well.
    """
    shown = {
        (card.name, name, repr(value))
        for card in CARDS.values()
        for variant in card.variants("sm_80")
        for name, value in variant.constants.items()
    }
    card_of = {variant.name: name for name, card in CARDS.items() for variant in card.slow_variants("sm_80")}
    kept = []
    for given in variants("slow_variants", ELSEWHERE):
        [pairs] = given.values
        values = {
            (card_of[variant.name], name, repr(value))
            for variant, arch in pairs
            if arch == "sm_80"
            for name, value in variant.constants.items()
        }
        if any(arch != "sm_80" for _, arch in pairs) or values - shown:
            kept.append(given)
        shown |= values
    return kept


def cases_elsewhere():
    """Cases on further architectures, where their kernels differ from those before by more than waiting."""
    found = []
    for name, card in CARDS.items():
        for case in card.cases:
            inputs = card.example(case, proof.generator(0, CPU), CPU)
            seen = set()
            for arch in ("sm_90a", *(arch for arch in ARCHES if arch != "sm_90a")):
                launches = [
                    (item.variant.name, repr({**item.variant.constants, "overlap": True}), item.grid)
                    for setting in card.settings
                    for item in card.launches(arch, case, inputs, card.outputs(case, inputs), **setting)
                ]
                if repr(launches) not in seen and arch != "sm_90a":
                    found.append(pytest.param(name, case, arch, id=f"{name} {arch}: {case_id(case)}"))
                seen.add(repr(launches))
    return found


def faults(pairs, disassembled=ARCHES):
    return {
        arch: compile_variant(variant, arch, disassemble=arch in disassembled).faults(variant)
        for variant, arch in pairs
    }


def prove(name, case, device, arch, execute, seed):
    card = CARDS[name]
    inputs = card.example(case, proof.generator(seed, device), device)
    outputs = proof.run(card, arch, case, inputs, execute)
    bad = [d for d in proof.deviations(card, case, inputs, outputs) if not d.passes]
    assert not bad
    assert proof.batch_dependence(card, arch, case, inputs, execute) == []


@pytest.mark.reference
def test_the_registry_is_not_empty_and_names_are_unique():
    assert CARDS
    for name, card in CARDS.items():
        assert card.name == name
        assert card.cases, f"{name} has no emulated case"
        assert card.hand_counts, f"{name} has no hand count"
        assert card.shapes, f"{name} has nothing to measure"


@pytest.mark.reference
def test_listing_the_cards_imports_no_compiler():
    code = (
        "import sys, eagle3core.kernels as k; k.registry(); "
        "print([m for m in ('numba', 'llvmlite', 'greenlet') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.reference
@pytest.mark.parametrize("name", CARDS)
def test_declared_costs_equal_the_hand_counts(name):
    for case, counted in CARDS[name].hand_counts:
        assert CARDS[name].cost(case) == counted, case_id(case)


@pytest.mark.reference
@pytest.mark.parametrize("name", ["pack_paths", "rms_norm", "sample", "select_tree"])
def test_an_op_that_uses_all_of_its_operands_counts_each_of_their_bytes_once(name):
    card = CARDS[name]
    for case in [*card.cases, *card.slow_cases]:
        inputs = card.example(case, proof.generator(0, CPU), CPU)
        operands = [*inputs.values(), *card.outputs(case, inputs).values()]
        assert card.cost(case).bytes == sum(tensor.nbytes for tensor in operands), case_id(case)


@pytest.mark.emulated
@pytest.mark.parametrize(("name", "case"), slow_where("attention: dtype=f16 dim=128", cases("cases")))
def test_emulated_numbers_obey_the_2x_rule_and_bits_do_not_depend_on_company(name, case):
    prove(name, case, CPU, "sm_90a", emulator.execute, seed=1)


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), one_in_five_of_long_ones(cases("slow_cases")))
def test_further_emulated_cases_obey_the_same_rules(name, case):
    prove(name, case, CPU, "sm_90a", emulator.execute, seed=2)


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize(("name", "case", "arch"), one_in_five_of_long_ones(cases_elsewhere()))
def test_other_architectures_tiles_obey_the_same_rules(name, case, arch):
    prove(name, case, CPU, arch, emulator.execute, seed=3)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "pairs", slow_where(("attention_streams_bf16_128", "gemm_bf16_residual_bulk"), variants("variants", HOPPER))
)
def test_a_variant_compiles_without_faults(pairs):
    assert faults(pairs) == {arch: [] for _, arch in pairs}


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("pairs", of_the_costly(variants("variants", ELSEWHERE), unless="sm_100"))
def test_a_variant_compiles_without_faults_on_the_other_architectures(pairs):
    assert faults(pairs) == {arch: [] for _, arch in pairs}


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("pairs", of_the_costly(one_of_each_form(variants("slow_variants", HOPPER))))
def test_a_further_variant_compiles_without_faults(pairs):
    assert faults(pairs) == {arch: [] for _, arch in pairs}


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("pairs", further_variants_elsewhere())
def test_a_further_variant_compiles_without_faults_on_the_other_architectures(pairs):
    # One text goes to every architecture of a pass of the front end: its instructions are looked for in the first,
    # registers, spills, stack and local memory in all. Each kernel is looked at on each architecture above.
    assert faults(pairs, disassembled=[pairs[0][1]]) == {arch: [] for _, arch in pairs}


@pytest.mark.reference
def test_variant_names_are_unique_in_the_package():
    seen = {}
    for arch in ARCHES:
        for card in CARDS.values():
            for variant in [*card.variants(arch), *card.slow_variants(arch)]:
                key = (variant.name, arch)
                constants = dataclasses.astuple(variant)[2]
                assert seen.setdefault(key, constants) == constants, key


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), cases("cases") + cases("slow_cases"))
def test_the_gpu_gives_the_same_proofs(name, case, gpu):
    device, arch, execute = gpu
    prove(name, case, device, arch, execute, seed=4)
