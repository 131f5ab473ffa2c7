"""A draft head's files and what their keys mean, read without the engine.

The engine's loader is judged by what is read here, so nothing of it is used: a key that it reads with another meaning
shows as a stage that differs. Formulas and evidence: docs/checkpoints.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lab.errors import ExperimentError
from lab.parity.head_containers import read_container


def read_draft_files(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` of a draft, or what a container says in its keys; and its tensors on the CPU, under the names
    SafeAILab gives them.

    Raises:
        ExperimentError: as of `read_draft_tensors` and `read_container`.
    """
    contained = read_container(directory)
    if contained is not None:
        return contained
    return json.loads((directory / "config.json").read_text(encoding="utf-8")), read_draft_tensors(directory)


def read_draft_tensors(directory: Path) -> dict[str, Tensor]:
    """Tensors of a published folder.

    Raises:
        ExperimentError: neither `.safetensors` nor `.bin` files are there.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        for path in sorted(directory.glob("*.bin")):
            tensors |= torch.load(path, map_location="cpu", weights_only=True)
    if not tensors:
        raise ExperimentError(
            f"{directory.name} holds no weights",
            "*.safetensors, *.bin as written by torch.save, a TurboMind directory or a GGUF file",
            "give the directory of an EAGLE-3 draft checkpoint",
        )
    return {_safailab_name(name): value for name, value in tensors.items()}


_PREFIXES = ("module.", "draft_model.", "model.")
_OLDER = {
    "aux_norm_low.weight": "fc_norm.0.weight", "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight", "draft_id_to_target_id": "d2t",
}  # fmt: skip


def _safailab_name(stored: str) -> str:
    name = stored
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    for numbered in ("layers.0.", "midlayer.0."):
        name = name.replace(numbered, "midlayer.")
    return _OLDER.get(name, name)


def read_taps(
    config: dict[str, Any], n_layers: int, ids: Sequence[int] | None = None, convention: str | None = None
) -> tuple[int, ...]:
    """Tap ids as layer inputs, ascending, from explicit ids or from a draft's `config.json`.

    Args:
        config: the draft's `config.json`.
        n_layers: of the target.
        ids, convention: explicit ids with "input" or "output"; win over the file.
    """
    nested = config.get("eagle_config") or {}
    name, stated_name = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_convention"
    if ids is None:
        ids = config.get(name) or nested.get(name) or None
        convention = config.get(stated_name) or nested.get(stated_name)
        if ids is None:
            ids, convention = (2, n_layers // 2, n_layers - 3), "input"
        is_nested = "transformer_layer_config" in config and bool(config.get(name))
        if convention is None and (is_nested or n_layers in ids):
            convention = "input"
        if convention is None:
            default = [2, n_layers // 2, n_layers - 3]
            begins = "output" if ids[0] in (-1, 1) else "input" if ids[0] == 2 or list(ids) == default else None
            convention = begins or ("input" if config.get(name) else "output")
    return tuple(sorted(int(i) + (convention == "output") for i in ids))


@dataclass(frozen=True)
class Meaning:
    """What the keys of a head mean, read here once more so that a wrong reading in the engine shows.

    Attributes:
        fusion: "plain", "all", "each" or "last". residual, feedback: whether they are normed.
        scale: of the logits. interleaved: rotary pairs are neighbours.
    """

    fusion: str
    residual: bool
    feedback: bool
    scale: float
    interleaved: bool


def read_meaning(config: dict[str, Any], tensors: dict[str, Tensor], norm_output: str = "") -> Meaning:
    """The formulas that a head's `config.json` and tensors ask for (docs/checkpoints.md).

    `norm_output`: what that key means at the top of a flat file, "feedback" or "head".
    """
    inner = config.get("eagle_config") or {}
    nested = config.get("transformer_layer_config") or {}

    def key(name: str, default: Any = None) -> Any:
        found = (place[name] for place in (inner, config, nested) if place.get(name) is not None)
        return next(found, default)

    fusion = "plain"
    if key("use_aux_hidden_state", True) is False:
        fusion = "last"
    elif key("norm_before_fc", "input_norm.weight" in tensors):
        fusion = "all"
    elif "fc_norm.0.weight" in tensors:
        fusion = "each"
    told = bool(key("return_hidden_post_norm") or inner.get("norm_output"))
    feeds = told or bool((nested or norm_output == "feedback") and config.get("norm_output"))
    residual, scale = bool(key("norm_before_residual")), float(key("logit_scale", 1.0))
    return Meaning(fusion, residual, feeds, scale, interleaved=key("rope_is_neox_style", True) is False)


def read_window(config: dict[str, Any]) -> int:
    """Entries back that the head's layer sees, the newest included; 0: all. `config` with the layer's keys at its top.

    Without `layer_types` a length alone says nothing: many files keep one that no layer has.
    """
    kinds, length = config.get("layer_types"), config.get("sliding_window")
    slides = kinds[0] == "sliding_attention" if kinds else bool(config.get("use_sliding_window"))
    return int(length) if slides and length else 0


def absolute_ids(tensors: dict[str, Tensor], draft_vocab: int) -> Tensor:
    """`[Vd]` int64 target id of each draft id; `d2t` holds offsets, and without it both vocabularies are one."""
    ids = torch.arange(draft_vocab)
    return ids + tensors["d2t"].to(torch.int64) if "d2t" in tensors else ids
