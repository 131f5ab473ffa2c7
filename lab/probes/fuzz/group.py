"""A group of cases: one kind of input, how it is damaged, and the door that it is handed to."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lab.errors import ExperimentError


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it told on stderr."""

    code: int
    told: str


@dataclass(frozen=True)
class Group:
    """One kind of input.

    Attributes:
        name: as `--groups` takes it. about: what is damaged and which door it is handed to, in a line.
        prepare: (folder of the whole run) -> valid inputs, in memory or in that folder; also imports whatever is slow.
        make: (what `prepare` gave, the case's random numbers, folder) -> None; writes one damaged input there.
        open: (what `prepare` gave, folder) -> None or `Ended`; the folder is the one `make` wrote to, which is to be
            left as it is. What the door is meant to write goes to `folder.parent / "out"`, which is there and empty.
        refusals: class names of refusals that `open` may raise.
        exit_codes: with which a command may end beside 0, its refusal told in three parts.
        more_mib: memory allowed beyond the limit of every case, for a door that is meant to hold more; 0 for most.
        most_cpu_s: of a processor, its processes included.
    """

    name: str
    about: str
    prepare: Callable[[Path], Any]
    make: Callable[[Any, Random, Path], None]
    open: Callable[[Any, Path], Ended | None]
    refusals: tuple[str, ...] = ("CheckpointError", "ConfigError")
    exit_codes: tuple[int, ...] = (2, 3)
    more_mib: int = 0
    most_cpu_s: float = 2.0


def all_groups() -> dict[str, Group]:
    """Every group of the files in `groups/`, by name, in order of file."""
    folder = importlib.import_module("lab.probes.fuzz.groups")
    names = sorted(found.name for found in pkgutil.iter_modules(folder.__path__))
    modules = [importlib.import_module(f"{folder.__name__}.{name}") for name in names]
    groups = [group for module in modules for group in module.GROUPS]
    return {group.name: group for group in groups}


def chosen_groups(names: Sequence[str]) -> list[Group]:
    """The groups of these names; all for none.

    Raises:
        ExperimentError: a name that is no group's.
    """
    known = all_groups()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ExperimentError(f"no group is called {unknown[0]!r}", ", ".join(known), "name one of them")
    return [known[name] for name in names or known]
