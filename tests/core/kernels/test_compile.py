"""Compiling without a GPU tells registers, spills and machine instructions, and finds broken promises."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eagle3core.errors import BackendUnavailable, KernelLimit
from eagle3core.kernels import compile as compile_module
from eagle3core.kernels.card import ARCHES, Variant, arch_of, parameters
from eagle3core.kernels.compile import compile_variant, compute_capability, merged_products, opcodes

pytestmark = pytest.mark.compiled


def make_product(isa: Any, *, n: int, careless: bool) -> Any:
    """n dependent tensor-core products; `careless` multiplies by a Python float, which promotes to f64."""
    factor = 0.3 if careless else np.float32(0.3)

    def kernel(x, y):
        lane = isa.cuda.threadIdx.x
        a = isa.load_u32x4(x + lane * 16)
        d = (isa.f32(0), isa.f32(0), isa.f32(0), isa.f32(0))
        for _ in range(n):
            d = isa.mma_bf16(a[0], a[1], a[2], a[3], a[0], a[1], d[0], d[1], d[2], d[3])
        isa.store_f32(y + lane * 4, d[0] * factor)

    return kernel


def make_register_hoard(isa: Any, *, n: int) -> Any:
    """Keeps n values alive at once and indexes them at run time, which needs local memory."""

    def kernel(x, y, at):
        values = isa.cuda.local.array(n, isa.f32)
        for i in range(n):
            values[i] = isa.load_f32(x + i * 4)
        isa.store_f32(y, values[at])

    return kernel


def make_sum_of_squares(isa: Any, *, careful: bool) -> Any:
    """a a + b b, rounded where the source says, or where the compiler likes."""

    def kernel(x, y):
        a, b = isa.load_f32(x), isa.load_f32(x + 4)
        if careful:
            isa.store_f32(y, isa.fused(a, a, isa.product(b, b)))
        else:
            isa.store_f32(y, a * a + b * b)

    return kernel


PRODUCT = Variant(
    "product", make_product, {"n": 2, "careless": False}, parameters("x:in y:out"), 32, instructions={"HMMA": 2}
)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_clean_kernel_has_no_faults_on_any_architecture(arch: str):
    made = compile_variant(PRODUCT, arch, disassemble=True)
    assert made.faults(PRODUCT) == []
    assert made.sass["HMMA"] == 2
    assert made.cubin[:4] == b"\x7fELF"
    assert 0 < made.registers < 64


def test_each_broken_promise_is_named():
    made = compile_variant(PRODUCT, "sm_90a", disassemble=True)
    wants = replace(PRODUCT, max_registers=3, instructions={"HMMA": 9}, shared_bytes=300_000, threads=1024,
                    blocks_per_sm=64)  # fmt: skip
    text = "; ".join(made.faults(wants))
    for words in ("bound 3", "room for 64 blocks", "shared memory", "at least 9 expected"):
        assert words in text


def test_an_unintended_double_is_found():
    careless = replace(PRODUCT, constants={"n": 2, "careless": True})
    assert any("f64" in fault for fault in compile_variant(careless, "sm_90a").faults(careless))


def test_local_memory_is_found():
    hoard = Variant("hoard", make_register_hoard, {"n": 9}, parameters("x:in y:out at:i32"), 32)
    assert any("local" in fault for fault in compile_variant(hoard, "sm_90a").faults(hoard))


def test_opcodes_are_counted_without_predicates_and_suffixes():
    text = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/              @UP1 UMOV UR4, 0x400 ;
    """
    assert opcodes(text) == {"LDC": 1, "LDG": 1, "HMMA": 1, "UMOV": 1}


def test_compute_capabilities_map_to_targets():
    assert [arch_of(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        "sm_80", "sm_80", "sm_90a", "sm_100", "sm_120"]  # fmt: skip
    assert compute_capability("sm_90a") == (9, 0, "a")
    assert compute_capability("sm_120") == (12, 0)
    with pytest.raises(KernelLimit, match=r"compute capability is 7\.5"):
        arch_of((7, 5))
    with pytest.raises(KernelLimit, match=r"compute capability is 11\.0") as refused:
        arch_of((11, 0))
    assert refused.value.allowed == "one of 8.x, 9.x, 10.x, 12.x"


def test_what_the_assembler_refuses_comes_with_its_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_module, "_ptx", lambda variant, arch: ".visible .entry wrong() { nonsense; }")
    variant = Variant("wrong", make_product, {"n": 1, "careless": False}, parameters("x:in y:out"), 32)
    with pytest.raises(BackendUnavailable, match="ptxas failed: ") as refused:
        compile_variant(variant, "sm_90a")
    assert refused.value.allowed
    assert refused.value.remedy


def test_products_that_the_compiler_merged_with_additions_are_counted_but_not_those_the_source_asks_for():
    written = "// begin inline asm\nfma.rn.f32 %f1, %f2, %f3, %f4;\n// end inline asm\n"
    assert merged_products(written) == 0
    assert merged_products(written + "fma.rn.f32 %f5, %f6, %f7, %f1;\nfma.rn.ftz.f32 %f8, %f6, %f7, %f1;\n") == 2


@pytest.mark.parametrize("careful", [True, False])
def test_a_kernel_that_promises_its_rounding_is_at_fault_where_the_compiler_chose(careful: bool):
    variant = Variant(
        "sum_of_squares", make_sum_of_squares, {"careful": careful}, parameters("x:in y:out"), 32, rounds_itself=True
    )
    faults = compile_variant(variant, "sm_90a").faults(variant)
    assert bool(faults) != careful
    assert careful or "merged" in faults[0]
