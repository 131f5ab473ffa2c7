"""Engines over tiny random pairs, for tests that decode.

A draft vocabulary of a few tokens makes a random draft right often enough for every accepted length to occur.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from random_pairs import write_random_pair
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3core import Engine, EngineConfig, GenerationConfig, Response, SpeculativeConfig
from eagle3core.trace import Trace

Pair = tuple[Path, Path]
N_VOCAB = 6
LETTERS = "abcde "


def write_tiny_pair(directory: Path, **changes: Any) -> Pair:
    """A two-layer pair over six tokens whose end token (-1) never occurs unless `eos` says otherwise."""
    geometry: dict[str, Any] = {
        "n_layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn": 48,
        "vocab": N_VOCAB,
        "draft_vocab": None,
        "taps": (0, 1, 2),
        "convention": "input",
        "eos": [],
    }
    return write_random_pair(directory, **{**geometry, **changes})


def engine_config(pair: Pair, k: int | None, **changes: Any) -> EngineConfig:
    """Double precision on the CPU with small blocks and chunks; `k` drafts a step, None for plain decoding."""
    settings: dict[str, Any] = {
        "session_len": 64,
        "max_batch_size": 3,
        "block_size": 4,
        "prefill_chunk": 8,
        "dtype": "float64",
        "device": "cpu",
    }
    speculative = None if k is None else SpeculativeConfig(model=str(pair[1]), num_speculative_tokens=k)
    return EngineConfig(**{**settings, "speculative_config": speculative, **changes})


def tiny_engine(
    pair: Pair, k: int | None, *, trace: Trace | None = None, tokenizer: Any = None, **changes: Any
) -> Engine:
    """An engine over a pair on disk."""
    return Engine.from_pretrained(pair[0], engine_config(pair, k, **changes), trace=trace, tokenizer=tokenizer)


def random_prompts(lengths: list[int], *, n_vocab: int = N_VOCAB, seed: int = 0) -> list[list[int]]:
    """One prompt of random tokens for each length."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(n_vocab, (length,), generator=random).tolist() for length in lengths]


def new_tokens(n: int, **changes: Any) -> GenerationConfig:
    """Settings that stop after `n` tokens."""
    return GenerationConfig(max_new_tokens=n, **changes)


def tokens_of(responses: list[Response]) -> list[list[int]]:
    """Generated tokens of every response."""
    return [response.token_ids for response in responses]


def accepted_counts(responses: list[Response]) -> set[int]:
    """Accepted lengths that occurred."""
    return {step.n_accepted for response in responses for step in response.req_metrics.steps}


def letter_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer whose six tokens are five letters and a space."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, clean_up_tokenization_spaces=False
    )


def free_blocks(engine: Engine) -> list[tuple[int, int]]:
    """Free and total blocks of the target's and, if there is one, the draft's cache."""
    caches = [cache for cache in (engine.state.target_cache, engine.state.draft_cache) if cache is not None]
    return [(len(cache.free_blocks), cache.k.shape[1]) for cache in caches]


def is_empty(engine: Engine) -> bool:
    """Whether no request has left anything behind: no slot in use, every block free, every counter at zero."""
    state = engine.state
    counters = (state.active, state.roots, state.lengths, state.draft_lengths, state.pending_counts)
    tables = [cache.block_tables for cache in (state.target_cache, state.draft_cache) if cache is not None]
    return (
        all(n_free == n_blocks for n_free, n_blocks in free_blocks(engine))
        and all(bool((table == -1).all()) for table in tables)
        and not any(bool(counter.any()) for counter in counters)
    )
