"""A small valid pair, and its doors, for the groups that damage checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3core import Engine, EngineConfig, GenerationConfig, SpeculativeConfig, pipeline
from lab.pairs.on_disk import shipped_folder
from lab.pairs.random_pair import RandomShape, make_random_pair

SHAPE = RandomShape(
    vocab=48, draft_vocab=24, layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=40, draft_hidden=16,
    draft_heads=4, draft_kv_heads=2, draft_ffn=24, taps=(0, 1, 3), scaled_from=64, max_position=256,
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class SmallPair:
    """A tiny random pair on disk."""

    target: Path
    draft: Path


def prepare_pair(folder: Path) -> SmallPair:
    """The pair, once loaded, so that whatever is imported late has been."""
    pair = make_random_pair(folder, SHAPE, seed=1)
    open_pair(pair.target, pair.draft)
    return SmallPair(pair.target, pair.draft)


def prepare_talking_pair(folder: Path) -> SmallPair:
    """A pair with the vocabulary and the tokenizer of the shipped one, once used."""
    shipped = shipped_folder() / "target"
    vocab = json.loads((shipped / "config.json").read_text())["vocab_size"]
    pair = make_random_pair(folder, replace(SHAPE, vocab=vocab), seed=1)
    for name in TOKENIZER_FILES:
        shutil.copy(shipped / name, pair.target)
    talk(pair.target)
    return SmallPair(pair.target, pair.draft)


def talk(target: Path) -> None:
    """Through the pipeline's door: a text and a chat, three tokens each."""
    config = EngineConfig(session_len=256, max_batch_size=2, block_size=16, prefill_chunk=64, device="cpu")
    pipe = pipeline(target, engine_config=config)
    pipe(["def main(a): é", [{"role": "user", "content": "hi"}]], GenerationConfig(max_new_tokens=3))


def copied(source: Path, folder: Path) -> Path:
    """A copy of a folder at `folder`, which may exist."""
    return Path(shutil.copytree(source, folder, dirs_exist_ok=True))


def open_pair(target: Path, draft: Path, n_tokens: int = 3, *, method: str = "eagle3", **formats: Any) -> None:
    """Through the engine's door, and some tokens on; `formats`: of weights and cache, as `EngineConfig` has them."""
    config = EngineConfig(
        session_len=64, max_batch_size=2, block_size=16, prefill_chunk=16, device="cpu",
        speculative_config=SpeculativeConfig(method=method, model=str(draft)), **formats,
    )  # fmt: skip
    engine = Engine.from_pretrained(target, config)
    if n_tokens:
        engine.generate([[1, 2, 3]], GenerationConfig(max_new_tokens=n_tokens))
