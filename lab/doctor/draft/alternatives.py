"""Other readings of a head, measured beside the one that the engine takes: the mechanism of every wiring lamp.

Two things can be wrong. The files may lead the engine to a reading that the head was not trained with: then another
accepts more, with certainty. Or the engine may not do what it read (a bug, planted or its own): then its steps are
those of another reading, while the one that it should have had accepts otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.doctor.draft.case import Case
from lab.doctor.draft.lamp import Finding, Repair
from lab.doctor.draft.measure import Measurement, doubt, gain_errors, is_certain_gain, likelihood_errors
from lab.doctor.draft.reading import Reading

LIKE = 0.02  # share of complete steps in which two runs of one head may differ: near ties of fp32
TRIED_IN_FULL = 3  # of many readings, those that are measured over all levels; one level tells the others off


@dataclass(frozen=True, eq=False)
class Alternative:
    """One other reading.

    Attributes:
        name: what is read otherwise, in words that follow "read with".
        change: what is to be typed so that the engine reads it so.
        reading: the head, read so.
    """

    name: str
    change: str
    reading: Reading


def judge(
    case: Case,
    lamp: str,
    asked: str,
    alternatives: Sequence[Alternative],
    imitations: Sequence[Alternative] = (),
    *,
    by_length: bool = False,
) -> Finding:
    """What a family of readings says: red with the best of them where its gain is certain, or where it is what the
    engine in fact does.

    Args:
        asked: what was tried, in words that follow "tried:".
        alternatives: readings that may be the right one.
        imitations: further ones that the engine may take by mistake.
        by_length: all are measured in full, and the longest is best: for readings with other vocabularies, of which
            likelihoods of the text are those of other tokens.
    """
    if not alternatives:
        return Finding(lamp, "green", f"nothing else could be read: {asked}")
    if not case.prompts:
        return Finding(lamp, "unknown", "no prompts: other readings can only be told apart by what they accept")
    tried = alternatives if by_length else shortlist(case, alternatives)
    best = max(tried, key=lambda each: _worth(case.measured(each.reading), by_length=by_length))
    after = case.measured(best.reading)
    if is_certain_gain(case.base, after):
        return _better(case, lamp, best, after)
    imitated = _imitated(case, [*alternatives, *imitations])
    if imitated is not None:
        return _engine_differs(case, lamp, imitated)
    gain, errors = after.length - case.base.length, likelihood_errors(case.base, after)
    values = (
        ("n_tried", len(alternatives)), ("best_other", best.name), ("best_other_length", after.length),
        ("likelihood_errors", errors),
    )  # fmt: skip
    said = f"tried: {asked}; the best other reading ({best.name}) changes {gain:+.2f} tokens a step"
    unsure = doubt(case.base, after, len(case.prompts))
    if unsure:
        return Finding(lamp, "unknown", f"{said}, but {unsure}", values=values)
    return Finding(lamp, "green", said, values=values)


def shortlist(case: Case, alternatives: Sequence[Alternative], n: int = TRIED_IN_FULL) -> list[Alternative]:
    """Of many readings the `n` that make the text likeliest at the first level; of few, all."""
    if len(alternatives) <= n:
        return list(alternatives)
    return sorted(alternatives, key=lambda each: -case.first_likelihood(each.reading))[:n]


def _worth(measured: Measurement, *, by_length: bool) -> float:
    """What the best of several readings is best in: likelihood of the text has less noise than acceptance."""
    return measured.length if by_length else float(measured.likelihood.double().nanmean())


def engine_differs(case: Case) -> bool:
    """Whether the engine's steps are not those of the reading that it took."""
    return case.by_engine is not None and steps_apart(case, case.base) > LIKE


def _better(case: Case, lamp: str, best: Alternative, after: Measurement) -> Finding:
    before = case.before  # 1 for a refused head, whatever it would accept if it were taken as it is
    errors = max(gain_errors(case.base, after), likelihood_errors(case.base, after))
    return Finding(
        lamp, "red",
        f"read with {best.name}, the head accepts {after.length:.2f} tokens a step instead of {before:.2f}, "
        f"{errors:.0f} standard errors more",
        Repair(best.change, before, after.length), weight=min(1.0, errors / 20), mended=best.reading,
        values=(("best_other", best.name), ("errors", errors)),
    )  # fmt: skip


def _imitated(case: Case, tried: Sequence[Alternative]) -> Alternative | None:
    """The reading whose steps the engine's are, where they are not those of its own."""
    if not engine_differs(case):
        return None
    apart = {each.name: steps_apart(case, case.measured(each.reading)) for each in tried}
    nearest = min(tried, key=lambda each: apart[each.name])
    return nearest if apart[nearest.name] <= LIKE else None


def _engine_differs(case: Case, lamp: str, imitated: Alternative) -> Finding:
    return Finding(
        lamp, "red",
        f"the engine's steps are those of the head read with {imitated.name}, though its files say otherwise",
        Repair("mend the engine, not the files: it does not do what it read", case.before, case.base.length),
        weight=0.9, values=(("engine_reads", imitated.name),),
    )  # fmt: skip


def steps_apart(case: Case, walked: Measurement) -> float:
    """Share of complete steps, of the engine's and of a walk's together, that only one of the two took."""
    assert case.by_engine is not None, "asked of an engine that ran"
    differ = total = 0
    for response, walk in zip(case.by_engine.responses, walked.steps, strict=True):
        ours = {(step.start, step.n_accepted) for step in response.req_metrics.steps if not step.cut}
        theirs = {(step.start, step.n_accepted) for step in walk if not step.cut}
        differ, total = differ + len(ours ^ theirs), total + len(ours | theirs)
    return differ / max(total, 1)


def first_difference(case: Case) -> int | None:
    """The first position that a step begins behind whose accepted drafts are not those of the reading; None: nowhere.

    Of every text the first one counts: behind it the engine begins its steps elsewhere.
    """
    assert case.by_engine is not None, "asked of an engine that ran"
    found = list[int]()
    for prompt, response, walk in zip(case.text.prompts, case.by_engine.responses, case.base.steps, strict=True):
        theirs = {step.start: step.n_accepted for step in walk if not step.cut}
        ours = ((s.start, s.n_accepted) for s in response.req_metrics.steps if not s.cut)
        parts = (start for start, n in ours if theirs.get(start) != n)
        found += [len(prompt) + start for start in parts][:1]
    return min(found, default=None)


def lamp_of(name: str, asked: str, readings: Callable[[Case], Sequence[Alternative]]) -> Callable[[Case], Finding]:
    """The detector of a lamp that only tries other readings."""

    def look(case: Case) -> Finding:
        return judge(case, name, asked, readings(case))

    return look
