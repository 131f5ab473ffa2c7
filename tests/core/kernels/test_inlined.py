"""Device functions of equal code and constants are compiled once a process; whatever differs is compiled for itself."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest

from eagle3core.kernels import compile as compile_module
from eagle3core.kernels import registry
from eagle3core.kernels.card import Variant, parameters
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.isa import inlined as inlined_module

pytestmark = pytest.mark.compiled

SCALE: Any = 3


def make_scaled(isa: Any, *, factor: Any, n: int) -> Any:
    """y[i] = 7 (factor x[i] + 1) for n values, by a function that calls another."""

    def grown(value):
        return value * factor + isa.i32(1)

    # The name holds the plain function when `seven_times` is made, and the inlined one when that is compiled.
    def seven_times(value):
        return grown(value) * isa.i32(7)

    grown, seven_times = isa.inlined(grown), isa.inlined(seven_times)

    def kernel(x, y):
        for i in range(n):
            isa.store_u32(y + 4 * i, seven_times(isa.load_u32(x + 4 * i)))

    return kernel


def make_by_name(isa: Any, *, n: int) -> Any:
    """y = SCALE x, whose factor is a name of this module."""

    def scaled(value):
        return value * isa.i32(SCALE)

    scaled = isa.inlined(scaled)

    def kernel(x, y):
        isa.store_u32(y, scaled(isa.load_u32(x)) + isa.i32(n))

    return kernel


def make_chosen(isa: Any, *, calls: tuple[int, ...]) -> Any:
    """y[i] = 2 x[i] for the odd numbers of `calls`, 3 x[i] for the others, by a function that is told the number."""

    def chosen(i, x, y):
        factor = i32(3)
        if i % 2 == 1:
            factor = i32(2)
        isa.store_u32(y + i * 4, isa.load_u32(x + i * 4) * factor)

    i32, chosen = isa.i32, isa.inlined(chosen)
    a, b, c = calls

    def kernel(x, y):
        chosen(a, x, y)
        chosen(b, x, y)
        chosen(c, x, y)

    return kernel


def compiled(make: Any, **constants: Any) -> tuple[str, int]:
    """The text of a kernel, without names that a process counts, and how many device functions were compiled for it.

    Kernels that were compiled before are gone by then.
    """
    compile_module._library.cache_clear()
    gc.collect()
    before = len(inlined_module._COMPILED)
    made = compile_variant(Variant("kernel", make, constants, parameters("x:in y:out"), 32), "sm_90a")
    lines = [line for line in made.ptx.splitlines() if "_ZN" not in line]
    return "\n".join(lines), len(inlined_module._COMPILED) - before


def factors(text: str) -> set[int]:
    """Constants that a text multiplies by."""
    return {int(n) for n in re.findall(r"(?:mul|mad)\.lo\.s(?:32|64)\s[^;]*?, (-?\d+)[,;]", text)}


def test_a_further_kernel_takes_what_was_compiled_and_has_the_same_instructions() -> None:
    first, n_first = compiled(make_scaled, factor=11, n=2)
    assert n_first == 2
    assert compiled(make_scaled, factor=11, n=3)[1] == 0
    assert compiled(make_scaled, factor=11, n=2) == (first, 0)
    inlined_module._COMPILED.clear()
    assert compiled(make_scaled, factor=11, n=2) == (first, 2), "as compiled anew"


def test_another_constant_is_compiled_for_itself_also_in_functions_that_only_call() -> None:
    eleven, _ = compiled(make_scaled, factor=11, n=2)
    thirteen, n_compiled = compiled(make_scaled, factor=13, n=2)
    assert n_compiled == 2, "the function that has it and the one that calls that"
    assert (77 in factors(eleven), 91 in factors(eleven)) == (True, False)
    assert (77 in factors(thirteen), 91 in factors(thirteen)) == (False, True)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (np.int32(1), np.int64(1)), (0.0, -0.0), (1, True)])
def test_constants_that_compare_equal_but_compile_otherwise_are_told_apart(one: Any, other: Any) -> None:
    assert one == other
    assert inlined_module._identity(one) != inlined_module._identity(other)
    assert inlined_module._identity((one,)) != inlined_module._identity((other,))


def test_a_name_of_a_module_that_holds_something_else_is_compiled_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 3 in factors(compiled(make_by_name, n=1)[0])
    monkeypatch.setattr("test_inlined.SCALE", 5, raising=True)
    text, n_compiled = compiled(make_by_name, n=1)
    assert n_compiled == 1
    assert 5 in factors(text)


def test_a_function_that_is_called_with_several_numbers_is_compiled_once_and_each_call_is_made_for_its_own() -> None:
    text, n_compiled = compiled(make_chosen, calls=(1, 6, 11))
    assert n_compiled == 1
    assert factors(text) - {4} <= {2, 3}
    places = {int(n) for n in re.findall(r"\[\$?\S*\+(\d+)\]|add\.s64\s[^;]*, (\d+);", text) for n in n if n}
    assert {4, 24, 44} <= places, "addresses are constants"
    assert "setp" not in text, "no number is looked at when the kernel runs"


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "most"), [(32768, 59), (1024, 61)], ids=["long sessions", "short ones, two walks"])
def test_the_kernel_that_takes_longest_compiles_each_function_once_for_its_types(keys: int, most: int) -> None:
    """A start with no kernels stored waits at least as long as its longest one takes."""
    prompts = {"dtype": "bf16", "dim": 128, "heads": 32, "kv_heads": 8, "batch": 4, "kv": keys, "tokens": 64}  # of 8B
    variant, _ = registry()["attention"].variants_of("sm_90a", prompts, run=4)
    assert variant.name == f"attention_group_bf16_128_4_16x4_s4{'_short' if keys < 8192 else ''}_8x1_u4_joined"
    compile_module._library.cache_clear()
    inlined_module._COMPILED.clear()
    compile_variant(variant, "sm_90a")
    functions = [function for function, _ in inlined_module._COMPILED]
    assert len(functions) == len(set(functions)) <= most, "whatever numbers they are called with"


def test_the_bytes_of_a_kernel_do_not_tell_what_was_compiled_before_it() -> None:
    variant = Variant("kernel", make_scaled, {"factor": 11, "n": 2}, parameters("x:in y:out"), 32)
    first = compile_variant(variant, "sm_90a")
    compiled(make_scaled, factor=17, n=2)
    compile_module._library.cache_clear()
    inlined_module._COMPILED.clear()
    again = compile_variant(variant, "sm_90a")
    assert again.ptx == first.ptx
    assert again.cubin == first.cubin
