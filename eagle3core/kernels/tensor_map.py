"""Maps of matrices for the copies that take boxes of rows (`tensor_copy` of the instruction sets).

A map is 128 bytes in the memory of the device: where the matrix lies, how long its rows are, and what one copy brings,
which is `box_rows` rows of 128 bytes, 16-byte column c of row r at column c ^ (r mod 8) of a place of 128 bytes a row.
On a GPU the driver makes it and the copy engine alone knows its fields. Elsewhere its first words are those of
`STANDIN` and the emulator reads them.

Source: CUDA driver API, cuTensorMapEncodeTiled; PTX ISA 9.0, tensors and swizzling modes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit

MAP_WORDS = 16  # of 8 bytes
BOX_BYTES = 128  # of a row
STANDIN = ("address", "rows", "row_bytes", "box_rows")
_TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_MOST_MAPS = 1024  # that are kept here; launches hold their own


def tensor_map(matrix: Tensor, box_rows: int) -> Tensor:
    """`[16]` int64, on the device of a contiguous `matrix`, whose last dimension is a row and all others count rows.

    It is made once for an address and shape. It holds the address alone: whoever copies by it keeps the matrix alive.

    Raises:
        KernelLimit: the driver refuses it.
    """
    assert matrix.is_contiguous(), "a map is of rows that follow each other"
    row = matrix.shape[-1]
    return _map_of(matrix.device, matrix.dtype, matrix.data_ptr(), matrix.numel() // row, row, box_rows)


@lru_cache(_MOST_MAPS)
def _map_of(device: torch.device, dtype: torch.dtype, address: int, rows: int, row: int, box_rows: int) -> Tensor:
    if device.type != "cuda":
        words = [address, rows, row * dtype.itemsize, box_rows]
        return torch.tensor(words + [0] * (MAP_WORDS - len(words)), dtype=torch.int64, device=device)
    words = [word - (1 << 64) if word >> 63 else word for word in _encoded(dtype, address, rows, row, box_rows)]
    return torch.tensor(words, dtype=torch.int64, device=device)


def _encoded(dtype: torch.dtype, address: int, rows: int, row: int, box_rows: int) -> list[int]:
    """The driver's 16 words."""
    from cuda.bindings import driver  # type: ignore[import-untyped]

    kind: Any = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[dtype]}")
    status, made = driver.cuTensorMapEncodeTiled(
        kind, 2, address, [driver.cuuint64_t(row), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(row * dtype.itemsize)],
        [driver.cuuint32_t(BOX_BYTES // dtype.itemsize), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelLimit(
            f"a map of {rows} rows of {row} {dtype} at {address:#x}: {status}",
            "rows of whole 16 bytes at an address that is a multiple of 16",
            "EAGLE3_FMHA_WARPGROUPS=0 does without the kernels that take maps",
        )
    return [int(word) for word in made.opaque]
