"""Two runs side by side in words: lines for a terminal, tables for a pull request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lab.rows.history import Change, compare_runs
from lab.rows.verdict import WORST_FIRST


def comparison(before: Path, after: Path, *, markdown: bool = False) -> tuple[str, bool]:
    """The comparison of two runs as text, worst first, and whether anything is slower.

    Args:
        markdown: as tables for a pull request, in place of lines.

    Raises:
        NotComparable: they ran on machines with different fingerprints.
    """
    compared = compare_runs(before, after)
    found, moved = worst_first(compared.changes), compared.moved
    any_slower = any(change.verdict.word == "slower" for change in found)
    if markdown:
        return as_markdown(before.name, after.name, moved, found), any_slower
    lines = [f"{before.name} -> {after.name}", *moved, *listed(found)]
    if not found:
        lines.append("the two runs have no comparable number in common")
    return "\n".join(lines), any_slower


def worst_first(changes: Sequence[Change]) -> list[Change]:
    """Slower, missing, unsure, faster, same; in the order given within a word."""
    return sorted(changes, key=lambda change: WORST_FIRST.index(change.verdict.word))


def listed(changes: Sequence[Change]) -> list[str]:
    """A line a change, worst first."""
    lines = []
    for change in worst_first(changes):
        head = f"{change.verdict.word:8}{change.move:>8}  {change.notebook} {change.what}"
        lines.append(f"{head}: {change.before} -> {change.after} ({change.verdict.reason})")
    return lines


def as_markdown(before: str, after: str, moved: Sequence[str], changes: Sequence[Change]) -> str:
    """The comparison for a pull request: what moved in a table, the rest folded away."""
    counts: Counter[str] = Counter(change.verdict.word for change in changes)
    total = ", ".join(f"{counts[word]} {word}" for word in WORST_FIRST if counts[word]) or "nothing in common"
    lines = [f"### `{before}` → `{after}`: {total}", "", *(f"- {sentence}" for sentence in moved)]
    lines += [""] if moved else []
    for words, title in ((("slower", "missing", "faster"), ""), (("unsure",), "unsure"), (("same",), "same")):
        own = [change for change in changes if change.verdict.word in words]
        if own and title:
            lines += ["", f"<details><summary>{len(own)} {title}</summary>", ""]
        if own:
            lines += ["| verdict | change | what | before | after | because |", "|---|---:|---|---:|---:|---|"]
            lines += [_markdown_row(change) for change in own]
        if own and title:
            lines += ["", "</details>"]
    return "\n".join(lines)


def _markdown_row(change: Change) -> str:
    before, after = ("" if value is None else f"{value:.5g}" for value in (change.before, change.after))
    cells = (change.verdict.word, change.move, f"{change.notebook} {change.what}", before, after, change.verdict.reason)
    return "| " + " | ".join(cell.replace("|", "\\|").strip() for cell in cells) + " |"
