"""The GEMM has two definitions in plain torch: what its launch means in a program, and what its kernels are held to."""

import pytest
import torch

from eagle3core.kernels import proof
from eagle3core.kernels.card import case_id
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.card import CARD
from eagle3core.kernels.gemm.meaning import GEMM
from eagle3core.kernels.gemm.reference import epilogue_of, n_weight_rows, packed_inputs

pytestmark = pytest.mark.reference
CPU = torch.device("cpu")


def by_meaning(case, inputs):
    """Outputs of the call that a program would make of a case, written over poison."""
    outputs, epilogue = CARD.outputs(case, inputs), epilogue_of(case)
    inputs = packed_inputs(case, inputs)
    others = {name: tensor for name, tensor in {**inputs, **outputs}.items() if name not in ("x", "w", "y")}
    call = GEMM.call(
        None, epilogue, x=inputs["x"], w=inputs["w"], y=outputs["y"], k=case["k"], packed=case["packed"],
        weight_rows=n_weight_rows(case), q_heads=case.get("q_heads", 0), kv_heads=case.get("kv_heads", 0),
        operands=others,
    )  # fmt: skip
    call.meaning()
    return outputs


def faults(case, damage=lambda inputs: inputs):
    """Where what is meant by a case, given damaged inputs, departs from its reference, in words."""
    inputs = CARD.example(case, proof.generator(1, CPU), CPU)
    outputs = by_meaning(case, damage(inputs))
    found = [str(each) for each in proof.deviations(CARD, case, inputs, outputs) if not each.passes]
    return found + CARD.invariants(case, inputs, outputs)


@pytest.mark.parametrize("case", [*CARD.cases, *CARD.slow_cases], ids=case_id)
def test_what_a_launch_means_in_a_program_is_what_its_kernels_are_held_to(case):
    assert faults(case) == []


@pytest.mark.parametrize("case", CARD.cases, ids=case_id)
def test_a_meaning_that_reads_any_operand_wrongly_is_found(case):
    names = ("x", "w", "scales", "sums", "bias", "gain", "residual", "table")
    for name in CARD.example(case, proof.generator(1, CPU), CPU).keys() & set(names):
        assert faults(case, lambda inputs, name=name: {**inputs, name: inputs[name].roll(1, 0)}), name


def by_kernel(case, inputs):
    """Outputs of the kernel, lane by lane."""
    return proof.run(CARD, "sm_90a", case, inputs, emulator.execute)


@pytest.mark.emulated
@pytest.mark.parametrize("run", [by_meaning, by_kernel])
@pytest.mark.parametrize("column", [0, 9, 37])
def test_a_logit_that_is_no_number_is_the_best_of_its_sixteen_and_counts_as_infinite(run, column):
    [case] = [case for case in CARD.cases if case["kind"] == "head" and not case.get("powers")]
    inputs = CARD.example(case, proof.generator(1, CPU), CPU)
    whole = run(case, inputs)
    inputs["bias"][column] = torch.nan
    outputs = run(case, inputs)
    group = column // 16
    others = torch.arange(whole["second"].shape[1]) != group
    assert (outputs["second"][:, group] == torch.inf).all()
    for name in ("second", "third"):
        assert torch.equal(outputs[name][:, others], whole[name][:, others])
