"""A continuation token by token, as it is stored: what became of each drafted position, and what the draft proposed.

A view is bounded, so that a row holds it and a page with some of them stays small; it is drawn by
`lab.figures.token_markup` from the row alone.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TOKEN_VIEW = "token_view"  # kind of the rows
MOST_VIEWS, MOST_TOKENS, MOST_PROPOSALS = 6, 128, 5
MOST_LETTERS, MOST_PROMPT_LETTERS = 40, 160  # of a token's text; of a prompt's, of which the last ones are kept


@dataclass(frozen=True)
class Kind:
    """What a token can be.

    Attributes:
        label: its name. words: what it means.
        meaning: of its colour (`MEANINGS`); None: it was not drafted and has none.
        line: CSS style of the line beneath, so that hue is never the only carrier.
    """

    label: str
    words: str
    meaning: str | None
    line: str


KINDS = {
    "accepted": Kind("accepted", "the draft's first choice was the target's", "ours", "2px solid"),
    "near": Kind("rejected, rank 2 to 4", "where the draft's order has the target's token", "expected", "2px dashed"),
    "deep": Kind("rejected, rank 5 or deeper", "the same, further down", "other", "3px dotted"),
    "outside": Kind("outside the draft vocabulary", "rejected, since no draft could be right", "plain", "4px double"),
    "refused": Kind("rejected at rank 1", "a bug", "bad", "5px solid"),
    "bonus": Kind("bonus", "the target's own, after a step whose drafts were all accepted", None, "1px solid"),
    "first": Kind("before any draft", "of the pass over the prompt", None, "0 none"),
}

Text = Annotated[str, Field(max_length=MOST_LETTERS)]
Share = Annotated[float, Field(ge=0, le=1)]
Place = Annotated[int, Field(ge=0)]


class SeenToken(BaseModel):
    """One token of a continuation.

    Attributes:
        text: as it joins the text before it; a part of a character as its bytes.
        kind: of `KINDS`.
        step, position: which verify step gave it, and which draft of it stood there, from 1; None without one.
        rank, expected: of the token in the engine's and in the reference's draft order, from 1; 0 outside the draft
            vocabulary; None where nothing was drafted.
        proposals: the reference draft's likeliest tokens there and their probabilities, likeliest first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Text
    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    step: Place | None = None
    position: Place | None = None
    rank: Place | None = None
    expected: Place | None = None
    proposals: Annotated[list[tuple[Text, Share]], Field(max_length=MOST_PROPOSALS)] = []


class TokenView(BaseModel):
    """One prompt's continuation.

    Attributes:
        place: which of the prompts it is ("worst 1", "best 2").
        prompt: the last letters of its text. category, prompt_id: its own.
        k: drafts a step. tokens_a_step: its acceptance length over complete steps. n_steps: how many there were.
        tokens: the first ones. n_left_out: how many followed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    place: Annotated[str, Field(max_length=20)]
    prompt: Annotated[str, Field(max_length=MOST_PROMPT_LETTERS)]
    category: Annotated[str, Field(max_length=200)]
    prompt_id: Annotated[str, Field(max_length=200)]
    k: Place
    tokens_a_step: float
    n_steps: Place
    n_left_out: Place
    tokens: Annotated[list[SeenToken], Field(max_length=MOST_TOKENS)]

    def counts(self) -> dict[str, int]:
        """Tokens by kind, in the order of `KINDS`; kinds without any are left out."""
        kinds = [token.kind for token in self.tokens]
        return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}

    def row_values(self) -> dict[str, Any]:
        """The view as the values of a row: one list for each property of its tokens, flat as rows are."""
        values = self.model_dump(exclude={"tokens"})
        columns = {name: [getattr(token, name) for token in self.tokens] for name in SeenToken.model_fields}
        return values | {f"token.{name}": column for name, column in columns.items()}

    @classmethod
    def of_row(cls, values: Mapping[str, Any]) -> TokenView:
        """The reverse of `row_values`.

        Raises:
            ValueError: the values are no view, are longer than one may be, or their lists differ in length.
        """
        columns = [values.get(f"token.{name}") for name in SeenToken.model_fields]
        if not all(isinstance(column, list) for column in columns):
            raise ValueError("a token view without its lists of tokens")
        made = [dict(zip(SeenToken.model_fields, each, strict=True)) for each in zip(*columns, strict=True)]
        return cls.model_validate({name: values.get(name) for name in cls.model_fields} | {"tokens": made})


def visible(text: str, *, alone: bool) -> str:
    """`text` with what nobody sees made visible: ends of line, tabs, controls, marks that turn the direction of text.

    Args:
        alone: spaces at its ends are shown too, since no text stands beside it.
    """
    if not text:
        return "⟨empty⟩"
    if alone or not text.strip(" "):
        head, tail = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
        text = "␣" * len(text) if head == len(text) else "␣" * head + text[head : len(text) - tail] + "␣" * tail
    return "".join(_VISIBLE.get(letter) or _letter(letter) for letter in text)


_VISIBLE = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def _letter(letter: str) -> str:
    """A control or format character, or one that is no letter at all, by its number."""
    unseen = unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return f"⟨U+{ord(letter):04X}⟩" if unseen else letter
