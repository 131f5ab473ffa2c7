"""Is it worth its time? What rows of rounds, spans, the bench and the speed curves say."""

from __future__ import annotations

from lab.night.notices import disturbed, refused, slow
from lab.page.findings.finding import Finding, Level, Night, as_sentence, number, warned
from lab.rows.store import Row


def notices(night: Night) -> list[Finding]:
    """What the verdict must not hide: a disturbed run, a draft that slows its target, drafts that are refused."""
    rows = [row for row in night.rows if row.status == "measured"]
    found = []
    for kind, rule, names, short in (
        ("refused drafts", refused, ("acceptance-by-position",), "the target refuses its drafts"),
        ("slow draft", slow, ("decoding-speed",), "the draft slows its target down"),
        ("disturbed run", disturbed, ("decoding-speed", "rates", "gates"), "the run was disturbed"),
    ):
        if (notice := rule(rows)) is not None:
            text = f"{as_sentence(notice.sentence)}."
            figure = night.figure(notice.job, *names)
            found.append(warned(kind, Level.WARNED, text, job=notice.job, figure=figure, short=short))
    return found


def speedups(night: Night) -> list[Finding]:
    """The fastest depth of the pair that was decoded, with what its step costs and commits."""
    rows = [row for row in night.of("decode") if row.number("speedup") is not None]
    if not rows:
        return []
    best = max(rows, key=lambda row: number(row, "speedup"))
    if number(best, "speedup") <= 1.0:
        return []  # then it is a warning
    length = best.number("acceptance_length")
    commits = "" if length is None else f" and commits {length:.2f} tokens"
    sentence = (
        f"{best.name} decodes {number(best, 'speedup'):.2f} times as fast as plain decoding{interval(best)}, the most "
        f"of {len(rows)} depth{'' if len(rows) == 1 else 's'}: a step takes {number(best, 'step_over_base'):.2f} times "
        f"as long{commits}."
    )
    return [Finding("speed-up", Level.TOLD, sentence, best.job, night.figure(best.job, "decoding-speed"))]


def interval(row: Row, name: str = "speedup") -> str:
    """The 10th to the 90th percentile over rounds, in brackets; empty where the row has none."""
    low, high = row.number(f"{name}_p10"), row.number(f"{name}_p90")
    return "" if low is None or high is None else f" ({low:.2f} to {high:.2f} over the rounds)"


def spans(night: Night) -> list[Finding]:
    """What a step with drafts spends beyond a plain one."""
    times: dict[str, dict[str, float]] = {}
    for row in night.of("decode_span"):
        mode, _, span = row.name.partition("/")
        times.setdefault(mode, {})[span] = number(row, "own_time_ms_timed")
    modes = [mode for mode, own in times.items() if mode.startswith("spec-") and any(own.values())]
    if "baseline" not in times or not modes:
        return []
    mode, plain = modes[-1], times["baseline"]
    more = {span: ms - plain.get(span, 0.0) for span, ms in times[mode].items()}
    most = sorted(more, key=lambda span: -more[span])[:3]
    told = ", ".join(f"{span} ({more[span]:+.2g} ms)" for span in most if more[span] > 0)
    job = next(row.job for row in night.of("decode_span"))
    sentence = (
        f"A step of {mode} takes {sum(times[mode].values()):.3g} ms with every part timed, a plain one "
        f"{sum(plain.values()):.3g}; the difference lies most in {told}."
    )
    return [Finding("spans", Level.TOLD, sentence, job, night.figure(job, "step-waterfall"))] if told else []


def stages(night: Night) -> list[Finding]:
    """The stages furthest above the floor of their bytes, of the deepest step that was taken apart."""
    rows = [row for row in night.of("stage") if row.parameters.get("spec_k")]
    if not rows:
        return []
    last = rows[-1].parameters
    own = [
        row for row in rows if all(row.parameters.get(key) == last.get(key) for key in ("context", "batch", "spec_k"))
    ]
    above = {str(row.parameters.get("stage")): number(row, "own_us") - number(row, "floor_us") for row in own}
    most = sorted(above, key=lambda stage: -above[stage])[:3]
    job, where = rows[-1].job, f"{last.get('context')} x {last.get('batch')}"
    sentence = (
        f"Of a spec-{last['spec_k']} step at {where}, {sum(number(row, 'own_us') for row in own):.0f} us of stages, "
        f"{sum(above.values()):.0f} us lie above the floor of their bytes: most in "
        f"{', '.join(f'{stage} ({above[stage]:.0f} us)' for stage in most)}."
    )
    return [Finding("stages", Level.TOLD, sentence, job, night.figure(job, "waterfall"))]


def points(night: Night) -> list[Finding]:
    """Speed-up and share of the floor over all points of the bench and the gates."""
    rows = [row for row in engine_points(night) if row.number("speedup") is not None]
    if not rows:
        return []
    best, least = max(rows, key=lambda row: number(row, "speedup")), min(rows, key=lambda row: number(row, "speedup"))
    far = min(engine_points(night), key=lambda row: number(row, "share_of_floor"))
    sentence = (
        f"On the bench drafts make decoding {number(least, 'speedup'):.2f} ({place(least)}) to "
        f"{number(best, 'speedup'):.2f} times as fast ({place(best)}); furthest from its byte floor is {place(far)}, "
        f"whose bytes ask for {number(far, 'share_of_floor'):.0%} of its time."
    )
    summary = next((job for job in night.figures if night.figure(job, "points")), best.job)
    return [Finding("points", Level.TOLD, sentence, summary, night.figure(summary, "points"))]


def engine_points(night: Night) -> list[Row]:
    """The engine's own rows of the bench that know their share of the floor."""
    rows = [row for row in night.of("bench") if row.parameters.get("who") == "engine"]
    return [row for row in rows if row.number("share_of_floor") is not None]


def place(row: Row) -> str:
    """A point of the bench for people: `32768 x 1, spec-3`."""
    where, k = row.parameters, row.parameters.get("spec_k")
    return f"{where.get('context')} x {where.get('batch')}, {f'spec-{k}' if k else 'plain'}"


def depths(night: Night) -> list[Finding]:
    """Which depth is best at the smallest and at the largest batch, and whether drafts stop paying."""
    rows = night.of("speed_choice")
    if not rows:
        return []
    least, most = (side(rows, key=lambda row: number(row, "times_plain")) for side in (min, max))
    told = [
        f"{row.name} spec-{number(row, 'best_k'):.0f}, {number(row, 'times_plain'):.2f} times" for row in (most, least)
    ]
    never = [row.name for row in rows if not number(row, "best_k")]
    ends = f"; drafts do not pay at {', '.join(dict.fromkeys(never))}" if never else "; drafts pay everywhere"
    where = "" if len(rows) == 1 else f" to {told[1]}"
    sentence = f"The best depth, expected of plain decoding's speed: {told[0]}{where}{ends}."
    job = most.job
    return [Finding("depths", Level.TOLD, sentence, job, night.figure(job, "recommendation", "best-depth"))]
