"""What attention reads before the kernel before it has finished, as the emulator sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from eagle3core.kernels import proof
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.card import Case
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError, Machine, Region

PREFIX = 61  # keys, of one block


def early_reads_of_new_keys(case: Case, settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Runs a case of one sequence of 61 keys, head size 64, with cache rows below the prefix as constants and the new
    ones as the kernel before's output; what the emulator refuses under each setting."""
    inputs = CARD.example({**case, "prefix": (PREFIX,)}, proof.generator(5, torch.device("cpu")), torch.device("cpu"))
    outputs = CARD.outputs(case, inputs)
    found = []
    for setting in settings:
        launch = CARD.launches("sm_90a", {**case, "prefix": (PREFIX,)}, inputs, outputs, **setting)[0]
        arguments, regions = emulator._operands(launch)
        regions = [region for region in regions if region.name not in ("k", "v")]
        for name in ("k", "v"):
            for block in range(len(inputs[name])):
                for token in range(64):
                    is_old = block == int(inputs["tables"][0, 0]) and token < PREFIX
                    start = inputs[name][block, 0, token].data_ptr()
                    regions.append(Region(name, start, start + 128, is_old, False))
        variant = launch.variant
        kernel = variant.make(emulator, **variant.constants)
        machine = Machine(kernel, arguments, regions, variant.threads, variant.shared_bytes, variant.dependent)
        try:
            emulator.run(machine, launch.grid)
        except EmulationError as error:
            found.append(str(error))
    return found
