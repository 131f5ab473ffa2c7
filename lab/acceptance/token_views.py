"""The tokens of the worst and the best prompts, with what the draft proposed at each place.

The engine keeps the rank of the target's token and no probabilities, so the few prompts shown are walked once more by
the draft that is rebuilt from Hugging Face's modules (`lab.acceptance.reference`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3core.metrics import StepRecord
from eagle3core.pipeline import load_tokenizer
from eagle3core.request import Response
from lab.acceptance.counts import DEEP, NEAR, OUTSIDE, REFUSED, DepthAcceptance, cause_of
from lab.acceptance.reference import DraftWalk, rank_of
from lab.figures import tokens_html
from lab.figures.token_view import (
    MOST_LETTERS,
    MOST_PROMPT_LETTERS,
    MOST_PROPOSALS,
    MOST_TOKENS,
    SeenToken,
    TokenView,
)
from lab.pairs.prompts import Prompt
from lab.pairs.random_ids import has_tokenizer
from lab.parity.recording import PairUnderTest
from lab.parity.replay import Reference
from lab.widgets import Control, Picker

KIND_OF = {OUTSIDE: "outside", NEAR: "near", DEEP: "deep", REFUSED: "refused"}


class TokenViewer:
    """Views of single prompts, each walked when it is asked for.

    Args:
        target, draft: checkpoint directories.
        prompts: as they were given to the engine that `depth` was counted of.
        dtype, device: of the reference. norm_output: as of `PairUnderTest`.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path,
        prompts: Sequence[Prompt],
        depth: DepthAcceptance,
        *,
        dtype: str = "float32",
        device: str = "auto",
        norm_output: str = "",
    ) -> None:
        self._pair = PairUnderTest(Path(target), Path(draft), dtype, device, norm_output=norm_output)
        self._prompts, self._depth = prompts, depth
        self._pieces = Pieces(load_tokenizer(target) if has_tokenizer(Path(target)) else None)
        lengths = [(length, i) for i, length in enumerate(depth.per_prompt) if length is not None]
        self._named = {f"{at}. {self._label(i)}": i for at, (_, i) in enumerate(sorted(lengths), start=1)}

    @cached_property
    def _reference(self) -> Reference:
        return Reference(self._pair, self._pair.torch_dtype)

    def extremes(self, n: int) -> list[TokenView]:
        """Views of the `n` prompts of shortest acceptance length and the `n` of longest, each prompt once."""
        return [self._view(place, i) for place, i in extremes(self._depth.per_prompt, n)]

    def controls(self) -> dict[str, Control]:
        """The prompts that may be seen, the shortest acceptance length first."""
        names = tuple(self._named)
        return {"prompt": Picker("prompt", names, names[0])} if names else {}

    def markup(self, *, prompt: str) -> str:
        """A prompt's tokens as HTML.

        Args:
            prompt: one of `controls`.
        """
        place = prompt.partition(".")[0]
        view = self._view(f"prompt {place} of {len(self._named)}", self._named[prompt])
        return tokens_html([view], f"prompt-{place}")

    def _label(self, i: int) -> str:
        about = " ".join(part for part in (self._prompts[i].category, self._prompts[i].id) if part)
        return f"{self._depth.per_prompt[i]:.2f} tokens a step{f', {about}' if about else ''}"

    def _view(self, place: str, i: int) -> TokenView:
        prompt, response, length = self._prompts[i], self._depth.responses[i], self._depth.per_prompt[i]
        assert length is not None, "a prompt without a complete step is neither worst nor best"
        tokens = _tokens(self._reference, self._pieces, prompt, response, self._depth.k)
        return TokenView(
            place=place,
            prompt=_end_of(prompt.text),
            category=prompt.category[:200],
            prompt_id=prompt.id[:200],
            k=self._depth.k,
            tokens_a_step=length,
            n_steps=sum(not step.cut for step in response.req_metrics.steps),
            n_left_out=len(response.token_ids) - len(tokens),
            tokens=tokens,
        )


def _end_of(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MOST_PROMPT_LETTERS else f"…{text[1 - MOST_PROMPT_LETTERS :]}"


def extremes(lengths: Sequence[float | None], n: int) -> list[tuple[str, int]]:
    """Names and places of the `n` shortest, shortest first, then of the `n` longest, longest first; each place once."""
    order = sorted((length, i) for i, length in enumerate(lengths) if length is not None)
    worst = order[: min(n, (len(order) + 1) // 2)]
    best = order[len(order) - min(n, len(order) - len(worst)) :][::-1]
    return [
        (f"{name} {number}", i)
        for name, part in (("worst", worst), ("best", best))
        for number, (_, i) in enumerate(part, start=1)
    ]


class Pieces:
    """Text of single tokens.

    Args:
        tokenizer: the target's; None: tokens are shown as their ids.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def of(self, token: int, before: int | None) -> str:
        """`token` as it joins the text that ends with `before`; a part of a character as its bytes."""
        if self._tokenizer is None:
            return f"#{token}"
        own = self._decoded(token)
        if "\ufffd" in own:
            own = bytes_of(str(self._tokenizer.convert_ids_to_tokens(token))) or own
        elif before is not None:  # tokenizers of words leave out a space that begins a text, and only there
            head, both = self._decoded(before), self._decoded(before, token)
            own = both[len(head) :] if both.startswith(head) else own
        return own if len(own) <= MOST_LETTERS else f"{own[: MOST_LETTERS - 1]}…"

    def _decoded(self, *tokens: int) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


def _letters_of_bytes() -> dict[str, int]:
    """Byte by the letter that stands for it in byte-level vocabularies: printable ones for themselves, the others from
    256 on. Source: GPT-2, openai/gpt-2, src/encoder.py."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _letters_of_bytes()


def bytes_of(entry: str) -> str:
    """The bytes of a vocabulary's entry, `⟨E2 80⟩`; empty where it is no row of bytes."""
    single = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", entry)
    if single:
        return f"⟨{single.group(1).upper()}⟩"
    known = [_BYTES.get(letter) for letter in entry]
    return f"⟨{' '.join(f'{byte:02X}' for byte in known if byte is not None)}⟩" if None not in known else ""


def _tokens(reference: Reference, pieces: Pieces, prompt: Prompt, response: Response, k: int) -> list[SeenToken]:
    """The continuation up to the last whole step that a view has room for."""
    walk, sequence = DraftWalk(reference, prompt, response, k), [*prompt.ids, *response.token_ids]
    records = response.req_metrics.steps
    n_first = records[0].start if records else len(response.token_ids)
    texts = [
        pieces.of(token, sequence[len(prompt.ids) + i - 1] if i or prompt.ids else None)
        for i, token in enumerate(response.token_ids[:MOST_TOKENS])
    ]
    tokens = [SeenToken(text=text, kind="first") for text in texts[:n_first]]
    for step, record in enumerate(records, start=1):
        if record.start + record.n_committed > MOST_TOKENS:
            break
        logits = walk.step(record)
        for level in range(record.n_committed):
            at = record.start + level
            if level == len(logits):
                tokens.append(SeenToken(text=texts[at], kind="bonus", step=step))
                continue
            before = sequence[len(prompt.ids) + at - 1]
            given = (reference.draft.target_ids, logits[level])
            tokens.append(
                SeenToken(
                    text=texts[at],
                    kind=kind_of(record, level),
                    step=step,
                    position=level + 1,
                    rank=_rank(record, level) + 1,
                    expected=rank_of(*given, response.token_ids[at]) + 1,
                    proposals=_proposals(*given, pieces, before),
                )
            )
    return tokens


def kind_of(record: StepRecord, level: int) -> str:
    """What became of the draft at a level, as `KINDS` names it."""
    return "accepted" if level < record.n_accepted else KIND_OF[cause_of(_rank(record, level))]


def _rank(record: StepRecord, level: int) -> int:
    assert record.ranks is not None, "steps without ranks cannot be counted, and so not be viewed"
    return record.ranks[level]


def _proposals(target_ids: Tensor, logits: Tensor, pieces: Pieces, before: int) -> list[tuple[str, float]]:
    top = logits.softmax(dim=-1).topk(min(MOST_PROPOSALS, len(logits)))
    ids = target_ids[top.indices].tolist()
    return [(pieces.of(int(i), before), float(p)) for i, p in zip(ids, top.values.tolist(), strict=True)]
