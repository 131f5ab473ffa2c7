"""A continuation is drawn token by token from its row alone: coloured without a script, and nothing in it acts."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lab.acceptance.counts import ACCEPTED, DEEP, NEAR, OUTSIDE, REFUSED
from lab.acceptance.figures import RANK_STYLES
from lab.acceptance.token_views import KIND_OF
from lab.figures import MEANINGS, SERIES, TokenView, tokens_html
from lab.figures.token_view import KINDS, MOST_LETTERS, MOST_PROPOSALS, MOST_TOKENS, SeenToken, visible
from lab.rows.store import Row

pytestmark = pytest.mark.reference

HOSTILE = "</label><script>t='x'</script>"


def seen(text: str, kind: str, step: int | None = 1, position: int | None = 1, rank: int = 1, **more: Any) -> SeenToken:
    drafted = {} if kind in ("first", "bonus") else {"position": position, "rank": rank, "expected": rank}
    return SeenToken(text=text, kind=kind, step=step, **{**drafted, **more})


TOKENS = [
    seen("The", "first", None),
    seen(" cat", "accepted", proposals=[(" cat", 0.75), (" dog", 0.2)]),
    seen(" sat\n  ", "near", position=2, rank=2, proposals=[(" ran", 0.5), (" sat\n  ", 0.4)]),
    seen("⟨E2 80⟩", "outside", 2, rank=0, proposals=[(" x", 1.0)]),
    seen("a", "accepted", 3),
    seen("b", "deep", 3, 2, rank=9, expected=4),
    seen("c", "refused", 4),
    seen("d", "bonus", 5),
]


def view(tokens: list[SeenToken] = TOKENS, **changes: Any) -> TokenView:
    values: dict[str, Any] = {
        "place": "worst 1", "prompt": "Say it.\nNow", "category": "prose", "prompt_id": "p7", "k": 2,
        "tokens_a_step": 1.5, "n_steps": 5, "n_left_out": 3, "tokens": tokens,
    }  # fmt: skip
    return TokenView(**{**values, **changes})


class Seen(HTMLParser):
    """Tags with their attributes, and the text of every label in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.labels: list[str] = []
        self._in_label = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "label":
            self.labels.append("")
        self._in_label = tag == "label"

    def handle_endtag(self, tag: str) -> None:
        self._in_label = False

    def handle_data(self, data: str) -> None:
        if self._in_label:
            self.labels[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_a_view_comes_back_from_its_row_as_it_was() -> None:
    shared: dict[str, Any] = {"run": "r", "job": "j", "notebook": "n", "environment": "e", "recorded_at": None}
    row = Row(**shared, kind="token_view", name="v", values=view().row_values())
    assert TokenView.of_row(Row.model_validate_json(row.line()).values) == view()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"token.kind": ["no kind"] * len(TOKENS)}, "pattern"),
        ({"token.text": ["a"]}, "argument"),
        ({"token.step": None}, "without its lists"),
        ({"token.text": ["a" * (MOST_LETTERS + 1), *"bcdefgh"]}, "at most"),
        ({"token.proposals": [[["a", 0.1]] * (MOST_PROPOSALS + 1)] + [[]] * 7}, "at most"),
        ({"token.proposals": [[["a", 1.5]]] + [[]] * 7}, "less than or equal"),
        ({"k": None}, "k"),
    ],
)
def test_a_damaged_row_or_one_larger_than_a_view_may_be_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        TokenView.of_row(view().row_values() | change)
    with pytest.raises(ValueError, match=str(MOST_TOKENS)):
        view([TOKENS[0]] * (MOST_TOKENS + 1))


def test_each_cause_has_the_colour_that_the_rank_chart_gives_it() -> None:
    classes = {ACCEPTED: "accepted", **KIND_OF}
    assert set(classes) == {ACCEPTED, OUTSIDE, NEAR, DEEP, REFUSED}
    markup = tokens_html([view()], "job")
    for cause, kind in classes.items():
        meaning = KINDS[kind].meaning
        assert meaning == RANK_STYLES[cause]
        index = MEANINGS[meaning]
        rule = re.search(rf"\.tokens \.t-{kind}\{{(.*?)\}}", markup)
        assert rule
        assert rule.group(1).count(f"var(--series-{index + 1},{SERIES[index][0]})") == 2
    assert len({look.line for look in KINDS.values()}) == len(KINDS), "hue is never the only carrier"


def test_every_token_is_a_labelled_button_whose_details_are_beside_it() -> None:
    markup = tokens_html([view(), view(place="best 1")], "a job/1")
    page = Seen(markup)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    buttons = page.all("input")
    assert len(buttons) == 2 * len(TOKENS)
    assert [label["for"] for label in page.all("label")] == [button["id"] for button in buttons]
    assert {button["aria-describedby"] for button in buttons} <= set(ids)
    assert len({button["name"] for button in buttons}) == 2, "arrow keys walk within one prompt"
    assert [label["class"] for label in page.all("label")][: len(TOKENS)] == [f"t-{token.kind}" for token in TOKENS]
    assert page.labels[:3] == ["The", " cat", " sat↵\n  "]
    assert len(page.all("i")) == 2 * 5, "one mark a step"
    assert [("open" in attributes) for attributes in page.all("details")] == [True, False]


def test_details_say_what_was_drafted_what_stood_and_where_the_reference_differs() -> None:
    markup = tokens_html([view()], "job")
    assert "<b>Step 1, position 1: accepted.</b>" in markup
    assert '<li style="--p:75%"><code>✓ ␣cat</code> 75.0%</li><li style="--p:20%"><code>  ␣dog</code> 20.0%' in markup
    assert '<code>✗ ␣ran</code> 50.0%</li><li style="--p:40%"><code>✓ ␣sat↵␣␣</code>' in markup
    assert "<code>⟨E2 80⟩</code> cannot be drafted." in markup
    assert "has rank 9 in the draft's order. <b>The reference has it at rank 4.</b>" in markup
    assert "All 2 drafts were accepted" in markup
    assert "Worst 1: 1.50 tokens a step over 5 steps (prose · p7)" in markup
    assert "3 more tokens are not shown." in markup
    assert tokens_html([], "job") == ""


def test_what_nobody_sees_is_made_visible() -> None:
    assert visible("\n\t\r", alone=False) == "↵⇥␍"
    assert visible("   ", alone=False) == "␣␣␣"
    assert visible(" a b ", alone=True) == "␣a b␣"
    assert visible(" a b ", alone=False) == " a b "
    assert visible("a\u202eb\x00\u200b", alone=False) == "a⟨U+202E⟩b⟨U+0000⟩⟨U+200B⟩"
    assert visible("", alone=True) == "⟨empty⟩"


def test_hostile_text_stays_text() -> None:
    token = seen(HOSTILE, "near", rank=2, proposals=[(HOSTILE, 0.5), ('" onfocus="x', 0.1)])
    hostile = view([token], prompt=HOSTILE, category=HOSTILE, prompt_id='"><script>', place="<script>")
    markup = tokens_html([hostile], '"><script>')
    assert "<script" not in markup
    page = Seen(markup)
    assert page.labels == [HOSTILE]
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]


@pytest.mark.slow
def test_a_browser_shows_the_details_of_the_chosen_token_alone(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    script = (
        "<script>const more=[...document.querySelectorAll('label+.t-more')];"
        "const shown=()=>more.filter(e=>getComputedStyle(e).display!='none').map(e=>e.id).join();"
        "const a=shown();document.querySelectorAll('label')[2].click();const b=shown();"
        "const style=getComputedStyle(document.querySelector('label.t-outside'));"
        "document.title=[a,b,style.borderBottomStyle,style.borderBottomColor].join('|')</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>t</title>{tokens_html([view()], 'job')}{script}")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = dom[dom.index("<title>") + 7 :].split("</title>")[0]
    assert title == "|job-t0-2d|double|rgb(109, 90, 0)"
