"""Kernels that only read, whose best rate is the memory ceiling of a run.

Source: docs/requirements.md R-129.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels import Variant, parameters


def make_read(isa: Any, *, loads: int) -> Any:
    """Reads every byte once, `loads` 16-byte loads a lane under way, and writes nothing that could be left out."""

    def read(x: Any, y: Any, n_bytes: Any) -> None:
        cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
        step = i64(cuda.gridDim.x) * cuda.blockDim.x * 16
        at = x + (i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) * 16
        end = x + n_bytes
        mixed = i32(0)
        while at < end:
            for i in range(loads):
                if at + i * step < end:
                    v = isa.load_u32x4_stream(at + i * step)
                    mixed = i32(mixed ^ v[0] ^ v[1] ^ v[2] ^ v[3])
            at += loads * step
        if mixed == 0x12345678:
            isa.store_u32(y, mixed)

    return read


def read_variants() -> list[Variant]:
    """Read-only kernels whose best rate is the memory ceiling of a run."""
    text = "x:in y:out n_bytes:i64"
    return [Variant(f"read_{n}", make_read, {"loads": n}, parameters(text), 512) for n in (4, 8)]
