"""What a parity run is given: a pair, and prompts as token ids.

Parity does not care what a prompt says, so a target without a tokenizer gets seeded random ids; the report says so.
"""

from __future__ import annotations

from pathlib import Path

from lab.errors import ExperimentError
from lab.pairs.named import NAMES, named_pair
from lab.pairs.random_ids import PromptIds, has_tokenizer, random_prompts, range_of_lengths


def chosen_pair(target: str, draft: str) -> tuple[Path, Path]:
    """The named directories; or a pair by its name, given as `target` alone; with both empty the shipped pair.

    Raises:
        ExperimentError: only one was named, and it is no pair's name.
    """
    if bool(target) != bool(draft) and target not in NAMES:
        given, absent = ("target", "draft") if target else ("draft", "target")
        raise ExperimentError(
            f"{given} was given without {absent}",
            f"both, neither, or the name of a pair as target: {', '.join(NAMES)}",
            f"name {absent} as well",
        )
    if draft:
        return Path(target), Path(draft)
    pair = named_pair(target or "shipped")
    return pair.target, pair.draft


def prompt_ids(target: Path, prompts: str, *, n_prompts: int, max_tokens: int) -> PromptIds:
    """The first `n_prompts` prompts, each cut to its first `max_tokens` tokens.

    Args:
        target: directory whose tokenizer is used.
        prompts: a file as `lab.pairs.prompts` reads it; empty takes the held-out prompts of the shipped pair.
        n_prompts, max_tokens: at most so many, and so long.

    Raises:
        ExperimentError: a count below its least value, or a prompt file for a target without a tokenizer.
    """
    if n_prompts < 1 or max_tokens < 2:
        raise ExperimentError(
            f"n_prompts is {n_prompts} and max_prompt_tokens {max_tokens}", "at least 1 and 2", "raise them"
        )
    if not has_tokenizer(target):
        return random_prompts(target, n_prompts, max_tokens)
    from transformers import AutoTokenizer

    from lab.pairs.prompts import load_prompts

    path = Path(prompts) if prompts else _shipped_prompts()
    loaded = load_prompts(path, AutoTokenizer.from_pretrained(str(target)), limit=n_prompts)
    ids = [list(prompt.ids[:max_tokens]) for prompt in loaded]
    return PromptIds(ids, f"{len(ids)} prompts of {path.name}, {range_of_lengths(ids)} tokens")


def _shipped_prompts() -> Path:
    from lab import pairs

    path = pairs.shipped_pair().prompts
    if path is None:
        raise ExperimentError("the shipped pair has no prompts", "a prompt file", "name one with prompts=FILE.jsonl")
    return Path(path)
