"""What is said against a checkpoint: raised at once by whoever loads, collected by whoever looks first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from eagle3core.errors import CheckpointError

if TYPE_CHECKING:
    from eagle3core.checkpoint.tensors import NamedTensors

T = TypeVar("T")


class Objections:
    """Errors of a checkpoint: raised as they are met, or kept so that one look finds them all."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps, self.found = keeps, list[CheckpointError]()

    def add(self, error: CheckpointError) -> None:
        """One more.

        Raises:
            CheckpointError: the error itself, where none are kept.
        """
        if not self.keeps:
            raise error
        self.found.append(error)

    def of(self, ask: Callable[..., T], *args: Any, instead: T, **named: Any) -> T:
        """What `ask` gives, and `instead` of it where it objects."""
        try:
            return ask(*args, **named)
        except CheckpointError as error:
            self.add(error)
            return instead


def require_names(
    files: NamedTensors, wanted: Iterable[str], given: Mapping[str, str], ignorable: Iterable[str]
) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of its config.

    Args as `name_objections`.

    Raises:
        CheckpointError: names what is missing, or what is there and has no place.
    """
    for objection in name_objections(files, wanted, given, ignorable):
        raise objection


def name_objections(
    files: NamedTensors, wanted: Iterable[str], given: Mapping[str, str], ignorable: Iterable[str]
) -> Iterator[CheckpointError]:
    """What is said against the tensors of a checkpoint: those that are missing, and those that have no place.

    Args:
        files: the directory.
        wanted: canonical names that must exist.
        given: canonical name of every stored tensor, by stored name.
        ignorable: canonical names that may exist beside them.
    """
    wanted, stored_names = list(wanted), set(given.values())
    missing = [name for name in wanted if name not in stored_names]
    if missing:
        yield CheckpointError(
            f"{files.directory} lacks {len(missing)} tensors: {_some(missing)}",
            f"the {len(wanted)} tensors that its {files.described_in} describes",
            f"download the checkpoint again, or correct {files.described_in}",
        )
    extra = sorted(stored_names - set(wanted) - set(ignorable))
    if extra:
        stored = {canonical: name for name, canonical in given.items()}
        yield CheckpointError(
            f"{files.directory} holds {len(extra)} tensors with no place in this model: "
            f"{_some([stored[name] for name in extra])}",
            "only tensors that the forward pass uses: leaving one out would silently change the result",
            f"use a checkpoint without them, or set the key of {files.described_in} that they belong to",
        )


def _some(names: list[str], most: int = 6) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
