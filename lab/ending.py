"""How a command ends: whatever it raises becomes three lines on stderr and an exit code, in one place.

What it did is its last line on standard output: words on a terminal, one JSON object for whatever else reads.

Exit code 1 belongs to a gate that did not hold, so nothing unforeseen may end with it: a file system that refuses, no
memory left and an error of our own all end with 3, could not run. The traceback of the last is kept in a file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_USAGE, LabError, RunFailed

# Errors of the engine that are no wrong usage: found by name, since importing the engine would import torch.
_COULD_NOT_RUN = {"BackendUnavailable", "InvariantViolated"}


_MOST_NAMED = 3  # names or numbers of a list that stand in a line for people


def tell_summary(summary: Mapping[str, Any]) -> None:
    """Prints what a command did: words on a terminal, a JSON object where standard output goes elsewhere.

    Args:
        summary: "command" first, then whatever JSON has.
    """
    print(words_of(summary) if sys.stdout.isatty() else json.dumps(summary), flush=True)


def words_of(summary: Mapping[str, Any]) -> str:
    """A summary for people, such as "prove: built 12"."""
    parts = [f"{name.removeprefix('n_').replace('_', ' ')} {_words(value)}" for name, value in summary.items()
             if name != "command"]  # fmt: skip
    return f"{summary['command']}: {', '.join(parts) or 'done'}"


def _words(value: Any) -> str:
    """A value of a summary in a few words."""
    if value is None or isinstance(value, bool):
        return {None: "unknown", True: "yes", False: "no"}[value]
    if isinstance(value, Mapping):
        value = [f"{name} {_words(each)}" for name, each in value.items()]
    if not isinstance(value, list | tuple):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    if not value:
        return "none"
    more = len(value) - _MOST_NAMED
    named = "; ".join(map(_words, value[:_MOST_NAMED]))
    return f"({named}; {more} more)" if more > 0 else f"({named})"


def ended(run: Callable[[], int], program: str = "eagle3lab") -> int:
    """The exit code of `run`, or of what it raised, which is told on stderr.

    Raises:
        BrokenPipeError: the reader of our output has left; only the caller knows what is left to write.
    """
    try:
        return run()
    except LabError as error:
        return _told(program, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _told(program, "interrupted; what was written before is kept", EXIT_COULD_NOT_RUN)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _told(program, str(_of_the_system(error)), EXIT_COULD_NOT_RUN)
    except MemoryError:
        full = RunFailed("the memory is used up", "what fits", "give a smaller size, or free memory, and run it again")
        return _told(program, str(full), EXIT_COULD_NOT_RUN)
    except Exception as error:
        known = {base.__name__ for base in type(error).__mro__ if base.__module__ == "eagle3core.errors"}
        if known:
            return _told(program, str(error), EXIT_COULD_NOT_RUN if known & _COULD_NOT_RUN else EXIT_USAGE)
        return _told(program, _unforeseen(error), EXIT_COULD_NOT_RUN)


def _of_the_system(error: OSError) -> RunFailed:
    """What a file system or the kernel refused; the file is named, its folders are nobody's business."""
    where = f": {os.path.basename(os.fsdecode(error.filename))}" if error.filename is not None else ""
    return RunFailed(
        f"the system refused a file or a process: {error.strerror or error}{where}",
        "files that can be read, and a folder that can be written, with room",
        "check the path, its rights and the space on that disk, then run the same command again",
    )


def _unforeseen(error: Exception) -> str:
    """An error that is nobody's to explain, with the place of its traceback."""
    what = f"unforeseen: {type(error).__name__}: {str(error)[:500]}"
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="eagle3lab-", suffix=".traceback.txt", delete=False, encoding="utf-8"
        ) as kept:
            kept.write(text)
    except OSError:
        return f"{what}\n  allowed: no error of our own\n  do: report it with this traceback\n{text}"
    return f"{what}\n  allowed: no error of our own\n  do: report it with the traceback in {kept.name}"


def _told(program: str, text: str, code: int) -> int:
    print(f"{program}: {text}", file=sys.stderr)
    return code
