"""A Llama-architecture target, from a Hugging Face directory to checked tensors (docs/requirements.md R-22)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3core.arguments import check_path, check_placement
from eagle3core.checkpoint.rope import read_rope
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.tensors import TensorFiles, require_names
from eagle3core.errors import CheckpointError
from eagle3core.geometry import BlockGeometry, TargetGeometry

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target as loaded.

    Attributes:
        geometry: its shapes.
        weights: by Hugging Face name; `lm_head.weight` is the embedding itself when they are tied.
        dtype: of every weight.
    """

    geometry: TargetGeometry
    weights: dict[str, Tensor]
    dtype: torch.dtype


def load_target(
    path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TargetCheckpoint:
    """Read, check and cast a target.

    Args:
        path: directory with config.json and safetensors (single or sharded) or pytorch_model.bin.
        dtype: compute dtype; None keeps the dtype in which the embedding is stored.
        device: where the weights go.

    Raises:
        ConfigError, BackendUnavailable: a path, dtype or device that cannot be used; nothing was read.
        CheckpointError: names the file, the key or tensor, and the value.
    """
    check_placement(dtype, device)
    directory = require_directory(path, "target")
    config = Settings.read(directory / "config.json")
    geometry = read_target_geometry(config, directory)
    files = TensorFiles(directory)
    if geometry.n_layers > len(files.names):  # before a name is made for each of perhaps a billion layers
        most = f"no more than the {len(files.names)} tensors there are"
        raise config.bad("num_hidden_layers", geometry.n_layers, most)
    shapes = dict(target_shapes(geometry))
    given = {name: name for name in files.names if not name.endswith("rotary_emb.inv_freq")}
    require_names(files, shapes, given, [HEAD] if geometry.tie_word_embeddings else [])
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        weights[name] = files.read_weight(name, shape, dtype, device)
        dtype = dtype or weights[name].dtype
    if geometry.tie_word_embeddings:
        if HEAD in files and not torch.equal(files.read(HEAD), files.read(EMBEDDING)):
            raise CheckpointError(
                f"{files.where(HEAD)} differs from {EMBEDDING}, but tie_word_embeddings is true",
                "one shared table, or tie_word_embeddings false",
                f"correct tie_word_embeddings in {directory / 'config.json'}",
            )
        weights[HEAD] = weights[EMBEDDING]
    return TargetCheckpoint(geometry, weights, weights[EMBEDDING].dtype)


def require_directory(path: str | Path, role: str) -> Path:
    """The path, if it is a directory.

    Raises:
        ConfigError: it is no path at all. CheckpointError: it is no directory.
    """
    check_path(f"the {role}", path)
    directory = Path(path)
    if not os.path.isdir(directory):  # of Path's own, a name that no system could have raises something else
        state = "is a file" if os.path.exists(directory) else "does not exist"
        raise CheckpointError(
            f"{role} directory {str(directory)!r} {state}",
            "an existing directory with config.json and the weights",
            f"check the path of the {role}",
        )
    return directory


def read_block_geometry(config: Settings) -> BlockGeometry:
    """Widths of a decoder layer.

    Raises:
        CheckpointError: heads that do not divide, an odd head size, an activation other than SiLU.
    """
    hidden, n_heads = config.count("hidden_size"), config.count("num_attention_heads")
    n_kv_heads = config.count("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise config.bad("num_key_value_heads", n_kv_heads, f"a divisor of num_attention_heads = {n_heads}")
    if "head_dim" not in config and hidden % n_heads:
        raise config.bad(
            "hidden_size", hidden, f"a multiple of num_attention_heads = {n_heads} when head_dim is absent"
        )
    head_dim = config.count("head_dim", hidden // n_heads or None)
    if head_dim % 2:
        raise config.bad("head_dim", head_dim, "an even number: rotary embedding turns pairs")
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise config.bad("hidden_act", config.values["hidden_act"], "'silu': other activations are not built")
    max_position = config.count("max_position_embeddings", 2048)
    return BlockGeometry(
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),  # the Llama configuration's own default
        rope=read_rope(config, max_position),
    )


def read_target_geometry(config: Settings, directory: Path) -> TargetGeometry:
    """Shapes of a target; the end tokens of generation_config.json are merged in.

    Raises:
        CheckpointError: another architecture, quantised weights, or a missing or unusable key.
    """
    if config.values.get("model_type") != "llama":
        raise config.bad(
            "model_type",
            config.values.get("model_type"),
            "'llama' (Llama 2, 3, 3.1 and others of that architecture)",
            "use a Llama-architecture target; other architectures are not built",
        )
    if "quantization_config" in config:
        raise config.bad(
            "quantization_config", "present", "absent: quantised targets are not built", "use bf16 weights"
        )
    ends = config.ids("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ends = (*Settings.read(generation).ids("eos_token_id"), *ends)
    return TargetGeometry(
        block=read_block_geometry(config),
        n_layers=config.count("num_hidden_layers"),
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=config.count("max_position_embeddings", 2048),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def target_shapes(geometry: TargetGeometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor a target must bring, in the order of the forward pass."""
    block = geometry.block
    hidden = block.hidden_size
    yield EMBEDDING, (geometry.vocab_size, hidden)
    for i in range(geometry.n_layers):
        for name, shape in layer_shapes(block, hidden):
            yield f"model.layers.{i}.{name}.weight", shape
            bias = geometry.attention_bias if name.startswith("self_attn.") else geometry.mlp_bias
            if bias and len(shape) == 2:
                yield f"model.layers.{i}.{name}.bias", shape[:1]
    yield "model.norm.weight", (hidden,)
    if not geometry.tie_word_embeddings:
        yield HEAD, (geometry.vocab_size, hidden)


def layer_shapes(block: BlockGeometry, qkv_in: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight of one decoder layer whose q, k and v read `qkv_in` values."""
    hidden, inner = block.hidden_size, block.intermediate_size
    yield "input_layernorm", (hidden,)
    yield "self_attn.q_proj", (block.n_heads * block.head_dim, qkv_in)
    yield "self_attn.k_proj", (block.n_kv_heads * block.head_dim, qkv_in)
    yield "self_attn.v_proj", (block.n_kv_heads * block.head_dim, qkv_in)
    yield "self_attn.o_proj", (hidden, block.n_heads * block.head_dim)
    yield "post_attention_layernorm", (hidden,)
    yield "mlp.gate_proj", (inner, hidden)
    yield "mlp.up_proj", (inner, hidden)
    yield "mlp.down_proj", (hidden, inner)
