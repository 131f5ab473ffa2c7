"""Heads with one known cause of low acceptance each: copies of the shipped head whose files were spoiled, or an engine
with a bug. What each would accept without it is the shipped pair's own acceptance.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.pairs import shipped_pair

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Broken:
    """A spoiled pair, and the same pair without the cause.

    Attributes:
        target, draft: as they are. repaired: the draft as it should be.
        fault: bug planted in the engine.
        n_prompts, prompt_tokens: prompts that show the cause, of the shipped set; joined to this length if it is not 0.
        most_positions: where the bug `clipped_positions` ends; 0: where it always does.
    """

    target: Path
    draft: Path
    repaired: Path
    fault: str = ""
    n_prompts: int = 16
    prompt_tokens: int = 0
    most_positions: int = 0


@dataclass(frozen=True)
class Cause:
    """One planted cause.

    Attributes:
        name: of the lamp that should find it. variant: which of several of its kind.
        make: writes it under a folder.
    """

    name: str
    variant: str
    make: Callable[[Path], Broken]

    @property
    def label(self) -> str:
        """Name of the test."""
        return f"{self.name}: {self.variant}"


def spoiled_copy(folder: Path, config: Callable[[dict[str, Any]], None], tensors: Callable[[Tensors], None]) -> Broken:
    """The shipped pair with a copy of its head whose config and tensors were changed in place."""
    pair = shipped_pair()
    draft = folder / "draft"
    shutil.copytree(pair.draft, draft)
    stated = json.loads((draft / "config.json").read_text())
    config(stated)
    (draft / "config.json").write_text(json.dumps(stated))
    stored = load_file(draft / "model.safetensors")
    tensors(stored)
    save_file({k: v.contiguous() for k, v in stored.items()}, draft / "model.safetensors", metadata={"format": "pt"})
    return Broken(pair.target, draft, pair.draft)


def _of_config(name: str, variant: str, change: Callable[[dict[str, Any]], None]) -> Cause:
    return Cause(name, variant, lambda folder: spoiled_copy(folder, change, lambda _: None))


def _of_tensors(name: str, variant: str, change: Callable[[Tensors], None]) -> Cause:
    return Cause(name, variant, lambda folder: spoiled_copy(folder, lambda _: None, change))


def _taps(*ids: int) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=list(ids))


def _rope(theta: float, **scaling: Any) -> Callable[[dict[str, Any]], None]:
    rope = {"rope_theta": theta, "rope_type": "default", **scaling}
    return lambda config: config.update(rope_theta=theta, rope_parameters=rope)


def _rolled_taps(tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].roll(256, dims=1)


def _absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def _arange(tensors: Tensors) -> None:
    tensors["d2t"] = torch.arange(len(tensors["d2t"]))


def _zeros(tensors: Tensors) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    del tensors["t2d"]


def _rolled(tensors: Tensors) -> None:
    rows = torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = (tensors["d2t"] + rows).roll(7) - rows


def _of_another_head(tensors: Tensors) -> None:
    rows, vocab = torch.arange(len(tensors["d2t"])), len(tensors["t2d"])
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[: len(rows)].sort().values
    tensors["d2t"] = ids - rows
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)


def _bug(fault: str, **more: Any) -> Callable[[Path], Broken]:
    pair = shipped_pair()
    return lambda _: Broken(pair.target, pair.draft, pair.draft, fault=fault, **more)


def beyond_training(_: Path) -> Broken:
    """The shipped head on prompts far longer than the 320 tokens that it was trained at."""
    pair = shipped_pair()
    return Broken(pair.target, pair.draft, pair.draft, n_prompts=4, prompt_tokens=800)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
HEAD_CAUSES = (
    _of_config("tap_layers", "outputs read as inputs", _taps(0, 2, 3)),
    _of_config("tap_layers", "one layer too high", _taps(2, 4, 5)),
    _of_config("tap_layers", "far off", _taps(3, 5, 7)),
    _of_tensors("tap_layers", "another order", _rolled_taps),
    Cause("tap_layers", "the engine's last tap is one off", _bug("wrong_tap")),
    _of_config("norms", "normed feedback that was not trained", lambda config: config["eagle_config"].update(
        return_hidden_post_norm=True)),
    Cause("norms", "the engine feeds the normed state back", _bug("normed_feedback")),
    _of_config("residual", "normed residual that was not trained", lambda config: config.update(
        norm_before_residual=True)),
    _of_config("residual", "with a normed feedback, as speculators trains by default", lambda config: (
        config.update(norm_before_residual=True), config["eagle_config"].update(return_hidden_post_norm=True))),
    _of_config("rope", "base of the target's kind", _rope(5e5)),
    _of_config("rope", "base a little off", _rope(3e4)),
    _of_config("rope", "linear scaling that was not trained", _rope(1e4, rope_type="linear", factor=4.0)),
    _of_config("rope", "llama3 scaling that was not trained", _rope(1e4, rope_type="llama3", factor=8.0, **LLAMA3)),
    _of_config("rope", "yarn scaling that was not trained", _rope(
        1e4, rope_type="yarn", factor=8.0, original_max_position_embeddings=64)),
    Cause("rope_table", "positions end at 127", _bug("clipped_positions", most_positions=128)),
    Cause("rope_table", "positions end at 92, no usual length", _bug("clipped_positions", most_positions=93)),
    Cause("collapse_length", "prompts longer than training", beyond_training),
    _of_config("sliding_window", "16 that was not trained", lambda config: config.update(
        layer_types=["sliding_attention"], sliding_window=16)),
    _of_config("sliding_window", "5, in the other spelling", lambda config: config.update(
        use_sliding_window=True, sliding_window=5)),
    _of_tensors("vocabulary_map", "absolute ids", _absolute),
    _of_tensors("vocabulary_map", "0, 1, 2 ...", _arange),
    _of_tensors("vocabulary_map", "zeros without a mask", _zeros),
    _of_tensors("vocabulary_map", "rolled by 7", _rolled),
    _of_tensors("vocabulary_map", "another head's", _of_another_head),
    Cause("vocabulary_map", "the engine does not apply it", _bug("missing_d2t")),
)  # fmt: skip
