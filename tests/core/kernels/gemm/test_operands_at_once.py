"""Operands of an epilogue are all asked for before any is used, in machine code: their waits run together."""

import re
import subprocess

import pytest

from eagle3core.kernels.compile import compile_variant, tool
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.tiling import as_fp8
from eagle3core.kernels.gemm.launcher import gemm_variant
from eagle3core.kernels.gemm.tiling import Tiling

LOAD = re.compile(r"LDG\.E\.U16(?:\.\w+)* (R\d+), ")  # 16 bits: of a residual, a gain, a bias


def used_before_the_last(lines):
    """16-bit loads of a disassembly whose register an instruction reads before the last of them is asked for."""
    loads = [(at, found[1]) for at, line in enumerate(lines) if (found := LOAD.search(line))]
    used = []
    for at, register in loads:
        for line in lines[at + 1 : loads[-1][0]]:
            operands = line.partition(",")[2]
            if re.search(rf"\b{register}\b", operands):
                used.append((register, line.strip()))
    return len(loads), used


def machine_code(variant, folder):
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_variant(variant, "sm_90a").cubin)
    text = subprocess.run([tool("nvdisasm"), "-c", "-ndf", str(cubin)], check=True, capture_output=True, text=True)
    return [line for line in text.stdout.splitlines() if re.match(r"\s+/\*[0-9a-f]+\*/", line)]


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("tiling", "loads"),
    [
        (as_fp8(Tiling("ring", 2, 2, 2, 8)), 2 * 6),  # two items a thread: two of a residual, gains and biases each
        (Tiling("bulk", 2, 2, 4, 3), 2 * 6),
        (as_fp8(Tiling("group", 2, 8, 4, 11, split=4, together=True)), 4 * 6),
    ],
    ids=["ring", "bulk", "group that meets"],
)
def test_no_operand_is_used_before_the_last_is_asked_for(tiling, loads, tmp_path):
    variant = gemm_variant("sm_90a", "bf16", Epilogue("residual", has_bias=True), tiling, True, False)
    found, used = used_before_the_last(machine_code(variant, tmp_path))
    assert found >= loads
    assert used == []


@pytest.mark.reference
def test_a_value_that_is_converted_as_it_comes_is_seen():
    line = "        /*0100*/                   "
    asked = [f"{line}LDG.E.U16 R{n}, desc[UR6][R8.64] ;" for n in (61, 63)]
    assert used_before_the_last(asked) == (2, [])
    early = [asked[0], f"{line}IMAD.U32 R61, R61, 0x10000, RZ ;", asked[1]]
    assert used_before_the_last(early) == (2, [("R61", early[1].strip())])
    assert used_before_the_last([*asked, early[1]]) == (2, [])
