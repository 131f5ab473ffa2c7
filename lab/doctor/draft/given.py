"""From what a command or a notebook was given to a case: the pair, and prompts that its target can read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lab.doctor.draft.case import Case
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt, prompts_for, prompts_from_ids, uneven_prompts
from lab.pairs.random_ids import has_tokenizer
from lab.parity.faults import FAULTS, RUN_FAULTS
from lab.parity.inputs import chosen_pair

RANDOM_LENGTHS = (64, 23, 130, 65, 200, 40)


def case_of(
    target: str = "",
    draft: str = "",
    prompts: str = "",
    *,
    k: int = 3,
    n_prompts: int = 32,
    max_prompt_tokens: int = 256,
    max_new_tokens: int = 64,
    device: str = "auto",
    fast: bool = False,
    fault: str = "",
    norm_output: Literal["feedback", "head", ""] | None = None,
    speed_rows: Path | str | None = None,
) -> tuple[Case, str]:
    """The case that was asked for, and in words where its prompts come from.

    Args:
        target, draft: directories; both empty: the shipped pair.
        prompts: a file; empty takes the shipped pair's, and random ids for a target without a tokenizer.
        fast: no prompts at all.
        norm_output, speed_rows: empty is none.
        The rest: as of `Case`.

    Raises:
        ExperimentError: no such pair, bug or prompts.
    """
    if fault and fault not in {**FAULTS, **RUN_FAULTS}:
        known = ", ".join(sorted({**FAULTS, **RUN_FAULTS}))
        raise ExperimentError(f"fault is {fault!r}", f"one of {known}", "name one, or leave it empty")
    pair = chosen_pair(target, draft)
    chosen, source = list[Prompt](), "no prompts: the files alone"
    if not fast and not prompts and not has_tokenizer(pair[0]):
        ids = [drawn[:max_prompt_tokens] for drawn in uneven_prompts(pair[0], n_prompts, lengths=RANDOM_LENGTHS)]
        chosen, source = prompts_from_ids(ids, "random ids"), f"{len(ids)} prompts of random ids: no tokenizer is there"
    elif not fast:
        chosen, source = prompts_for(pair[0], prompts, limit=n_prompts, max_tokens=max_prompt_tokens)
    case = Case(
        *pair, tuple(chosen), k=k, max_new_tokens=max_new_tokens, device=device, fault=fault,
        norm_output=norm_output or None, speed_rows=Path(speed_rows) if speed_rows else None,
    )  # fmt: skip
    return case, source
