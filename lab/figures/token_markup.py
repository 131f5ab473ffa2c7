"""Token views as HTML that needs no script: colours are styles, and a token's details are shown by its own button.

Every token is a radio button of its prompt's group, so that one press of Tab reaches a prompt, arrow keys walk from
token to token, a tap holds the details and a pointer shows them in passing. The markup brings its style along, since a
notebook has none of a page's, and takes the page's colours where there are some.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from lab.figures.looks import MEANINGS, SERIES
from lab.figures.token_view import KINDS, SeenToken, TokenView, visible

_PAPER, _INK = "var(--raised,var(--jp-layout-color1,Canvas))", "var(--ink,var(--jp-content-font-color1,CanvasText))"
_RULE = "var(--rule,var(--jp-border-color2,#8888))"
_STYLE = (
    ".tokens h3{margin:1.2rem 0 .3rem}.tokens p{margin:.4rem 0;max-width:44rem}"
    ".tokens ul{list-style:none;padding:0;margin:.4rem 0;font-size:.9rem;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem}"
    ".tokens .t-counts{font-size:.9rem;line-height:1.9}"
    ".tokens details{margin:.5rem 0}.tokens summary{padding:.3rem 0}"
    ".tokens blockquote{margin:.2rem 0 .5rem;padding:0 0 0 .8rem;font-size:.85rem;white-space:pre-wrap;"
    f"overflow-wrap:anywhere;border-left:3px solid {_RULE};max-width:44rem}}"
    ".t-text{position:relative;min-height:12.5rem;padding:0 21rem 0 0;line-height:2;white-space:pre-wrap;"
    "overflow-wrap:anywhere;font-family:var(--mono,ui-monospace,monospace);font-size:.88rem;margin:0 0 .6rem}"
    ".t-text input{position:absolute;opacity:0;margin:0;pointer-events:none}"
    ".t-text label{cursor:pointer;margin:0 1px}"
    # The step's mark is drawn, and no letter of the text, so that a copied text is the text.
    ".t-text i{display:inline-block;height:1.5em;margin:0 .2em;vertical-align:middle;border-left:2px solid;opacity:.75}"
    ".t-text input:checked+label,.t-text input:focus-visible+label{outline:2px solid currentColor;outline-offset:1px}"
    ".t-more{box-sizing:border-box;position:absolute;right:0;top:0;width:20rem;min-height:12.3rem;"
    "padding:.5rem .8rem;white-space:normal;"
    f"background:{_PAPER};color:{_INK};border:1px solid {_RULE};border-radius:.35rem;"
    "line-height:1.4;font-family:var(--sans,system-ui,sans-serif);font-size:.85rem}"
    "label+.t-more{display:none}.t-text input:checked+label+.t-more,.t-text input:focus+label+.t-more"
    "{display:block;z-index:2}@media (hover:hover){.t-text label:hover+.t-more{display:block;z-index:3}}"
    ".t-more ol{margin:.3rem 0 0;padding:0;list-style:none;font-variant-numeric:tabular-nums}"
    ".t-more li{display:flex;justify-content:space-between;gap:1rem;margin:0 0 2px;padding:0 .3rem;"
    "white-space:pre-wrap;background:linear-gradient(to right,"
    "color-mix(in srgb,currentColor 16%,transparent) var(--p),transparent 0)}"
    ".t-more code{background:none}"
    "@media (max-width:48rem){.t-text{padding:0 0 13.5rem}.t-more{top:auto;bottom:0;left:0;width:auto}}"
    "@media print{.t-text{padding:0;min-height:0}.t-text .t-more{display:none!important}}"
)


def tokens_html(views: Sequence[TokenView], prefix: str) -> str:
    """Views one below the other, the first one open, after a legend; nothing where there are none.

    Args:
        prefix: begins every id, so that several of these may stand on one page.
    """
    if not views:
        return ""
    stem = html.escape(re.sub(r"[^A-Za-z0-9_-]+", "-", prefix), quote=True)
    seen = {kind for view in views for kind in view.counts()}
    legend = "".join(
        f'<li><span class="t-{kind}">{html.escape(look.label)}</span>: {html.escape(look.words)}</li>'
        for kind, look in KINDS.items()
        if kind in seen
    )
    parts = "".join(_view(view, f"{stem}-t{i}", is_open=i == 0) for i, view in enumerate(views))
    return (
        f'<div class="tokens" id="{stem}-tokens"><style>{_STYLE}{_colours()}</style>'
        f"<h3>What became of each token{': the worst prompts first, then the best' if len(views) > 1 else ''}</h3>"
        "<p>An upright mark begins a verify step. Point at a token, tap it, or reach it with Tab and the arrow keys: "
        "what the draft proposed at its place is shown. Probabilities are those of the draft rebuilt from Hugging "
        "Face's modules, led along the same text; ranks count from 1.</p>"
        f"<ul>{legend}</ul>{parts}</div>"
    )


def _colours() -> str:
    """One rule a kind: a tint of its meaning's colour, and a line beneath of its own style."""
    rules = []
    for kind, look in KINDS.items():
        if look.meaning is None:
            rules.append(f".tokens .t-{kind}{{border-bottom:{look.line} currentColor}}")
            continue
        index = MEANINGS[look.meaning]
        colour = f"var(--series-{index + 1},{SERIES[index][0]})"
        rules.append(
            f".tokens .t-{kind}{{border-bottom:{look.line} {colour};"
            f"background:color-mix(in srgb,{colour} 20%,transparent)}}"
        )
    return "".join(rules)


def _view(view: TokenView, stem: str, *, is_open: bool) -> str:
    counts = " ".join(f'<span class="t-{kind}">{n} {KINDS[kind].label}</span>' for kind, n in view.counts().items())
    about = " · ".join(part for part in (view.category, view.prompt_id) if part)
    title = f"{view.place.capitalize()}: {view.tokens_a_step:.2f} tokens a step over {view.n_steps} steps"
    more = f"<p>{view.n_left_out} more tokens are not shown.</p>" if view.n_left_out else ""
    starts = _starts(view.tokens)
    tokens = "".join(_token(token, stem, i, k=view.k, starts=starts[i]) for i, token in enumerate(view.tokens))
    prompt = "\n".join(visible(line, alone=False) if line else "" for line in view.prompt.strip().split("\n"))
    return (
        f"<details{' open' if is_open else ''}><summary>{html.escape(title)}"
        f"{f' ({html.escape(about)})' if about else ''}</summary>"
        f"<blockquote>{html.escape(prompt)}</blockquote><p class='t-counts'>{counts}</p>"
        f'<div class="t-text" role="group" aria-label="{html.escape(f"Continuation of {view.place}", quote=True)}">'
        '<div class="t-more"><b>No token chosen.</b> What the draft proposed is shown here.</div>'
        f"{tokens}</div>{more}</details>"
    )


def _starts(tokens: Sequence[SeenToken]) -> list[bool]:
    """Whether each is the first token of its step."""
    return [token.step is not None and (i == 0 or tokens[i - 1].step != token.step) for i, token in enumerate(tokens)]


def _token(token: SeenToken, stem: str, i: int, *, k: int, starts: bool) -> str:
    return (
        f"{'<i></i>' if starts else ''}"
        f'<input type="radio" name="{stem}" id="{stem}-{i}" aria-describedby="{stem}-{i}d">'
        f'<label for="{stem}-{i}" class="t-{token.kind}">{_in_text(token.text)}</label>'
        f'<div class="t-more" id="{stem}-{i}d">{_details(token, k)}</div>'
    )


def _in_text(text: str) -> str:
    """A token's text where others stand beside it: an end of line is marked, and ends the line."""
    return html.escape(visible(text, alone=False)).replace("↵", "↵\n")


def _details(token: SeenToken, k: int) -> str:
    """What a token's place was, in words, then the proposals."""
    own = f"<code>{html.escape(visible(token.text, alone=True))}</code>"
    if token.kind == "first":
        return f"<b>Before any step.</b> The prompt's own pass gave {own}."
    if token.kind == "bonus":
        return f"<b>Step {token.step}: bonus.</b> All {k} drafts were accepted, and the target added {own}."
    head = f"<b>Step {token.step}, position {token.position}: {KINDS[token.kind].label}.</b> "
    place = f"has rank {token.rank} in the draft's order." if token.rank else "cannot be drafted."
    rank = f"The target's token {own} {place}"
    if token.expected != token.rank:
        known = f"at rank {token.expected}" if token.expected else "outside the draft vocabulary"
        rank += f" <b>The reference has it {known}.</b>"
    lines: list[str] = []
    for at, (text, share) in enumerate(token.proposals, start=1):
        sign = "✓" if at == token.expected else "✗" if at == 1 else " "
        shown = html.escape(visible(text, alone=True))
        lines.append(f'<li style="--p:{share:.0%}"><code>{sign} {shown}</code> {share:.1%}</li>')
    return f"{head}{rank}<ol>{''.join(lines)}</ol>"
