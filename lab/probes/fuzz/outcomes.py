"""What can come of a case, and findings: cases that ended as none may, gathered by where it happened."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, Literal

from lab.probes.fuzz.group import Ended, Group

Word = Literal["fine", "refused", "traceback", "memory", "time", "outside", "code"]
WORDS: dict[Word, str] = {
    "fine": "taken",
    "refused": "refused in three parts, by a class or exit code of the group's",
    "traceback": "any other error, or a crash",
    "memory": "asked for more memory than allowed",
    "time": "took more time than allowed",
    "outside": "wrote, or connected, somewhere it should not",
    "code": "ran code of the input's",
}
HARMLESS: tuple[Word, ...] = ("fine", "refused")

MOST_LETTERS = 4000  # of a refusal

_ROOT = Path(__file__).resolve().parents[3]
_HOUSE = tuple(f"{_ROOT / name}/" for name in ("eagle3core", "lab"))
_OWN = f"{Path(__file__).resolve().parent}/"
# What Python, torch, C++ and Rust say when an allocation fails.
_NO_MEMORY = re.compile(
    r"allocate memory|memory allocation of|bad_alloc|out of memory|Cannot allocate|ENOMEM|memory is used up", re.I
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        word: see `WORDS`. error: class of what was raised, or signal, or what was done. frame: the innermost place in
        this house. told: its text, shortened.
        cpu_s: time of a processor. more_bytes: most memory present beyond what was at first, libraries that were
            opened late and the file's own pages among it. Both 0 where the child was ended.
    """

    word: Word
    error: str = ""
    frame: str = ""
    told: str = ""
    cpu_s: float = 0.0
    more_bytes: int = 0

    @property
    def is_finding(self) -> bool:
        """Whether no input may end so."""
        return self.word not in HARMLESS


@dataclass
class Finding:
    """Cases of a group that ended alike, at one place: how many, and the first of them."""

    group: str
    outcome: Outcome
    first: int
    n_cases: int = 1

    @property
    def line(self) -> str:
        """The finding in a line."""
        one = self.outcome
        told = " | ".join(one.told.splitlines())
        place = f"{one.error} at {one.frame or '?'}"
        return f"{self.group} {one.word}: {place}, {self.n_cases} cases, first {self.first}: {told[:300]}"


def gathered(found: Iterable[tuple[str, int, Outcome]]) -> list[Finding]:
    """Findings of (group, case, outcome), most frequent first; cases are alike by group, word, error and place."""
    by_place: dict[tuple[str, str, str, str], Finding] = {}
    for group, number, outcome in found:
        if not outcome.is_finding:
            continue
        key = (group, outcome.word, outcome.error, outcome.frame)
        if key in by_place:
            by_place[key].n_cases += 1
        else:
            by_place[key] = Finding(group, outcome, number)
    return sorted(by_place.values(), key=lambda finding: -finding.n_cases)


def of_return(group: Group, ended: Ended | None) -> Outcome:
    """Of a door that came back."""
    if ended is None or ended.code == 0:
        return Outcome("fine")
    if has_run_out(ended.told):
        return Outcome("memory", f"exit {ended.code}", "", ended.told)
    if ended.code not in group.exit_codes or not has_three_parts(ended.told):
        return Outcome("traceback", f"exit {ended.code}", _unforeseen_at(ended.told), ended.told[-600:])
    return Outcome("refused", f"exit {ended.code}", "", ended.told[:600])


def of_error(group: Group, error: BaseException) -> Outcome:
    """Of a door that raised; a failed allocation counts as such even where it was turned into a refusal."""
    name, frame, told = type(error).__name__, frame_of(error.__traceback__), str(error)[:600]
    if any(isinstance(each, MemoryError) or has_run_out(str(each)) for each in chain(error)):
        return Outcome("memory", name, frame, told)
    if name in group.refusals and has_three_parts(str(error)):
        return Outcome("refused", name, frame, told)
    return Outcome("traceback", name, frame, told)


def of_signal(signal_name: str, told: str) -> Outcome:
    """Of a child that was ended by a signal; `told` is what it wrote to its stderr."""
    frames = [found for found in _FRAME.finditer(told) if found[1].startswith(_HOUSE) and not found[1].startswith(_OWN)]
    frame = f"{Path(frames[0][1]).relative_to(_ROOT)}:{frames[0][3]}" if frames else ""
    if signal_name in ("SIGPROF", "SIGKILL"):
        return Outcome("time", signal_name, frame, told[:600])
    return Outcome("memory" if has_run_out(told) else "traceback", signal_name, frame, told[:600])


def has_three_parts(text: str) -> bool:
    """Whether a text says what is wrong, what is allowed and what to do, each in words, and is short enough to read."""
    if len(text) > MOST_LETTERS:
        return False
    return re.search(r"\S.*\n  allowed: *\S.*\n  do: *\S", text, re.S) is not None and "unforeseen: " not in text


def has_run_out(text: str) -> bool:
    """Whether a text tells of an allocation that failed."""
    return _NO_MEMORY.search(text) is not None


def chain(error: BaseException) -> list[BaseException]:
    """An error, and those that it came from."""
    errors: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in errors:
        errors.append(each)
        each = each.__cause__ or each.__context__
    return errors


def frame_of(trace: TracebackType | None) -> str:
    """`file:function` of the innermost frame in this house, the fuzzing itself left out."""
    names = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in walk_tb(trace)]
    inner = [(file, name) for file, name in names if file.startswith(_HOUSE) and not file.startswith(_OWN)]
    return f"{Path(inner[-1][0]).relative_to(_ROOT)}:{inner[-1][1]}" if inner else ""


def _unforeseen_at(told: str) -> str:
    """The class that an error of our own names, which stands where a place would."""
    found = re.search(r"unforeseen: (\w+)", told)
    return found[1] if found else ""


def as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain values."""
    return asdict(outcome)
