"""What failed, could not be judged, did not finish or moved, of whatever no other rule has told already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.figures import shown
from lab.page.findings.finding import Finding, Level, Night, warned
from lab.page.findings.remedies import Remedy, remedy_of
from lab.rows.store import Row
from lab.rows.values import percent
from lab.rows.verdict import WORST_FIRST

MOST_NAMED = 3  # gates, reasons or numbers in one sentence
MOST_DETAIL = 60  # characters of a gate's detail; longer ones stand in the table of gates


def failed(night: Night, told: frozenset[tuple[str, str]]) -> list[Finding]:
    """Failed gates that no other finding tells, those of one remedy together."""
    groups = _by_remedy([gate for gate in night.gates("fail") if (gate["job"], gate["name"]) not in told])
    found = []
    for remedy, gates in groups.items():
        jobs = ", ".join(dict.fromkeys(gate["job"] for gate in gates if gate["job"]))
        words = "; ".join(_gate(gate) for gate in gates[:MOST_NAMED])
        more = f"; and {len(gates) - MOST_NAMED} more" if len(gates) > MOST_NAMED else ""
        count = "A gate fails" if len(gates) == 1 else f"{len(gates)} gates fail"
        short = gates[0]["name"] if len(gates) == 1 else f"{len(gates)} gates{f' of {jobs}' if jobs else ''}"
        sentence = f"{count}{f' ({jobs})' if jobs else ''}: {words}{more}."
        found.append(
            Finding("failed gate", Level.FAILED, sentence, gates[0]["job"], short=f"{short} failed", remedy=remedy)
        )
    return found


def _gate(gate: Mapping[str, Any]) -> str:
    detail = f", {gate['detail']}" if gate.get("detail") and len(gate["detail"]) <= MOST_DETAIL else ""
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
    """Jobs that did not come to their end."""
    jobs = [job for job in night.summary["jobs"] if job["status"] != "finished"]
    return [
        warned(
            "unfinished job", Level.NOT_JUDGED,
            f"{job['id']} did not finish ({job['status']}): {str(job.get('error') or 'no reason was left')[:200]}.",
            job=job["id"], short=f"{job['id']} did not finish",
        )
        for job in jobs
    ]  # fmt: skip


def not_had(night: Night) -> list[Finding]:
    """Rows that were asked for and not had, gates apart; by reason."""
    rows = [row for row in night.rows if row.status == "missing" and row.kind != "gate"]
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
