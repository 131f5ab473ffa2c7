"""The small product that tests of the GEMM's order, waits and limits start from."""

from typing import Any

import torch

from eagle3core.kernels import proof
from eagle3core.kernels.card import Case, Tensors
from eagle3core.kernels.gemm.card import CARD

CPU = torch.device("cpu")
STORE: dict[str, Any] = {"kind": "store", "m": 3, "n": 48, "k": 272, "dtype": "bf16", "packed": True}
FP8_STORE: dict[str, Any] = {**STORE, "k": 256, "fp8": True}  # W in e4m3, a scale a row


def example(case: Case, seed: int = 5) -> Tensors:
    """Operands of a case on the CPU."""
    return CARD.example(case, proof.generator(seed, CPU), CPU)
