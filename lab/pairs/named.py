"""Pairs that the lab knows by name: the shipped one, and the random one, which is made when it is first asked for."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import tempfile
from pathlib import Path

from lab.errors import ExperimentError
from lab.pairs import layout, random_pair
from lab.pairs.on_disk import Pair, pair_on_disk, shipped_pair

NAMES = ("shipped", "random")
CACHE_VARIABLE = "EAGLE3LAB_PAIRS"  # folder for pairs that are made on demand


def named_pair(name: str) -> Pair:
    """The pair of that name.

    Raises:
        ExperimentError: no pair is called so, or the shipped one is not whole.
    """
    if name == "shipped":
        return shipped_pair()
    if name == "random":
        return _random_pair()
    raise ExperimentError(f"no pair is called {name!r}", ", ".join(NAMES), "name one of them, or give target and draft")


def _random_pair() -> Pair:
    """`random_pair.make_random_pair` of its defaults, from the cache where this very code has made it before."""
    sources = "".join(inspect.getsource(module) for module in (random_pair, layout))
    folder = _cache_folder() / f"random-{hashlib.sha256(sources.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            random_pair.make_random_pair(unfinished)
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same pair
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return pair_on_disk(folder / "target", folder / "draft")


def _cache_folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base, "eagle3lab", "pairs")
