"""What a parity run is given: a pair, and prompts as token ids.

Parity does not care what a prompt says, so a target without a tokenizer gets seeded random ids; the report says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.errors import ExperimentError
from lab.pairs.named import NAMES, named_pair

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
RANDOM_LENGTHS = (37, 12, 23, 5)  # odd and uneven, so that no length is a multiple of a block or chunk
RANDOM_SEED = 20


@dataclass(frozen=True)
class PromptIds:
    """Token ids of every prompt, and where they come from, in words."""

    ids: list[list[int]]
    source: str


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
    if not any((target / name).exists() for name in TOKENIZER_FILES):
        return random_prompts(target, n_prompts, max_tokens)
    from transformers import AutoTokenizer

    from lab.pairs.prompts import load_prompts

    path = Path(prompts) if prompts else _shipped_prompts()
    loaded = load_prompts(path, AutoTokenizer.from_pretrained(str(target)), limit=n_prompts)
    ids = [list(prompt.ids[:max_tokens]) for prompt in loaded]
    return PromptIds(ids, f"{len(ids)} prompts of {path.name}, {_lengths(ids)} tokens")


def random_prompts(target: Path, n_prompts: int, max_tokens: int) -> PromptIds:
    """Seeded random ids below the target's vocabulary size, for a target without a tokenizer."""
    vocab = int(json.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    random = torch.Generator().manual_seed(RANDOM_SEED)
    lengths = [min(max_tokens, RANDOM_LENGTHS[i % len(RANDOM_LENGTHS)]) for i in range(n_prompts)]
    ids = [torch.randint(vocab, (length,), generator=random).tolist() for length in lengths]
    return PromptIds(ids, f"{n_prompts} prompts of random ids (the target has no tokenizer), {_lengths(ids)} tokens")


def _shipped_prompts() -> Path:
    from lab import pairs

    path = pairs.shipped_pair().prompts
    if path is None:
        raise ExperimentError("the shipped pair has no prompts", "a prompt file", "name one with prompts=FILE.jsonl")
    return Path(path)


def _lengths(ids: Sequence[Sequence[int]]) -> str:
    shortest, longest = min(map(len, ids)), max(map(len, ids))
    return str(shortest) if shortest == longest else f"{shortest} to {longest}"
