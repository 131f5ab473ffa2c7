"""A factory made from its module's source with one place changed: a bug planted where the real code stands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from types import ModuleType

import pytest


def rebuilt(
    module: ModuleType,
    pattern: str,
    replacement: str,
    monkeypatch: pytest.MonkeyPatch,
    factory: str,
    users: Iterable[ModuleType],
) -> None:
    """Put `factory` of `module`, with what `pattern` finds replaced, where the module and its `users` find it.

    Raises:
        AssertionError: the pattern is not found exactly once.
    """
    changed, n = re.subn(pattern, replacement, inspect.getsource(module))
    assert n == 1, f"{pattern!r} occurs {n} times"
    scope = {"__name__": module.__name__}
    exec(compile(changed, str(module.__file__), "exec"), scope)
    for user in (module, *users):
        if hasattr(user, factory):
            monkeypatch.setattr(user, factory, scope[factory])
