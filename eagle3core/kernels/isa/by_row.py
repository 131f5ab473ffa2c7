"""Rows of a card's tensors by themselves, and the kernel pieces every row kernel needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import PLAIN_TORCH, Case, Tensors

VECTOR = 8  # sixteen-bit elements of one 16-byte access


def one_up(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a reference whose results are fp32 computes: fp32 from 16 bits, fp64 from fp32.

    So truth, which is the reference with its inputs one precision up, is more exact than what it judges.
    """
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def alone(axis: str, *sliced: str) -> Callable[[Case, Tensors, int], tuple[Case, Tensors]]:
    """`Card.alone` for a card whose case counts rows under `axis` and whose `sliced` inputs have them first."""

    def take(case: Case, inputs: Tensors, row: int) -> tuple[Case, Tensors]:
        kept = {name: t[row : row + 1].clone() if name in sliced else t for name, t in inputs.items()}
        return {**case, axis: 1}, kept

    return take


def row_of(case: Case, inputs: Tensors, outputs: Tensors, row: int) -> Tensors:
    """`Card.row_of` where every output has the rows first."""
    return {name: output[row] for name, output in outputs.items()}


def count(axis: str) -> Callable[[Case], int]:
    """`Card.n_rows`: what the case holds under `axis`."""
    return lambda case: int(case[axis])


def row_threads(width: int, most: int = 512) -> tuple[int, int]:
    """Threads of a block that owns a row of `width` sixteen-bit elements, and 16-byte pieces of each thread.

    Raises:
        KernelLimit: `width` is not a positive multiple of 8, or needs more than 4 pieces a thread.
    """
    vectors = width // VECTOR
    pieces = -(-vectors // most)
    if width <= 0 or width % VECTOR or pieces > 4:
        raise KernelLimit(
            f"a row of {width} elements", f"a multiple of {VECTOR} up to {4 * most * VECTOR}",
            PLAIN_TORCH,
        )  # fmt: skip
    threads = -(-vectors // pieces)
    return -(-threads // 32) * 32, pieces


def make_unpack(isa: Any, dtype: str) -> Any:
    """`unpack(words, values, at)`: four int32 of sixteen-bit pairs into `values[at..at+7]` as f32."""
    low, high = isa.LOW[dtype], isa.HIGH[dtype]

    def unpack(words: Any, values: Any, at: Any) -> None:
        for i in range(4):
            values[at + 2 * i] = low(words[i])
            values[at + 2 * i + 1] = high(words[i])

    return isa.inlined(unpack)


def make_store(isa: Any, dtype: str) -> Any:
    """`store(address, values, at)`: eight f32 rounded to sixteen bits, 16 bytes at `address`."""
    pack = isa.PACK[dtype]

    def store(address: Any, values: Any, at: Any) -> None:
        isa.store_u32x4(
            address,
            pack(values[at + 1], values[at]),
            pack(values[at + 3], values[at + 2]),
            pack(values[at + 5], values[at + 4]),
            pack(values[at + 7], values[at + 6]),
        )

    return isa.inlined(store)
