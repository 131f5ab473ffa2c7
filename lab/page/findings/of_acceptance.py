"""How much is accepted, and why not more: what rows of acceptance, references, golden lengths and controls say."""

from __future__ import annotations

from lab.page.findings.finding import Finding, Level, Night, number, warned
from lab.page.findings.remedies import remedy_of
from lab.rows.store import Row

REFERENCE, GOLDEN = "acceptance against Hugging Face", "golden acceptance lengths"
LOST, LOST_OUTSIDE = "lost to ", "lost outside loops to "  # and a cause: names of a row's values
# What would win back the tokens that are lost to a cause (the causes of `lab.acceptance.counts`).
WINS_BACK = {
    "outside the draft vocabulary": "which no depth or tree reaches, only a larger draft vocabulary",
    "rank 2 to 4": "which a tree with branches reaches, at a row of the target each",
    "rank 5 or deeper": "where the draft is far off, which more or other training may change",
    "rank 1, yet refused": "which no sound draft shows: that is a bug",
}
# Where the first position holds and later ones fall, and where the first one is low already.
FIRST_IS_LOW = "already the first draft is refused more often: look at the taps, their order, the embedding and d2t"
LATER_FALL = (
    "the first position holds and later ones fall: look at the state fed back, rotary positions and the draft's cache"
)


def reference(night: Night) -> list[Finding]:
    """Draft decisions that the reference would not have made."""
    rows = [row for row in night.of("acceptance_reference") if number(row, "n_bugs")]
    if not rows:
        return []
    row = rows[0]
    sentence = (
        f"The draft decides otherwise than Hugging Face's modules do at {number(row, 'n_bugs'):.0f} of "
        f"{number(row, 'n_positions'):.0f} drafted positions ({row.name}): it commits "
        f"{number(row, 'measured_length'):.2f} tokens a step and a right one {number(row, 'expected_length'):.2f}; "
        f"{_place(night, row.job)}."
    )
    return [
        Finding(REFERENCE, Level.FAILED, sentence, row.job, night.figure(row.job, "acceptance-by-position"),
                "the draft does not compute what it was trained to", remedy_of(REFERENCE),
                night.failed({row.job}, REFERENCE))
    ]  # fmt: skip


def golden(night: Night) -> list[Finding]:
    """Acceptance lengths that are no longer what they were."""
    rows = [row for row in night.of("golden_length") if row.values.get("is_within") is False]
    if not rows:
        return []
    job = rows[0].job
    told = ", ".join(
        f"{row.name} {number(row, 'measured_length'):.2f} where it was {number(row, 'golden_length'):.2f}"
        for row in rows
    )
    sentence = f"Acceptance has drifted: {told}; {_place(night, job)}."
    return [
        Finding(GOLDEN, Level.FAILED, sentence, job, night.figure(job, "acceptance-length", "tree-lengths"),
                "acceptance has drifted", remedy_of(GOLDEN), night.failed({job}, GOLDEN))
    ]  # fmt: skip


def _place(night: Night, job: str) -> str:
    """Whether the first drafted position is low already, by its golden length (chain-1 drafts that one alone)."""
    chains = {row.name: row for row in night.of("golden_length") if row.job == job}
    if (first := chains.get("chain-1")) is not None and first.values.get("is_within") is not None:
        return LATER_FALL if first.values["is_within"] else FIRST_IS_LOW
    shares = next((row.values.get("acceptance_by_position") for row in _depths(night, job)), None)
    if isinstance(shares, list) and shares:
        return (
            f"the first draft is accepted in {float(shares[0]):.0%} of the steps, the last in {float(shares[-1]):.0%}"
        )
    return "no step was complete, so no position is told from another"


def controls(night: Night) -> list[Finding]:
    """Whether the head is worth more than drafts that need no model."""
    row = chosen_depth(night)
    if row is None or "is_working" not in row.values:
        return []
    head = row.number("acceptance_length_outside_loops") or row.number("acceptance_length")
    others = {
        each.name.rpartition("/")[2]: each.number("control_length_outside_loops") or each.number("control_length")
        for each in night.of("acceptance_control")
        if each.job == row.job and each.name.startswith(f"{row.name}/")
    }
    known = {name: length for name, length in others.items() if length is not None}
    if head is None or not known:
        return []
    best = max(known, key=lambda name: known[name])
    figure = night.figure(row.job, "acceptance-controls")
    beside = f"{head:.2f} tokens a step, {best}, the best draft without a model, {known[best]:.2f} (outside loops)"
    if row.values["is_working"] is False:
        sentence = f"The head beats none of the drafts that need no model: it commits {beside}, so it is not working."
        return [
            warned(
                "head not working", Level.WARNED, sentence, job=row.job, figure=figure, short="the head is not working"
            )
        ]
    return [Finding("controls", Level.TOLD, f"The head is worth its cost in acceptance: {beside}.", row.job, figure)]


def losses(night: Night) -> list[Finding]:
    """Where the tokens go that a step might have committed and did not."""
    row = chosen_depth(night)
    if row is None or row.number("acceptance_length") is None:
        return []
    k, length = int(row.name.rpartition("-")[2]), number(row, "acceptance_length")
    lost, apart = (
        {name.removeprefix(begun): number(row, name) for name in row.values if name.startswith(begun)}
        for begun in (LOST, LOST_OUTSIDE)
    )
    low, high = row.number("acceptance_length_low"), row.number("acceptance_length_high")
    span = "" if low is None or high is None else f" (95% interval {low:.2f} to {high:.2f})"
    sentence = f"At {row.name} a step commits {length:.2f} of at most {k + 1} tokens{span}"
    outside, looped = row.number("acceptance_length_outside_loops"), row.number("looped_share")
    there = ""
    if apart and outside is not None and looped:
        # Repeated text is easy to draft, so what a head is worth shows outside it.
        sentence += f", and {outside:.2f} outside repeated text"
        lost, length, there = apart, outside, " there"
    if sum(lost.values()) > 0:
        ranked = sorted(lost, key=lambda cause: -lost[cause])
        rest = ", ".join(f"{lost[cause]:.2f} to {cause}" for cause in ranked[1:] if lost[cause] >= 0.005)
        sentence += (
            f"; of the {k + 1 - length:.2f} lost{there}, {lost[ranked[0]]:.2f} go to tokens {_at(ranked[0])}, "
            f"{WINS_BACK.get(ranked[0], 'which its rows alone explain')}{f' ({rest})' if rest else ''}"
        )
    return [Finding("losses", Level.TOLD, f"{sentence}.", row.job, night.figure(row.job, "draft-ranks"))]


def _at(cause: str) -> str:
    return f"at {cause} of the draft's order" if cause.startswith("rank") else cause


def chosen_depth(night: Night) -> Row | None:
    """The depth that is taken apart: the one held against the reference, else the deepest; None without a row."""
    rows = _depths(night)
    held = {row.name for row in night.of("acceptance_reference")}
    return next((row for row in rows if row.name in held), rows[-1] if rows else None)


def _depths(night: Night, job: str = "") -> list[Row]:
    return [row for row in night.of("acceptance") if row.name.startswith("spec-") and job in ("", row.job)]
