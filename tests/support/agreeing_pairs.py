"""A random pair whose draft is right about half the time: both models lean towards one favourite token.

A direction is added to every row of the target's token table, so it stays in every residual stream, tap and draft
state; the favourite's row of either head has a share of it. The rest of both models is random, so each now and then
prefers another token, and steps of every accepted length occur.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from random_pairs import write_random_pair
from safetensors.torch import load_file, save_file
from torch import Tensor

OWN_LEAN = 0.3  # the same for the favourite itself, so that it is not always followed by itself
LEAN = 1.5  # largest length of the direction in a token's embedding, per root of its width
TARGET_SHARE, DRAFT_SHARE = 0.4, 1.5  # of the direction in the favourite's head rows


def write_agreeing_pair(directory: str | Path, *, draft_vocab: int = 128, **geometry: Any) -> tuple[Path, Path]:
    """Directories of a target and a draft as `write_random_pair` makes them, leaning to a common token."""
    target_dir, draft_dir = write_random_pair(directory, draft_vocab=draft_vocab, **geometry)
    target = load_file(target_dir / "model.safetensors")
    draft = load_file(draft_dir / "model.safetensors")
    direction = _unit(target["model.embed_tokens.weight"].shape[1], seed=11)
    table = target["model.embed_tokens.weight"]
    favourite = draft_vocab // 2
    target_id = favourite + int(draft["d2t"][favourite]) if "d2t" in draft else favourite
    lean = LEAN * torch.rand(len(table), generator=torch.Generator().manual_seed(13))
    lean[target_id] = OWN_LEAN
    table += len(direction) ** 0.5 * torch.outer(lean, direction)
    target["lm_head.weight"][target_id] += TARGET_SHARE * len(direction) ** 0.5 * direction
    own = _unit(draft["fc.weight"].shape[0], seed=12)
    n_taps = draft["fc.weight"].shape[1] // len(direction)
    draft["fc.weight"] += torch.outer(own, direction.repeat(n_taps)) * (len(own) / len(direction)) ** 0.5
    draft["lm_head.weight"][favourite] += DRAFT_SHARE * len(own) ** 0.5 * own
    for path, tensors in ((target_dir, target), (draft_dir, draft)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return target_dir, draft_dir


def _unit(width: int, *, seed: int) -> Tensor:
    vector = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return vector / vector.norm()
