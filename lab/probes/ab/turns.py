"""Two sides as processes, one after the other, A B A B: a commit in a worktree of its own, or this tree with settings.

Each round starts both sides afresh, so that neither inherits the other's caches, and a ratio never leaves its round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.errors import ExperimentError, RunFailed
from lab.probes.ab.judging import SIDES, tagged
from lab.rows.store import Row, read_rows

HERE = "."


@dataclass(frozen=True)
class Side:
    """What one side runs.

    Attributes:
        commit: anything git names, or "." for the working tree.
        environment: variables that are set for it.
        options: added to the command.
    """

    commit: str
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


def read_side(commit: str, settings: Sequence[str]) -> Side:
    """A side from `KEY=VALUE` texts: a name in capitals is a variable of the environment, another one an option.

    Raises:
        ExperimentError: a setting of another form.
    """
    variables, options = [], []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ExperimentError(
                f"setting {setting!r}", "EAGLE3_NAME=VALUE for a variable, name=value for an option", "correct it"
            )
        if key.isupper():
            variables.append((key, value))
        else:
            options += [f"--{key}", value]
    return Side(commit, tuple(variables), tuple(options))


def take_turns(
    root: Path, sides: tuple[Side, Side], command: Sequence[str], rounds: int, tell: Callable[[str], None]
) -> Iterator[Row]:
    """Rows of both sides, round by round, as they are made.

    Args:
        root: the checkout.
        command: of `eagle3lab`, one that takes --out and --rounds.

    Raises:
        ExperimentError: git does not know a commit.
        RunFailed: a side ended with an error and no row.
    """
    with ExitStack() as stack:
        folders = [stack.enter_context(worktree(root, side.commit)) for side in sides]
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ab-")))
        for number in range(1, rounds + 1):
            for name, side, folder in zip(SIDES, sides, folders, strict=True):
                tell(f"round {number} of {rounds}: {name} ({side.commit})")
                out = scratch / f"{name}{number}.jsonl"
                _run(folder, side, [*command, *side.options, "--rounds", "1", "--out", str(out)], out)
                yield from tagged(read_rows(out), name, number)


def _run(folder: Path, side: Side, command: Sequence[str], out: Path) -> None:
    environ = {**os.environ, **dict(side.environment), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "lab", *command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    if not out.exists():
        words = (done.stderr or done.stdout).strip().splitlines()
        raise RunFailed(
            f"{side.commit}: {command[0]} ended with {done.returncode}: {words[-1] if words else 'no message'}",
            "a command of both sides that takes --out and --rounds, such as bench",
            "run it by hand in that commit",
        )


@contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """The folder of a commit, checked out beside the tree and removed afterwards; the working tree as it is for ".".

    Raises:
        ExperimentError: git does not know it.
    """
    if commit == HERE:
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="ab-tree-") as parent:
        folder = Path(parent) / "tree"
        added = _git(root, "worktree", "add", "--detach", str(folder), commit)
        if added.returncode:
            raise ExperimentError(
                f"{commit!r}: {added.stderr.strip().splitlines()[-1]}", "a commit, tag or branch, or . for this tree",
                "see `git log --oneline`",
            )  # fmt: skip
        try:
            yield folder
        finally:
            _git(root, "worktree", "remove", "--force", str(folder))


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)


def shown(sides: tuple[Side, Side]) -> str:
    """Both sides for people, as JSON."""
    return json.dumps({name: vars(side) for name, side in zip(SIDES, sides, strict=True)})
