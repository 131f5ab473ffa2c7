"""Every turn of prompts that have several: each asked after the model's own greedy answers to those before it.

Published acceptance on MT-bench and Spec-Bench is over all turns. A draft changes no greedy token, so the answers are
those of plain decoding, given once; every depth and shape is then measured on the very same questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3core.config import GenerationConfig
from eagle3core.request import Response, without_errors
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt, next_turn
from lab.parity.recording import PairUnderTest

WORDS = {
    "single": "",
    "first": " First turns alone, of prompts that have several.",
    "all": " All turns, the later ones after the model's own answers.",
}


@dataclass(frozen=True)
class AskedTurns:
    """Prompts of all turns.

    Attributes:
        prompts: the first turns in their order, then the second ones, and so on.
        n_answers, n_cut_answers: answers that a later turn follows, and those among them that reached the most tokens.
        n_cut_prompts: later turns that keep their last tokens alone.
        source: in words.
    """

    prompts: list[Prompt]
    n_answers: int
    n_cut_answers: int
    n_cut_prompts: int
    max_new_tokens: int

    @property
    def source(self) -> str:
        """What is measured, in words."""
        n_turns = max(prompt.turn for prompt in self.prompts)
        if n_turns == 1:
            return "All turns: no prompt has more than one."
        cut = f", {self.n_cut_answers} of them cut at {self.max_new_tokens} tokens" if self.n_cut_answers else ""
        short = f"; {self.n_cut_prompts} of the later ones keep their last tokens alone" if self.n_cut_prompts else ""
        return (
            f"All turns: {len(self.prompts)} questions of up to {n_turns} turns, the later ones after "
            f"{self.n_answers} answers of the model's own{cut}{short}."
        )


def which_turns(prompts: Sequence[Prompt]) -> str:
    """What figures of these prompts are of: "all" turns, "first" turns alone, or "single" where none has more."""
    if any(prompt.turn > 1 for prompt in prompts):
        return "all"
    return "first" if any(prompt.later for prompt in prompts) else "single"


def ask_all_turns(
    target: str | Path,
    draft: str | Path,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
    dtype: str = "float32",
    device: str = "auto",
    batch: int = 8,
    chat_template: str = "",
) -> AskedTurns:
    """The prompts and their later turns, the answers between them given by the engine without a draft.

    Args:
        target, draft: checkpoint directories; the draft only names the pair.
        prompts: first turns, as `prompts_for` gives them.
        max_new_tokens: of an answer; an end token ends it.
        max_prompt_tokens: a longer prompt keeps its last tokens.
        dtype, device: of the engine. batch: requests decoded together.
        chat_template: as for `lab.pairs.prompts.load_prompt_set`.

    Raises:
        ExperimentError: no prompt, or a template that refuses a conversation.
    """
    if not prompts:
        raise ExperimentError("no prompt", "at least one", "give some")
    asked, waiting = list(prompts), [prompt for prompt in prompts if prompt.later]
    n_answers = n_cut = n_short = 0
    pair = PairUnderTest(Path(target), Path(draft), dtype, device)
    tokenizer: Any = _tokenizer(target) if waiting else None
    while waiting:
        answers = plain_answers(pair, waiting, max_new_tokens, batch)
        texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
        n_answers, n_cut = n_answers + len(answers), n_cut + sum(answer.finish_reason == "length" for answer in answers)
        later = [
            next_turn(prompt, text, tokenizer, chat_template=chat_template)
            for prompt, text in zip(waiting, texts, strict=True)
        ]
        n_short += sum(len(prompt.ids) > max_prompt_tokens for prompt in later)
        later = [replace(prompt, ids=prompt.ids[-max_prompt_tokens:]) for prompt in later]
        asked += later
        waiting = [prompt for prompt in later if prompt.later]
    return AskedTurns(asked, n_answers, n_cut, n_short, max_new_tokens)


def plain_answers(pair: PairUnderTest, prompts: Sequence[Prompt], max_new_tokens: int, batch: int) -> list[Response]:
    """The target's greedy answers to prompts, without a draft; an end token ends one."""
    n_tokens = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    engine = pair.engine(0, n_tokens=n_tokens, max_batch_size=min(batch, len(prompts)))
    generation = GenerationConfig(max_new_tokens=max_new_tokens)
    return without_errors(engine.generate([list(prompt.ids) for prompt in prompts], generation))


def _tokenizer(target: str | Path) -> Any:
    from eagle3core.pipeline import load_tokenizer

    return load_tokenizer(target)
