"""How the lab writes checkpoints, so that transformers, the servers and SafeAILab's own code read them alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


def write_target(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """`config.json`, the weights and their index.

    SafeAILab's code finds the target's embedding, which a draft of the same width shares, through the index alone.
    """
    _write(directory, config, weights)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(weights), WEIGHTS)}
    _write_json(directory / f"{WEIGHTS}.index.json", index)


def write_draft(
    directory: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], *, target_hidden: int
) -> None:
    """`config.json` and the weights of a draft that reads a target of width `target_hidden`.

    `target_hidden_size` is written only where the widths differ: SafeAILab's code takes the mere key to say that the
    draft brings an embedding of its own, and drafts with a random one if the weights hold none.
    Source: SafeAILab/EAGLE, eagle/model/cnets.py, `Model.__init__`.
    """
    differs = config["hidden_size"] != target_hidden
    assert differs == ("embed_tokens.weight" in weights), "a draft brings an embedding where its width is another"
    _write(directory, {**config, **({"target_hidden_size": target_hidden} if differs else {})}, weights)


def _write(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    stored = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(stored, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / WEIGHTS).chmod(0o644)  # the library makes it private to its owner


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
