"""What is said against a checkpoint: raised at once by whoever loads, collected by whoever looks first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from eagle3core.errors import CheckpointError

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
