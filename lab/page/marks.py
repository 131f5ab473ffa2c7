"""How words, moments, numbers and series stand on a page: what its templates call."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from markupsafe import Markup, escape

from lab.figures import shown
from lab.rows.stored.moments import moment_of

# Words with a mark each, so that colour is never the only carrier.
MARKS = {
    "pass": "✓",
    "passed": "✓",
    "finished": "✓",
    "fail": "✗",
    "failed": "✗",
    "gate failed": "✗",
    "raised": "✗",
    "died": "✗",
    "timeout": "✗",
    "unusable": "✗",
    "missing": "∅",
    "gate not judged": "∅",
    "incomplete": "∅",
    "not judged": "∅",
    "not run": "∅",
    "undecided": "?",
    "unsure": "?",
    "faster": "▲",
    "slower": "▼",
    "same": "=",
}
TONES = {"✓": "good", "✗": "bad", "∅": "lost", "?": "open", "▲": "good", "▼": "bad", "=": "calm"}


def mark(word: str) -> Markup:
    """A word with its mark and tone: `✓ pass`."""
    sign = MARKS.get(word, "·")
    tone = TONES.get(sign, "calm")
    return Markup('<span class="word {}"><span class="sign" aria-hidden="true">{}</span> {}</span>').format(
        tone, sign, word
    )


# Tags that act: they run, load, send, or lead away by themselves.
_ACTS = re.compile(r"<(?=/?(?:script|meta|base|form|iframe|frame|object|embed|link|applet|portal)\b)", re.IGNORECASE)


def still(html: str) -> Markup:
    """What a run stored, to be shown and never to act: such tags become text.

    A run may come from elsewhere. The page's own content policy forbids scripts, handlers, frames and anything from
    outside as well; what it cannot forbid is a page that leads away (`<meta http-equiv="refresh">`).
    """
    return Markup(_ACTS.sub("&lt;", html))


def coded(text: str) -> Markup:
    """Plain text with what stands in backticks as code."""
    parts = text.split("`")
    made = [Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)]
    return Markup("").join(made)


def moment(at: str | datetime) -> str:
    """A moment, ISO text or not, for people: `21 November 2026, 10:15 UTC`."""
    at = moment_of(at) if isinstance(at, str) else at
    return f"{at.day} {at:%B %Y, %H:%M} UTC"


def is_numeric(text: str) -> bool:
    """Whether a cell's text is a number, and so belongs to the right."""
    try:
        float(text)
    except ValueError:
        return False
    return True


SPARK_WIDTH, SPARK_HEIGHT, SPARK_ROOM = 160, 28, 3  # of a series in a table, pixels


def sparkline(series: dict[str, Any]) -> Markup:
    """A series over the nights as one small line, its steps as upright marks, with its words for those who hear it."""
    values = [float(value) for value in series["values"]]
    low, high = min(values), max(values)
    across = (SPARK_WIDTH - 2 * SPARK_ROOM) / max(len(values) - 1, 1)
    up = (SPARK_HEIGHT - 2 * SPARK_ROOM) / (high - low or 1.0)
    points = [(SPARK_ROOM + i * across, SPARK_HEIGHT - SPARK_ROOM - (v - low) * up) for i, v in enumerate(values)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = [SPARK_ROOM + (step["at"] - 0.5) * across for step in series["steps"]]
    uprights = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{SPARK_HEIGHT}" class="step"/>' for x in marks)
    words = f"{len(values)} nights, from {shown(values[0])} to {shown(values[-1])}, {len(marks)} steps"
    end = f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="2.5"/>'
    return Markup(
        f'<svg class="spark" role="img" aria-label="{words}" width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}" '
        f'viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}">{uprights}<polyline points="{line}"/>{end}</svg>'
    )
