"""The report draws the tokens of its prompts from rows alone, stays small, and names a row that it cannot draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nights_of_rows import GATE, page_of, row
from test_token_view import HOSTILE, seen, view

from lab.figures import MOST_VIEWS, TOKEN_VIEW
from lab.figures.token_view import MOST_LETTERS, MOST_PROPOSALS, MOST_TOKENS

pytestmark = pytest.mark.reference

MOST_BYTES = 3_000_000


def view_row(name: str, values: dict[str, Any]) -> Any:
    return row("31_acceptance", TOKEN_VIEW, name, values)


def test_a_page_shows_the_tokens_once_and_names_a_damaged_row(tmp_path: Path) -> None:
    damaged = view().row_values() | {"token.kind": ["odd"] * 8}
    rows = [
        row("31_acceptance", "gate", "g", GATE),
        view_row("spec-2/worst 1", view().row_values()),
        view_row("spec-2/best 1", damaged),
    ]
    _, page = page_of(tmp_path, rows)
    assert page.count('<div class="tokens"') == 1
    assert "Worst 1: 1.50 tokens a step" in page
    assert "the tokens of spec-2/best 1 cannot be shown: 8 validation errors" in page


def test_a_page_without_such_rows_has_no_tokens(tmp_path: Path) -> None:
    _, page = page_of(tmp_path, [row("31_acceptance", "gate", "g", GATE)])
    assert 'class="tokens"' not in page


def test_the_largest_views_of_hostile_text_stay_text_and_the_page_small(tmp_path: Path) -> None:
    text = (HOSTILE + "\u202e<" * MOST_LETTERS)[:MOST_LETTERS]
    token = seen(text, "near", rank=2, proposals=[(text, 0.1)] * MOST_PROPOSALS)
    large = view([token] * MOST_TOKENS, prompt=HOSTILE).row_values()
    rows = [row("31_acceptance", "gate", "g", GATE), *(view_row(f"v{i}", large) for i in range(MOST_VIEWS + 3))]
    _, page = page_of(tmp_path, rows)
    assert "<script" not in page
    assert page.count("<blockquote>") == MOST_VIEWS
    assert len(page.encode()) < MOST_BYTES
