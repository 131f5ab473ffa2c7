"""What failed, could not be judged, did not finish or moved, of whatever no other rule has told already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab.figures import shown
from lab.page.findings.finding import Finding, Level, Night, as_sentence, warned
from lab.page.findings.remedies import Remedy, remedy_of
from lab.rows.gates import bare_name
from lab.rows.store import Row
from lab.rows.values import percent
from lab.rows.verdict import WORST_FIRST

MOST_NAMED = 3  # gates, reasons or numbers in one sentence
MOST_DETAIL = 60  # characters of a gate's detail among others; longer ones stand in the table of gates
MOST_ALONE = 240  # of a gate that is told alone: its detail is the cause
MOST_ERROR = 300  # of an error's text; the section of what did not finish has the whole
# The figures of a job that show what its gates judge, by how their names begin.
JUDGED_IN = ("gates", "roofline", "acceptance-length", "decoding-speed", "heat", "time-per-range")


def failed(night: Night, told: frozenset[tuple[str, str]]) -> list[Finding]:
    """Failed gates that no other finding tells, those of one remedy together."""
    groups = _by_remedy([gate for gate in night.gates("fail") if (gate["job"], gate["name"]) not in told])
    found = []
    for remedy, gates in groups.items():
        jobs = ", ".join(dict.fromkeys(gate["job"] for gate in gates if gate["job"]))
        most = MOST_ALONE if len(gates) == 1 else MOST_DETAIL
        words = "; ".join(_gate(gate, most) for gate in gates[:MOST_NAMED])
        more = f"; and {len(gates) - MOST_NAMED} more" if len(gates) > MOST_NAMED else ""
        count = "A gate fails" if len(gates) == 1 else f"{len(gates)} gates fail"
        one = f"the gate {bare_name(gates[0]['name'])!r}"
        short = one if len(gates) == 1 else f"{len(gates)} gates{f' of {jobs}' if jobs else ''}"
        sentence = f"{count}{f' ({jobs})' if jobs else ''}: {words}{more}."
        job, short = gates[0]["job"], f"{short} failed"
        found.append(Finding("failed gate", Level.FAILED, sentence, job, night.figure(job, *JUDGED_IN), short, remedy))
    return found


def _gate(gate: Mapping[str, Any], most: int) -> str:
    sign = "; " if most == MOST_ALONE else ", "
    detail = f"{sign}{gate['detail']}" if gate.get("detail") and len(gate["detail"]) <= most else ""
    return f"{gate['name']} is {shown(gate['value'])} ({shown(gate['threshold'])}){detail}"


def not_judged(night: Night) -> list[Finding]:
    """Gates without a value, those of one remedy together."""
    found = []
    for remedy, gates in _by_remedy(night.gates("missing")).items():
        names = ", ".join(gate["name"] for gate in gates[:MOST_NAMED])
        more = f" and {len(gates) - MOST_NAMED} more" if len(gates) > MOST_NAMED else ""
        reason = gates[0].get("detail") or "no reason was given"
        sentence = f"Not judged, and so not passed: {names}{more}; {reason}."
        found.append(
            Finding("gate not judged", Level.NOT_JUDGED, sentence, gates[0]["job"], short=f"{gates[0]['name']} could "
                    "not be judged", remedy=remedy)
        )  # fmt: skip
    return found


def _by_remedy(gates: Sequence[Mapping[str, Any]]) -> dict[Remedy, list[Mapping[str, Any]]]:
    groups: dict[Remedy, list[Mapping[str, Any]]] = {}
    for gate in gates:
        groups.setdefault(remedy_of(gate["name"]), []).append(gate)
    return groups


def unfinished(night: Night) -> list[Finding]:
    """Jobs that did not come to their end, those of one error together, with the error's own remedy if it has one."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for job in night.summary["jobs"]:
        if job["status"] != "finished":
            groups.setdefault((job["status"], str(job.get("error") or "no reason was left")), []).append(job)
    return [_unfinished(status, error, jobs) for (status, error), jobs in groups.items()]


def _unfinished(status: str, error: str, jobs: Sequence[Mapping[str, Any]]) -> Finding:
    cell = "" if jobs[0].get("cell") is None else f" in cell {jobs[0]['cell']}"
    who = jobs[0]["id"] if len(jobs) == 1 else f"{len(jobs)} jobs"
    named = "" if len(jobs) == 1 else f", {', '.join(job['id'] for job in jobs)}"
    what, _, rest = error.partition("\n  allowed: ")  # as errors of the project are told, in three parts
    allowed, _, change = rest.partition("\n  do: ")
    told = f"{what}; allowed: {allowed}" if allowed else what
    sentence = f"{who} did not finish ({status}{cell}{named}): {_cut(' '.join(told.split()))}."
    remedy = remedy_of("unfinished job")
    if change:
        again = "then run the same command with the same `--out`: only what did not finish runs again"
        remedy = replace(remedy, text=f"{as_sentence(_cut(change))}; {again}.")
    return Finding(
        "unfinished job", Level.NOT_JUDGED, sentence, jobs[0]["id"], short=f"{who} did not finish", remedy=remedy
    )


def _cut(text: str) -> str:
    return text if len(text) <= MOST_ERROR else f"{text[:MOST_ERROR].rpartition(' ')[0]} …"


def not_had(night: Night) -> list[Finding]:
    """Rows that were asked for and not had, gates and jobs that did not finish apart; by reason."""
    told = {job["id"] for job in night.summary["jobs"] if job["status"] != "finished"}
    rows = [row for row in night.rows if row.status == "missing" and row.kind != "gate" and row.job not in told]
    if not rows:
        return []
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        reasons.setdefault(row.reason or "", []).append(row)
    parts = [
        f"{', '.join(dict.fromkeys(r.name for r in own[:MOST_NAMED]))} ({reason})" for reason, own in reasons.items()
    ]
    more = f", and {len(parts) - MOST_NAMED} more reasons" if len(parts) > MOST_NAMED else ""
    count = "One row was" if len(rows) == 1 else f"{len(rows)} rows were"
    sentence = f"{count} asked for and not had: {'; '.join(parts[:MOST_NAMED])}{more}."
    return [warned("rows not had", Level.MOVED, sentence, job=rows[0].job)]


def moved(night: Night) -> list[Finding]:
    """What is certainly slower, lost or faster since the night before, the largest named."""
    since = night.summary["since"]
    if since["previous"] is None:
        return []
    by_word = {word: [c for c in since["changes"] if c["verdict"]["word"] == word] for word in WORST_FIRST}
    counts = [f"{len(by_word[word])} {word}" for word in ("slower", "missing", "faster") if by_word[word]]
    if not counts:
        n_same, n_unsure = len(by_word["same"]), len(by_word["unsure"])
        told = f"Since {since['previous']} nothing certainly moved; numbers: {n_same} the same, {n_unsure} unsure."
        return [Finding("moved numbers", Level.TOLD, told, section="since")]
    largest = "; ".join(_change(c) for word in ("slower", "faster") for c in by_word[word][:1])
    sentence = f"Since {since['previous']}: {', '.join(counts)}{f'; {largest}' if largest else ''}."
    if not by_word["slower"] and not by_word["missing"]:
        return [Finding("moved numbers", Level.TOLD, sentence, section="since")]
    return [warned("moved numbers", Level.MOVED, sentence, section="since")]


def _change(change: Mapping[str, Any]) -> str:
    where = f"{change['notebook']} {change['row']} {change['metric']}"
    return f"most {change['verdict']['word']} is {where}, {percent(change['verdict']['ratio'])}"
