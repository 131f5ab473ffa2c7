"""All lamps of one head, in the order in which a reader should see them, with the measurement that they rest on."""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.acceptance.controls import Comparison, compare_with_controls
from lab.doctor.draft.case import Case
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.lamps import LAMPS
from lab.doctor.draft.measure import Measurement
from lab.night.progress import duration

KIND, BASE_KIND, CONTROL_KIND = "draft_lamp", "draft_acceptance", "draft_control"
MAKES_UP = 0.85  # of the first lamp's gain: what another may gain and still be no cause of its own
NOT_RUN = "not looked at: --fast runs nothing"
NO_LIMIT = math.inf


@dataclass(frozen=True)
class Judged:
    """A lamp with what it found. `seconds`: what that took."""

    lamp: Lamp
    finding: Finding
    seconds: float


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a head.

    Attributes:
        judged: all lamps: red ones first, by what mending them gives; then those that cannot tell, then green ones.
        base: acceptance of the head as it is read; None in the fast part.
        length: mean acceptance length of the engine; None in the fast part.
        comparison: the engine's acceptance beside drafts without a model; None where the engine did not run.
        fast_seconds: what the lamps that run nothing took.
        reason: why there are no figures where there should be; else empty.
    """

    judged: tuple[Judged, ...]
    base: Measurement | None
    length: float | None
    comparison: Comparison | None
    fast_seconds: float
    reason: str = ""

    def of(self, colour: str) -> list[Judged]:
        """The lamps of one colour."""
        return [each for each in self.judged if each.finding.colour == colour]

    @property
    def failed(self) -> list[Judged]:
        """The lamps that ended with an error of their own, which are of those that cannot tell."""
        return [each for each in self.judged if each.finding.failed]

    def records(self) -> Iterator[tuple[str, str, dict[str, Any], str]]:
        """Kind, name, values and reason of all there is to store; with a reason it was not measured."""
        for place, each in enumerate(self.judged):
            finding = each.finding
            if finding.colour == "unknown":
                yield KIND, finding.lamp, {}, finding.said
                continue
            repair = finding.repair or Repair("")
            yield KIND, finding.lamp, {
                "colour": finding.colour, "said": finding.said, "place": place, "took_s": each.seconds,
                "change": repair.change or None, "before": repair.before, "after": repair.after,
                **dict(finding.values),
            }, ""  # fmt: skip
        if self.base is not None:
            yield BASE_KIND, f"spec-{self.base.k}", {
                "acceptance_length": self.length, "read_length": self.base.length, "n_steps": self.base.n_steps,
                "self_fed": [_share(a) for a in self.base.self_fed],
                "teacher_forced": [_share(a) for a in self.base.forced],
            }, ""  # fmt: skip
        if self.reason:
            yield BASE_KIND, "figures", {}, self.reason
        for control in self.comparison.controls if self.comparison else ():
            yield CONTROL_KIND, control.name, control.row_values(), ""

    @property
    def verdict(self) -> str:
        """One sentence: the cause, what mending it gives, and the change; or that there is none."""
        red = self.of("red")
        if not red:
            unknown = self.of("unknown")
            rest = f"; {len(unknown)} lamp{'s' * (len(unknown) != 1)} cannot tell" if unknown else ""
            length = "" if self.length is None else f" {self.length:.2f} tokens a step are what this head gives."
            n_failed = len(self.failed)
            rest += f", {n_failed} of them because they failed" if n_failed else ""
            return (
                f"No known cause of low acceptance was found ({len(self.of('green'))} lamps are green{rest}).{length}"
            )
        first = red[0].finding
        assert first.repair is not None, "a red lamp has its repair"
        given = first.repair.counterfactual
        mended = f"; if fixed: acceptance {given}" if given else ""
        return f"{first.lamp}: {first.said}{mended}. Change: {first.repair.change}"


def examine(
    case: Case,
    *,
    fast: bool = False,
    limit_s: float = NO_LIMIT,
    on_lamp: Callable[[Judged], None] | None = None,
) -> Diagnosis:
    """Looks at every lamp of `LAMPS`; with `fast` only at those that run nothing.

    A lamp that ends with an error cannot tell, and the error is its reason: the others are looked at all the same.

    Args:
        limit_s: no lamp is begun after so many seconds; those left cannot tell.

    Raises:
        CheckpointError: the draft cannot be read, not even in part.
    """
    started = time.perf_counter()
    case.opened  # noqa: B018 (raises what keeps every lamp from looking)
    unrun = replace(case, prompts=())
    judged = list[Judged]()
    for lamp in LAMPS:
        if time.perf_counter() - started > limit_s:
            each = Judged(lamp, Finding(lamp.name, "unknown", f"not looked at: the limit of {limit_s:g} s was over"), 0)
        elif fast and not lamp.is_fast:
            each = Judged(lamp, Finding(lamp.name, "unknown", NOT_RUN), 0)
        else:
            each = looked(lamp, unrun if fast else case)
        judged.append(each)
        if on_lamp is not None:
            on_lamp(each)
    judged.sort(key=_order)
    if fast:
        return Diagnosis(tuple(judged), None, None, None, sum(each.seconds for each in judged))
    judged = explained(case, judged) if time.perf_counter() - started <= limit_s else judged
    return _measured(case, tuple(judged))


def teller(say: Callable[[str], None]) -> Callable[[Judged], None]:
    """What says, a line a lamp, how far an examination is: it takes minutes, and the verdict comes last."""
    n_seen = itertools.count(1)

    def tell(each: Judged) -> None:
        say(f"[{next(n_seen)}/{len(LAMPS)}] {each.lamp.name}: {each.finding.colour} ({duration(each.seconds)})")

    return tell


def looked(lamp: Lamp, case: Case) -> Judged:
    """What a lamp says of a case; of one that ends with an error, that it cannot tell, and why."""
    start = time.perf_counter()
    try:
        finding = lamp.look(case)
    except Exception as error:  # one lamp's bug, or what its machine lacks, is not to cost what the others found
        finding = Finding(lamp.name, "unknown", f"it failed: {_told(error)}", failed=True)
    return Judged(lamp, finding, time.perf_counter() - start)


def _told(error: Exception) -> str:
    """An error in a line, with its place."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {what} ({Path(frame.filename).name}, line {frame.lineno})"


def _measured(case: Case, judged: tuple[Judged, ...]) -> Diagnosis:
    """The lamps with the figures that they rest on, or why there are none."""
    try:
        return Diagnosis(judged, case.base, case.before, _compared(case), 0.0)
    except Exception as error:  # as of a lamp: what was found is kept
        return Diagnosis(judged, None, None, None, 0.0, _told(error))


def _compared(case: Case) -> Comparison | None:
    return None if case.by_engine is None else compare_with_controls(case.by_engine, case.prompts)


def explained(case: Case, judged: Sequence[Judged]) -> list[Judged]:
    """The lamps without those that only make up for the first: another misreading may win back a part of what it lost.

    Such a lamp gains less than the first, and with the first one mended it gains nothing.
    """
    first = judged[0].finding
    if first.mended is None or first.repair is None:
        return list(judged)
    mended, left = case.read_as(first.mended), [judged[0]]
    for each in judged[1:]:
        finding = each.finding
        is_less = finding.repair is not None and finding.repair.gain < MAKES_UP * first.repair.gain
        if finding.mended is not None and is_less and looked(each.lamp, mended).finding.colour != "red":
            said = f"{finding.said}; but it only makes up for {first.lamp}, and gains nothing once that is mended"
            each = replace(each, finding=Finding(finding.lamp, "green", said, values=finding.values))
        left.append(each)
    return sorted(left, key=_order)


def _order(each: Judged) -> tuple[int, bool, float, float]:
    """Red by gain, of unmeasured gains the surest, and last what does without the head; then what cannot be told; then
    green."""
    finding = each.finding
    place = ("red", "unknown", "green").index(finding.colour)
    gain = finding.repair.gain if finding.repair is not None else 0.0
    return place, finding.is_substitute, -gain, -finding.weight


def base_table(base: Measurement) -> list[dict[str, Any]]:
    """Conditional acceptance by level: fed its own drafts and states, and with the true ones."""
    return [
        {"level": level + 1, "self_fed": _share(own), "teacher_forced": _share(forced)}
        for level, (own, forced) in enumerate(zip(base.self_fed, base.forced, strict=True))
    ]


def _share(value: float) -> float | None:
    return None if math.isnan(value) else value
