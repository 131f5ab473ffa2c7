"""A TurboMind directory: `config.yaml`, and a file of plain 16-bit values for each tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.checkpoint.containers.turbomind import (
    CAPTURED,
    DTYPES,
    FUSED,
    MAP_FILE,
    OPTIONAL,
    SECTION,
    SETTINGS_FILE,
    Widths,
    stored_files,
)
from eagle3core.checkpoint.writing.head import Head


def write_turbomind(head: Head, directory: Path) -> dict[str, str]:
    """The directory; gives the file of every tensor."""
    import yaml  # only such a directory needs it

    geometry, block = head.geometry, head.geometry.block
    widths = Widths(
        block.hidden_size, geometry.target_hidden_size, len(geometry.taps), block.n_heads * block.head_dim,
        block.n_kv_heads * block.head_dim, block.intermediate_size, geometry.vocab_size, geometry.draft_vocab_size,
    )  # fmt: skip
    names = {}
    for name, stored in stored_files(widths).items():
        tensor = head.weights[name]
        _write(directory / stored.file, tensor.t() if stored.transposed else tensor)
        names[name] = stored.file
    qkv = torch.cat([head.weights[f"midlayer.self_attn.{part}_proj.weight"] for part in "qkv"])
    _write(directory / FUSED, qkv.t())
    if head.draft_to_target is not None:
        offsets = head.draft_to_target - torch.arange(len(head.draft_to_target))
        _write(directory / MAP_FILE, offsets.to(torch.int32))
        names["d2t"] = MAP_FILE
    text = yaml.safe_dump({SECTION: _config(head, widths)}, sort_keys=False)
    (directory / SETTINGS_FILE).write_text(text, encoding="utf-8")
    return names


def _config(head: Head, widths: Widths) -> dict[str, Any]:
    geometry, block = head.geometry, head.geometry.block
    dtype = {kind: name for name, kind in DTYPES.items()}[head.weights["norm.weight"].dtype]
    ours = {
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope.theta,
        "max_position_embeddings": head.max_position,
    }
    return {
        "hidden_units": widths.hidden,
        "vocab_size": widths.vocab,
        "head_num": block.n_heads,
        "size_per_head": block.head_dim,
        "inter_size": widths.inner,
        **{theirs: ours[name] for theirs, name in OPTIONAL.items()},
        "eagle_mode": "eagle3",
        "eagle_q_size": widths.query,
        "eagle_kv_size": widths.key,
        "eagle_qkv_in_dim": 2 * widths.hidden,
        "eagle_qkv_in_factor": 2,
        "eagle_fc_in_dim": widths.taps * widths.target,
        "eagle_fc_in_factor": widths.taps,
        "eagle_base_hidden": widths.target,
        "eagle_draft_hidden": widths.hidden,
        CAPTURED: [tap - 1 for tap in geometry.taps],
        "eagle_num_capture_layers": widths.taps,
        "eagle_weight_dtype": dtype,
        "draft_vocab_size": widths.draft_vocab,
    }


def _write(path: Path, tensor: Tensor) -> None:
    path.write_bytes(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
