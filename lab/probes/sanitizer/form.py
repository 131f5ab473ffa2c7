"""Kernels in a form whose synchronisation racecheck can follow.

Two kinds of arrival, right as they are, make it report hazards (the plants of `handover` show both):
- a warp that has waited at a named barrier arrives at another without waiting there;
- the lanes of a warp meet, and one of them arrives at an mbarrier for all.
In the other form of a kernel, arrivals at named barriers wait too, and every lane arrives at mbarriers for itself. All
else, what is written and read and in which turn, is the same source. Who waits longer hides what it does after its
arrival: that remains the emulator's to judge, which follows both forms.

Source: seen with compute-sanitizer 2025.3; docs/log.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from eagle3core.kernels import Card, Case, Launch, Tensors, Variant

MISJUDGED = frozenset({"named_arrive", "ARRIVING_LANES"})  # names of an instruction set
# In the constants of a variant: its cubin has another digest than the engine's, and one that follows this file.
_FORM = "arrivals wait, every lane arrives: " + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


@cache
def waiting_arrivals(isa: Any) -> Any:
    """An instruction set like `isa` without what racecheck cannot follow."""
    plain = ModuleType(f"{isa.__name__}_waiting")
    vars(plain).update({name: value for name, value in vars(isa).items() if not name.startswith("__")})
    vars(plain).update(named_arrive=isa.named_barrier, ARRIVING_LANES=32)
    return plain


def in_form(card: Card) -> Card:
    """`card` with the kernels that need it in the form that racecheck can follow."""

    def launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors, **setting: Any) -> list[Launch]:
        made = card.launches(arch, case, inputs, outputs, **setting)
        return [replace(item, variant=variant_in_form(item.variant)) for item in made]

    return replace(card, launches=launches)


def variant_in_form(variant: Variant) -> Variant:
    """`variant`, with another factory if its kernel needs one."""
    if not MISJUDGED & names_in(variant.make(_AnySet(), **variant.constants)):
        return variant
    constants = {**variant.constants, "form": _FORM}
    return replace(variant, name=f"{variant.name}_in_form", make=_OtherForm(variant.make), constants=constants)


def is_in_form(variant: Variant) -> bool:
    """Whether `variant` is not the kernel as the engine runs it."""
    return isinstance(variant.make, _OtherForm)


class _OtherForm:
    """A kernel factory that hands its instruction set on without what racecheck cannot follow."""

    def __init__(self, make: Callable[..., Callable[..., None]]) -> None:
        self.make = make
        self.__module__, self.__qualname__ = make.__module__, make.__qualname__  # what digests go by

    def __call__(self, isa: Any, *, form: str, **constants: Any) -> Callable[..., None]:
        return self.make(waiting_arrivals(isa), **constants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OtherForm) and self.make is other.make

    def __hash__(self) -> int:
        return hash((_OtherForm, self.make))


class _AnySet:
    """An instruction set of every name, for factories whose kernels nobody runs."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __call__(self, *operands: Any, **options: Any) -> Any:
        return operands[0] if operands and isinstance(operands[0], FunctionType) else self


def names_in(kernel: Any) -> set[str]:
    """Every attribute that a kernel and the functions inlined in it name."""
    found = set(kernel.__code__.co_names)
    for cell in kernel.__closure__ or ():
        if isinstance(cell.cell_contents, FunctionType):
            found |= names_in(cell.cell_contents)
    return found
