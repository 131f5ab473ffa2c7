"""All lamps of one head, in the order in which a reader should see them, with the measurement that they rest on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lab.acceptance.controls import Comparison, compare_with_controls
from lab.doctor.draft.case import Case
from lab.doctor.draft.lamp import Finding, Repair
from lab.doctor.draft.lamps import LAMPS
from lab.doctor.draft.look import Judged, Limit, OnLamp, look_at, processes_of, told
from lab.doctor.draft.measure import Measurement
from lab.night.progress import duration

KIND, BASE_KIND, CONTROL_KIND = "draft_lamp", "draft_acceptance", "draft_control"
MAKES_UP = 0.85  # of the first lamp's gain: what another may gain and still be no cause of its own
NOT_RUN = "not looked at: --fast runs nothing"
NO_LIMIT = math.inf


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
    processes: int = 1,
    on_lamp: OnLamp | None = None,
) -> Diagnosis:
    """Looks at every lamp of `LAMPS`; with `fast` only at those that run nothing.

    A lamp that ends with an error cannot tell, and the error is its reason: the others are looked at all the same.

    Args:
        limit_s: no lamp is begun after so many seconds; those left cannot tell.
        processes: lamps looked at side by side; 0: as many as processors and memory allow. The findings are the same.
        on_lamp: hears of each lamp as it ends.

    Raises:
        CheckpointError: the draft cannot be read, not even in part.
    """
    limit = Limit(limit_s)
    case.opened  # noqa: B018 (raises what keeps every lamp from looking)
    if fast:
        lamps = [lamp if lamp.is_fast else replace(lamp, look=partial(_not_run, lamp.name)) for lamp in LAMPS]
        judged = sorted(look_at(replace(case, prompts=()), lamps, limit=limit, on_lamp=on_lamp), key=_order)
        return Diagnosis(tuple(judged), None, None, None, sum(each.seconds for each in judged))
    n = processes_of(case, processes, len(LAMPS))
    judged = sorted(look_at(case, LAMPS, n_processes=n, limit=limit, on_lamp=on_lamp), key=_order)
    judged = judged if limit.is_over else explained(case, judged, n)
    return _measured(case, tuple(judged))


def _not_run(name: str, case: Case) -> Finding:
    return Finding(name, "unknown", NOT_RUN)


def teller(say: Callable[[str], None]) -> Callable[[Judged], None]:
    """What says, a line a lamp, how far an examination is: it takes minutes, and the verdict comes last."""
    n_seen = itertools.count(1)

    def tell(each: Judged) -> None:
        say(f"[{next(n_seen)}/{len(LAMPS)}] {each.lamp.name}: {each.finding.colour} ({duration(each.seconds)})")

    return tell


def _measured(case: Case, judged: tuple[Judged, ...]) -> Diagnosis:
    """The lamps with the figures that they rest on, or why there are none."""
    try:
        return Diagnosis(judged, case.base, case.before, _compared(case), 0.0)
    except Exception as error:  # as of a lamp: what was found is kept
        return Diagnosis(judged, None, None, None, 0.0, told(error))


def _compared(case: Case) -> Comparison | None:
    return None if case.by_engine is None else compare_with_controls(case.by_engine, case.prompts)


def explained(case: Case, judged: Sequence[Judged], n_processes: int = 1) -> list[Judged]:
    """The lamps without those that only make up for the first: another misreading may win back a part of what it lost.

    Such a lamp gains less than the first, and with the first one mended it gains nothing.
    """
    first = judged[0].finding
    if first.mended is None or first.repair is None:
        return list(judged)
    most = MAKES_UP * first.repair.gain
    less = [each.lamp for each in judged[1:] if _may_make_up(each.finding, most)]
    again = look_at(case.read_as(first.mended), less, n_processes=min(n_processes, len(less)), limit=Limit())
    idle = {each.lamp.name for each in again if each.finding.colour != "red"}
    left = [_made_up(each, first.lamp) if each.lamp.name in idle else each for each in judged]
    return sorted(left, key=_order)


def _may_make_up(finding: Finding, most: float) -> bool:
    """Whether a lamp has another reading that gains less than `most`."""
    return finding.mended is not None and finding.repair is not None and finding.repair.gain < most


def _made_up(each: Judged, first: str) -> Judged:
    said = f"{each.finding.said}; but it only makes up for {first}, and gains nothing once that is mended"
    return replace(each, finding=Finding(each.lamp.name, "green", said, values=each.finding.values))


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
