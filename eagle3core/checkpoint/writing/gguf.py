"""A GGUF file of architecture `eagle3`, version 3, as llama.cpp's converter lays it out.

Source: github.com/ggml-org/ggml, its page of the GGUF format; github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.checkpoint.containers.gguf import (
    ARCHITECTURE,
    BASE,
    DTYPES,
    EPSILON,
    FREQUENCIES,
    LLAMA3,
    SCALING,
    STORED,
    TAPS,
)
from eagle3core.checkpoint.rope import llama3_factors
from eagle3core.checkpoint.writing.head import Head

ALIGNMENT = 32
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # general.file_type
_ROTATED = {"midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight"}


def write_gguf(head: Head, path: Path) -> dict[str, str]:
    """The file; gives the stored name of every tensor."""
    tensors = {STORED[name]: _stored(head, name) for name in head.weights}
    names = {name: STORED[name] for name in head.weights}
    if head.draft_to_target is not None:
        tensors["d2t"], names["d2t"] = head.draft_to_target, "d2t"
    block = head.geometry.block
    if block.rope.kind == "llama3":
        tensors[FREQUENCIES] = llama3_factors(block.rope, block.head_dim)
    metadata = _metadata(head)
    with path.open("wb") as file:
        file.write(_header(metadata, tensors))
        for tensor in tensors.values():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            file.write(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
    return names


def _stored(head: Head, name: str) -> Tensor:
    """A tensor as the file has it: vectors in 32 bits, rotary pairs of q and k as neighbours."""
    tensor = head.weights[name]
    if tensor.dim() == 1:
        return tensor.to(torch.float32)
    if name in _ROTATED:
        halves = tensor.view(-1, 2, head.geometry.block.head_dim // 2, tensor.shape[1])  # [heads, 2, D / 2, in]
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _metadata(head: Head) -> dict[str, Any]:
    """Keys and values; whole numbers are written in 32 bits without a sign, and so are real ones with one."""
    geometry, block, variant = head.geometry, head.geometry.block, head.geometry.variant
    rope = block.rope
    keys: dict[str, Any] = {
        "block_count": 1, "context_length": head.max_position, "embedding_length": block.hidden_size,
        "feed_forward_length": block.intermediate_size, "attention.head_count": block.n_heads,
        "attention.head_count_kv": block.n_kv_heads, "attention.key_length": block.head_dim,
        "attention.value_length": block.head_dim, "rope.dimension_count": block.head_dim,
        EPSILON: block.rms_norm_eps, BASE: rope.theta, "vocab_size": geometry.vocab_size,
        TAPS: list(geometry.taps), "target_hidden_size": geometry.target_hidden_size,
        "norm_before_residual": variant.normed_residual,
    }  # fmt: skip
    if variant.fusion_norm == "each":
        keys["fc_norm"] = True
    if variant.feeds_normed:
        keys["norm_output"] = True
    if rope.kind in ("linear", "yarn"):
        keys |= {f"{SCALING}type": rope.kind, f"{SCALING}factor": rope.factor}
    if rope.kind == "yarn":
        keys |= {f"{SCALING}original_context_length": rope.original_max_position}
        keys |= {f"{SCALING}yarn_beta_fast": rope.beta_fast, f"{SCALING}yarn_beta_slow": rope.beta_slow}
    own: dict[str, Any] = {}
    if rope.kind == "llama3":
        own = {
            f"{LLAMA3}factor": rope.factor, f"{LLAMA3}low_freq_factor": rope.low_freq_factor,
            f"{LLAMA3}high_freq_factor": rope.high_freq_factor,
            f"{LLAMA3}original_max_position_embeddings": rope.original_max_position,
        }  # fmt: skip
    kind = _FILE_TYPES.get(head.weights["midlayer.self_attn.q_proj.weight"].dtype, 0)
    general = {"general.architecture": ARCHITECTURE, "general.alignment": ALIGNMENT, "general.file_type": kind}
    return {**general, **{f"{ARCHITECTURE}.{name}": value for name, value in keys.items()}, **own}


def _header(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for name, value in metadata.items():
        parts += [_text(name), _value(value)]
    kinds, offset = {dtype: kind for kind, dtype in DTYPES.items()}, 0
    for name, tensor in tensors.items():
        shape = tuple(reversed(tensor.shape))
        parts += [_text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        parts.append(struct.pack("<IQ", kinds[tensor.dtype], offset))
        offset += tensor.numel() * tensor.dtype.itemsize
        offset += -offset % ALIGNMENT
    return b"".join(parts)


def _value(value: Any) -> bytes:
    """A value behind the number of its kind (github.com/ggml-org/ggml, its page of the GGUF format)."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()
