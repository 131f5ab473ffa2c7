"""What a card's kernels must prove, for any executor: the tests and the GPU benchmark both call these.

An executor runs launches and returns when their results can be read: `emulator.execute`, or `launch.execute`.
- Numbers: the 2x rule. Truth is the reference one precision up; our largest error may be twice that of plain torch at
  our dtype plus twice the rounding of (truth + 0.3) - 0.3. Outputs a card calls exact must equal the reference.
- Bits: a row's results do not depend on the other rows, nor on order-neutral settings.
Source: FlashAttention's test practice (Dao, github.com/Dao-AILab/flash-attention, tests); the bit rule is derived here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.card import Card, Case, Launch, Tensors

Executor = Callable[[Sequence[Launch]], None]
_UP = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Deviation:
    """The largest absolute error of one output against truth, and what the 2x rule allows."""

    output: str
    error: float
    allowed: float

    @property
    def passes(self) -> bool:
        return self.error <= self.allowed


def generator(seed: int, device: torch.device) -> torch.Generator:
    """A seeded source of random numbers on `device`."""
    return torch.Generator(device=device).manual_seed(seed)


def run(
    card: Card, arch: str, case: Case, inputs: Tensors, execute: Executor, setting: Mapping[str, Any] | None = None
) -> Tensors:
    """Outputs of the card's kernels, written over poison."""
    outputs = card.outputs(case, inputs)
    execute(card.launches(arch, case, inputs, outputs, **(setting or {})))
    return outputs


def deviations(card: Card, case: Case, inputs: Tensors, outputs: Tensors) -> list[Deviation]:
    """How far every output of the reference lies from truth, and how far it may."""
    plain = card.reference(case, inputs)
    truth = card.reference(case, {name: widened(tensor) for name, tensor in inputs.items()})
    found = []
    for name in plain:
        ours = outputs[name]
        if name in card.exact or not ours.is_floating_point():
            found.append(Deviation(name, float(differing(ours, plain[name])), 0.0))
        else:
            found.append(deviation(name, ours, plain[name], truth[name]))
    return found


def widened(tensor: Tensor) -> Tensor:
    """A floating tensor one precision up; anything else unchanged."""
    return tensor.to(_UP.get(tensor.dtype, tensor.dtype))


def deviation(output: str, ours: Tensor, plain: Tensor, truth: Tensor) -> Deviation:
    """How far `ours` lies from `truth`, one precision up, and how far it may: plain torch's error at our dtype counts.

    All three have one shape, of floating numbers.
    """
    # Where truth is NaN nothing may be written: ours must still be the poison.
    kept = truth.isnan()
    if not ours[kept].isnan().all():
        return Deviation(output, float("inf"), 0.0)
    ours, plain, truth = ours[~kept], plain[~kept], truth[~kept]
    if not len(ours):  # nothing was to be written, and nothing was
        return Deviation(output, 0.0, 0.0)
    rounded = truth.to(ours.dtype)
    rounding = ((rounded + 0.3) - 0.3).to(truth.dtype) - rounded.to(truth.dtype)
    error = (ours.to(truth.dtype) - truth).abs().nan_to_num(float("inf"), float("inf"), float("inf"))
    allowed = 2 * (plain.to(truth.dtype) - truth).abs().max() + 2 * rounding.abs().max()
    return Deviation(output, float(error.max()), float(allowed))


def differing(ours: Tensor, theirs: Tensor) -> int:
    """How many elements differ in their bits; NaN equals NaN of the same bits."""
    return int((_bits(ours) != _bits(theirs)).sum())


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def batch_dependence(
    card: Card, arch: str, case: Case, inputs: Tensors, execute: Executor, rows: Sequence[int] | None = None
) -> list[str]:
    """Where bits depend on other rows or on an order-neutral setting, in words; empty when they do not.

    The whole case is run under every setting of the card, then each of `rows` (all by default) by itself.
    """
    found = []
    whole = run(card, arch, case, inputs, execute, card.settings[0])
    for setting in card.settings[1:]:
        again = run(card, arch, case, inputs, execute, setting)
        found += [
            f"{name}: {n} elements change with {dict(setting)}"
            for name in whole
            if (n := differing(whole[name], again[name]))
        ]
    if card.alone is None or card.row_of is None:
        return found
    for row in rows if rows is not None else range(card.n_rows(case)):
        single_case, single_inputs = card.alone(case, inputs, row)
        single = card.row_of(single_case, single_inputs, run(card, arch, single_case, single_inputs, execute), 0)
        ours = card.row_of(case, inputs, whole, row)
        found += [f"{name}: row {row} alone differs" for name in ours if differing(ours[name], single[name])]
    return found
