"""What `early` is for: the first load's address is worked out before the wait for the kernel before."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eagle3core.kernels.card import Variant, parameters
from eagle3core.kernels.compile import compile_variant, tool
from eagle3core.kernels.isa.early import make_early

pytestmark = pytest.mark.compiled

THREADS = 64


def make_copy(isa: Any, *, is_early: bool) -> Any:
    """Four bytes a thread, from and to rows of a given width."""
    early = make_early(isa, THREADS)

    def kernel(x: Any, y: Any, width: Any) -> None:
        at = (isa.i64(isa.cuda.blockIdx.x) * width + isa.cuda.threadIdx.x) * 4
        if is_early:
            early(x + at)
        isa.wait_previous()
        isa.store_u32(y + at, isa.load_u32(x + at))

    return kernel


def instructions_before_the_wait(is_early: bool, folder: Path) -> list[str]:
    """Opcodes ahead of the wait in the machine code."""
    variant = Variant("copy", make_copy, {"is_early": is_early}, parameters("x:in y:out width:i32"), THREADS)
    path = folder / "copy.cubin"
    path.write_bytes(compile_variant(variant, "sm_90a").cubin)
    done = subprocess.run([tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True)
    opcodes = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9]+)", done.stdout)
    return opcodes[: opcodes.index("ACQBULK")]


def test_addresses_are_worked_out_before_the_wait_only_where_a_kernel_asks_for_it(tmp_path: Path) -> None:
    asked, left = (instructions_before_the_wait(is_early, tmp_path) for is_early in (True, False))
    assert "STS" in asked
    assert any(opcode.startswith("IMAD") for opcode in asked)
    assert "STS" not in left
    assert len(asked) >= len(left) + 5
