"""Random geometries, depths and batches: speculation still changes no token, and states stay true."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rings import exhaustive_but
from stepping import advance, assert_state_is_true, start
from tiny_engines import (
    accepted_counts,
    drafting_engine,
    is_empty,
    new_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

pytestmark = [pytest.mark.reference, pytest.mark.slow]


def random_geometry(seed: int) -> dict[str, Any]:
    """A pair that no one would think of writing down."""
    draw = random.Random(seed)
    n_layers = draw.randint(1, 9)
    kv_heads, groups = draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 8])
    vocab = draw.choice([2, 3, 5, 8, 33])
    own_width = draw.random() < 0.4
    n_taps = min(draw.choice([1, 2, 3]), n_layers + 1)
    taps = sorted(draw.sample(range(n_layers + 1), n_taps))
    rope = draw.choice(
        [
            {"rope_theta": 1e4},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 32, "rope_theta": 5e5},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
        ]
    )
    own_head = draw.random() < 0.7 or own_width
    return {
        "n_layers": n_layers,
        "hidden": draw.choice([16, 24, 40]),
        "heads": kv_heads * groups,
        "kv_heads": kv_heads,
        "head_dim": draw.choice([4, 6, 16]),
        "ffn": draw.choice([16, 37, 64]),
        "vocab": vocab,
        "tie": draw.random() < 0.5,
        "draft_hidden": draw.choice([8, 32]) if own_width else None,
        "draft_heads": draw.choice([2, 4]),
        "draft_kv_heads": draw.choice([1, 2]),
        "draft_vocab": draw.choice([None, max(2, vocab // 2)]) if own_head else None,
        "own_head": own_head,
        "taps": taps,
        "bias": draw.random() < 0.3,
        "rope": rope,
        "draft_rope": draw.choice([None, rope]),
        "layout": draw.choice(["safeailab", "speculators"]),
        "eos": draw.choice([[], [0]]),
        "seed": seed,
    }


@pytest.mark.parametrize("seed", exhaustive_but(range(6), range(20)))
def test_no_geometry_depth_or_batch_changes_a_token(tmp_path: Path, seed: int) -> None:
    geometry, draw = random_geometry(seed), random.Random(1000 + seed)
    pair = write_tiny_pair(tmp_path, **geometry)
    lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 7))]
    prompts = random_prompts(lengths, n_vocab=geometry["vocab"], seed=seed)
    limits = [new_tokens(draw.randint(1, 30)) for _ in prompts]
    expected = tokens_of(tiny_engine(pair, None, session_len=80, max_batch_size=1).generate(prompts, limits))
    block = draw.choice([1, 3, 8, 16])
    sizes: dict[str, Any] = {
        "block_size": block,
        "prefill_chunk": block * draw.randint(1, 4),
        "max_batch_size": draw.randint(1, 5),
    }
    for k in draw.sample(range(1, 9), 3):
        engine = tiny_engine(pair, k, session_len=80, **sizes)
        assert tokens_of(engine.generate(prompts, limits)) == expected, (k, sizes)
        assert is_empty(engine)


@pytest.mark.parametrize("seed", exhaustive_but(range(3), range(20)))
def test_no_geometry_changes_a_token_over_a_cache_in_fp8(tmp_path: Path, seed: int) -> None:
    geometry, draw = random_geometry(seed), random.Random(2000 + seed)
    pair = write_tiny_pair(tmp_path, **geometry)
    prompts = random_prompts([draw.randint(1, 40) for _ in range(4)], n_vocab=geometry["vocab"], seed=seed)
    stored: dict[str, Any] = {"session_len": 80, "cache_dtype": "fp8"}
    expected = tokens_of(tiny_engine(pair, None, max_batch_size=1, **stored).generate(prompts, new_tokens(20)))
    for draft_cache in ("as_computed", "fp8"):
        fields = {"num_speculative_tokens": draw.randint(1, 8), "draft_cache_dtype": draft_cache}
        engine = drafting_engine(pair, fields, max_batch_size=draw.randint(1, 5), **stored)
        assert tokens_of(engine.generate(prompts, new_tokens(20))) == expected, fields


@pytest.mark.parametrize("seed", exhaustive_but(range(6), range(20)))
def test_no_geometry_leaves_a_drafted_state_in_the_caches(tmp_path: Path, seed: int) -> None:
    geometry = random_geometry(seed)
    pair = write_tiny_pair(tmp_path, **{**geometry, "eos": []})
    k = 1 + seed % 8
    engine, fresh = (tiny_engine(pair, k, session_len=150) for _ in "ab")
    sequences = start(engine, random_prompts([1, 5, 19], n_vocab=geometry["vocab"], seed=seed))
    for _ in range(10):
        advance(engine, sequences)
        assert_state_is_true(engine, fresh, sequences)


@pytest.mark.parametrize("k", exhaustive_but([3], [1, 3, 5]))
def test_a_wide_layer_of_eight_billion_class_heads_gives_the_baselines_tokens(tmp_path: Path, k: int) -> None:
    pair = write_tiny_pair(
        tmp_path,
        n_layers=1,
        taps=(0, 1),
        hidden=1024,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=2048,
        vocab=8,
        dtype=torch.bfloat16,
    )
    prompts = random_prompts([40, 7, 21], n_vocab=8)
    plain = tiny_engine(pair, None, session_len=128, block_size=64, prefill_chunk=64).generate(prompts, new_tokens(24))
    engine = tiny_engine(pair, k, session_len=128, block_size=64, prefill_chunk=64)
    responses = engine.generate(prompts, new_tokens(24))
    assert tokens_of(responses) == tokens_of(plain)
    assert max(accepted_counts(responses)) > 0
