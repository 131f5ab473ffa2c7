"""Nothing is read before the kernel that writes it has ended, unless it was there before."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from device_engines import BY_MEANING, ORDER, device_runner, packed_pair
from tiny_engines import Pair

from eagle3core.step.program import Program, launches_of
from eagle3core.step.run import DeviceRunner
from eagle3core.step.sizes import DeviceSizes
from eagle3core.step.tree import chain_tree

pytestmark = pytest.mark.reference


def drafting_for_itself(pair: Pair) -> DeviceRunner:
    """A runner whose target drafts three tokens for itself, as a small model would."""
    target, _ = packed_pair(pair, drafts=False)
    sizes = DeviceSizes(2, 128, 134, chain_tree(3), chunk=64, span=8)
    return DeviceRunner(target, target, sizes, arch="sm_90a", replayer=BY_MEANING, order=ORDER)


@pytest.mark.parametrize("k", [None, 1, 3, "small model", "given", "any depth"])
def test_nothing_is_read_early_that_a_kernel_of_the_same_program_may_still_be_writing(
    nano_pair: Pair, k: int | str | None
) -> None:
    if k == "small model":
        runner = drafting_for_itself(nano_pair)
    elif k == "any depth":
        runner = device_runner(nano_pair, 3, BY_MEANING, n_kept=4)
        assert sorted(runner.kinds) == [-1, 0, 1, 2, 3]
    elif k == "given":
        runner = device_runner(nano_pair, None, BY_MEANING, tree=chain_tree(3), drafts=False)
    else:
        runner = device_runner(nano_pair, k if isinstance(k, int) else None, BY_MEANING)
    for program in runner.reading:
        assert hazards(program, own_keys_are_early=False) == []
    for program in runner.steps.all:
        assert hazards(program, own_keys_are_early=True) == []


def test_a_missing_wait_is_found(nano_pair: Pair) -> None:
    program = device_runner(nano_pair, 3, BY_MEANING).programs[2]
    found = []
    for s, stage in enumerate(program):
        for at, call in enumerate(stage.calls):
            if s > 0 and call.launches and not call.launches[0].overlap:
                first = dataclasses.replace(call.launches[0], overlap=True)
                early = dataclasses.replace(call, launches=(first, *call.launches[1:]))
                calls = (*stage.calls[:at], early, *stage.calls[at + 1 :])
                planted = (*program[:s], dataclasses.replace(stage, calls=calls), *program[s + 1 :])
                found.append(hazards(planted, own_keys_are_early=True) != [])
    assert found == [True] * 3, "after the rows are opened, and before each chained pass"


def hazards(program: Program, *, own_keys_are_early: bool) -> list[str]:
    """Operands that are `const` to a kernel though one before it writes them and nothing waited in between."""
    found, written, wait = [], [], -1
    launches = launches_of(program)
    for i, launch in enumerate(launches):
        wait = wait if launch.overlap and launch.variant.dependent else i
        operands = [
            (p, v.data_ptr(), v.data_ptr() + v.nbytes)
            for p, v in zip(launch.variant.parameters, launch.values, strict=True)
            if isinstance(v, torch.Tensor) and v.nbytes
        ]
        for parameter, start, end in operands:
            for writer, name, first, last in written:
                is_own_key = own_keys_are_early and parameter.name in "kv" and writer == i - 1
                if parameter.role == "const" and first < end and start < last and writer >= wait and not is_own_key:
                    found.append(f"{launch.variant.name}.{parameter.name} after {launches[writer].variant.name}.{name}")
        written += [(i, p.name, start, end) for p, start, end in operands if p.role in ("out", "inout")]
    return found
