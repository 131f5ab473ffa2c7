"""Prompts for a target without a tokenizer: seeded random token ids, which parity and speed do not mind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
RANDOM_LENGTHS = (37, 12, 23, 5)  # odd and uneven, so that no length is a multiple of a block or chunk
RANDOM_SEED = 20


@dataclass(frozen=True)
class PromptIds:
    """Token ids of every prompt, and where they come from, in words."""

    ids: list[list[int]]
    source: str


def has_tokenizer(target: Path) -> bool:
    """Whether a tokenizer lies in a target's folder."""
    return any((target / name).exists() for name in TOKENIZER_FILES)


def random_prompts(target: Path, n_prompts: int, max_tokens: int) -> PromptIds:
    """Seeded random ids below the target's vocabulary size, for a target without a tokenizer."""
    vocab = int(json.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    random = torch.Generator().manual_seed(RANDOM_SEED)
    lengths = [min(max_tokens, RANDOM_LENGTHS[i % len(RANDOM_LENGTHS)]) for i in range(n_prompts)]
    ids = [torch.randint(vocab, (length,), generator=random).tolist() for length in lengths]
    source = f"{n_prompts} prompts of random ids (the target has no tokenizer), {range_of_lengths(ids)} tokens"
    return PromptIds(ids, source)


def range_of_lengths(ids: Sequence[Sequence[int]]) -> str:
    """How long prompts are, in words: `23`, or `5 to 37`."""
    shortest, longest = min(map(len, ids)), max(map(len, ids))
    return str(shortest) if shortest == longest else f"{shortest} to {longest}"
