"""Is it right? What rows of stages and tokens say: the first stage that is wrong, or how much room there was."""

from __future__ import annotations

import math

from lab.page.findings.causes import cause_of
from lab.page.findings.finding import Finding, Level, Night, number
from lab.page.findings.remedies import remedy_of
from lab.rows.store import Row

STAGES, TOKENS = "stage parity", "no token bugs"


def stages(night: Night) -> list[Finding]:
    """The first stage that disagrees in each job, those of one stage together; or that all agree."""
    by_job: dict[str, list[Row]] = {}
    for row in night.of("parity"):
        by_job.setdefault(row.job, []).append(row)
    first: dict[tuple[str, str], list[str]] = {}
    for job, rows in by_job.items():
        if bad := [row for row in rows if row.values.get("status") != "pass"]:
            # Rows of before stages were counted have no place in the run; their order is that of execution.
            worst = min(bad, key=lambda row: number(row, "first_bad") if "first_bad" in row.values else bad.index(row))
            first.setdefault((str(worst.values["stage"]), str(worst.values["kind"])), []).append(job)
    if not first:
        return [_agreeing(night, by_job)] if by_job else []
    return [_disagreeing(night, stage, kind, jobs, by_job) for (stage, kind), jobs in first.items()]


def _disagreeing(night: Night, stage: str, kind: str, jobs: list[str], by_job: dict[str, list[Row]]) -> Finding:
    rows = by_job[jobs[0]]
    row = next(row for row in rows if (row.values["stage"], row.values["kind"]) == (stage, kind))
    n_bad = sum(_n_bad(each) for each in rows)
    total = sum(int(number(each, "cells")) for each in rows)
    cause = cause_of(stage, kind)
    also = f", also in {', '.join(jobs[1:])}" if len(jobs) > 1 else ""
    sentence = (
        f"Stage {stage} ({'prefill' if kind == 'prefill' else f'pass {kind}'}) is the first that disagrees with "
        f"Hugging Face: {_error(row)}; {n_bad} of {total} comparisons fail, most of them because of it "
        f"({jobs[0]}{also})."
    )
    return Finding(
        STAGES, Level.FAILED, sentence + (f" Usual cause: {cause}." if cause else ""), jobs[0],
        night.figure(jobs[0], "stage-errors"), f"{stage} is the first stage that is wrong", remedy_of(STAGES),
        night.failed(set(jobs), STAGES),
    )  # fmt: skip


def _n_bad(row: Row) -> int:
    """Comparisons of a stage that did not pass; of rows from before they were counted, all or none."""
    counted = row.number("bad_cells")
    return int(counted if counted is not None else number(row, "cells") * (row.values.get("status") != "pass"))


def _error(row: Row) -> str:
    if row.values.get("status") == "missing":
        return "it was not recorded"
    if not (allowed := number(row, "tolerance")):
        return "its ids or positions have to be equal and are not"
    ratio = number(row, "ratio")
    times = "beyond" if not math.isfinite(ratio) else f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.3g} times"
    return f"its largest error is {number(row, 'max_abs'):.3g}, {times} what rounding may do ({allowed:.3g})"


def _agreeing(night: Night, by_job: dict[str, list[Row]]) -> Finding:
    rows = [row for own in by_job.values() for row in own]
    tightest = max(rows, key=lambda row: ratio if math.isfinite(ratio := number(row, "ratio")) else 0.0)
    total = sum(int(number(row, "cells")) for row in rows)
    dtypes = " and ".join(dict.fromkeys(str(row.parameters.get("dtype")) for row in rows))
    sentence = (
        f"All {total} comparisons of stages agree with the reference in {dtypes}; the least room has "
        f"{tightest.values['stage']} ({tightest.values['kind']}), with {number(tightest, 'ratio'):.2f} of the error "
        "that rounding may make."
    )
    return Finding(STAGES, Level.TOLD, sentence, tightest.job, night.figure(tightest.job, "room", "stage-errors"))


def tokens(night: Night) -> list[Finding]:
    """Tokens that are not the reference's choice; or that speculation changed none."""
    rows = night.of("tokens")
    if not rows:
        return []
    total, n_bugs, near = (
        int(sum(number(row, name) for row in rows)) for name in ("n_positions", "n_bug", "n_near_tie")
    )
    job, figure = rows[0].job, night.figure(rows[0].job, "token-classes")
    if n_bugs or night.failed({job}, TOKENS):
        where = ", ".join(f"{row.name} {number(row, 'n_bug'):.0f}" for row in rows if number(row, "n_bug"))
        sentence = (
            f"{n_bugs} of {total} generated tokens are not the reference's choice{f' ({where})' if where else ''}."
        )
        if not n_bugs:
            sentence = "Speculation leaves plain decoding where rounding does not explain it."
        return [
            Finding(TOKENS, Level.FAILED, sentence, job, figure, "generated tokens are wrong", remedy_of(TOKENS),
                    night.failed({job}, TOKENS))
        ]  # fmt: skip
    deep = [row for row in rows if number(row, "k")]
    equal, outputs = (int(sum(number(row, name) for row in deep)) for name in ("n_equal_outputs", "n_prompts"))
    sentence = (
        f"The text is the target's own: {equal} of {outputs} outputs with drafts equal plain decoding token for token, "
        f"and of {total} positions {near} are near-ties."
    )
    return [Finding(TOKENS, Level.TOLD, sentence, job, figure)]
