"""Small products by the GEMM of warpgroups on an emulator that may be faulty, and the classical bugs of its ring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from faulty_emulator import faulty
from gemm_examples import example

from eagle3core.kernels.card import Case, Tensors
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.card import CARD, gemm_launches

STORE: Case = {"kind": "store", "m": 11, "n": 48, "k": 528, "dtype": "bf16", "packed": True}
GROUP: dict[str, Any] = {"kernel": "group", "x_tiles": 2, "w_tiles": 4, "units": 1, "stages": 3, "split": 1}
RING: dict[str, Any] = {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3, "split": 1}


def run(isa: SimpleNamespace | None, case: Case = STORE, **setting: Any) -> tuple[Tensors, Tensors]:
    """Operands of a case and what `GROUP`, changed by `setting`, makes of them; None: the emulator as it is."""
    inputs = example(case, 6)
    outputs = CARD.outputs(case, inputs)
    emulator.execute(gemm_launches("sm_90a", case, inputs, outputs, **{**GROUP, **setting}), isa=isa)
    return inputs, outputs


def waits_that_pass(which: bool) -> SimpleNamespace:
    """`mbarrier_wait` that returns at once for warps that fetch (False) or that multiply (True)."""

    def mbarrier_wait(address: Any, parity: Any) -> None:
        if (emulator.cuda.threadIdx.x < 32 * GROUP["w_tiles"]) != which:
            emulator.mbarrier_wait(address, parity)

    return faulty(mbarrier_wait=mbarrier_wait)


def no_empty_wait() -> SimpleNamespace:
    return waits_that_pass(False)


def no_full_wait() -> SimpleNamespace:
    return waits_that_pass(True)


def wrong_parity() -> SimpleNamespace:
    return faulty(mbarrier_wait=lambda address, parity: emulator.mbarrier_wait(address, parity ^ 1))


def too_few_bytes() -> SimpleNamespace:
    return faulty(mbarrier_expect=lambda address, n_bytes: emulator.mbarrier_expect(address, n_bytes - 1024))


def too_many_bytes() -> SimpleNamespace:
    return faulty(mbarrier_expect=lambda address, n_bytes: emulator.mbarrier_expect(address, n_bytes + 1024))


# What plants a bug, and words of the error that finds it.
RING_BUGS = [
    (no_empty_wait, "race: lanes"),
    (no_full_wait, "race|nobody has written"),
    (wrong_parity, "deadlock|race|nobody has written"),
    (too_few_bytes, "deadlock|race|nobody has written"),
    (too_many_bytes, "deadlock"),
]
