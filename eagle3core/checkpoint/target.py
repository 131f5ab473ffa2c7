"""A target of Llama's kind, from a Hugging Face directory to checked tensors (docs/requirements.md R-22)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3core.arguments import check_path, check_placement
from eagle3core.checkpoint.experts.choice import is_mxfp4
from eagle3core.checkpoint.experts.names import PACKED_BYTES, expert_shapes, has_own_tensors
from eagle3core.checkpoint.experts.packed_bytes import read_packed_bytes
from eagle3core.checkpoint.families import completed, read_family, read_windows, refuse_quantised
from eagle3core.checkpoint.fp8 import OF_A_CACHE, Fp8Files, dequantised, find_fp8, read_cache_scales, scale_name
from eagle3core.checkpoint.objections import require_names
from eagle3core.checkpoint.rope import check_pairs, read_rope
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.tensors import BUFFERS, NamedTensors, TensorFiles
from eagle3core.errors import CheckpointError
from eagle3core.geometry import BlockGeometry, CacheScales, TargetGeometry
from eagle3core.speculative import CacheDtype

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BESIDE_WEIGHTS = (BUFFERS, *OF_A_CACHE)  # ends of names that a target may bring and no weight has
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target as loaded.

    Attributes:
        geometry: its shapes.
        weights: by Hugging Face name; `lm_head.weight` is the embedding itself when they are tied. Maps that were kept
            in e4m3 have their scales beside them (`fp8.scale_name`).
        dtype: of every other weight; where they were left as stored, the one to cast them to.
        cache_scales: of each layer, where they were asked for; else none.
    """

    geometry: TargetGeometry
    weights: dict[str, Tensor]
    dtype: torch.dtype
    cache_scales: tuple[CacheScales, ...] = ()


def load_target(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    casts: bool = True,
    cache_dtype: CacheDtype = "as_computed",
    keeps_fp8: bool = False,
) -> TargetCheckpoint:
    """Read, check and cast a target.

    Args:
        path: directory with config.json and safetensors (single or sharded) or pytorch_model.bin.
        dtype: compute dtype; None keeps the dtype in which the embedding is stored.
        device: where the weights go.
        casts: False leaves the weights as they are stored, mapped from their files, and takes no memory for them:
            whoever packs them casts each in turn.
        cache_dtype: "fp8" also reads the scales of such a cache.
        keeps_fp8: maps of layers, and the head, that are stored in e4m3 stay so where kernels read their scales.

    Raises:
        ConfigError, BackendUnavailable: a path, dtype or device that cannot be used; nothing was read.
        CheckpointError: names the file, the key or tensor, and the value.
    """
    check_placement(dtype, device)
    directory = require_directory(path, "target")
    config = Settings.read(directory / "config.json")
    geometry = read_target_geometry(config, directory)
    stored = TensorFiles(directory)
    files = dequantised(stored, find_fp8(config, directory))
    require_counts(config, geometry, len(files.names))
    shapes = dict(target_shapes(geometry))
    given = {name: name for name in files.names if not name.endswith(BESIDE_WEIGHTS)}
    require_names(files, shapes, given, [HEAD] if geometry.tie_word_embeddings else [])
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith(PACKED_BYTES):
            weights[name] = read_packed_bytes(files, name, shape).to(device)
            continue
        kept = _kept(files, name, shape) if keeps_fp8 else None
        if kept is not None:
            weights[name], weights[scale_name(name)] = (tensor.to(device) for tensor in kept)
            continue
        weights[name] = files.read_weight(name, shape, dtype, device, casts=casts)
        dtype = dtype or weights[name].dtype
    if geometry.tie_word_embeddings:
        if HEAD in files and not torch.equal(files.read(HEAD), files.read(EMBEDDING)):
            raise CheckpointError(
                f"{files.where(HEAD)} differs from {EMBEDDING}, but tie_word_embeddings is true",
                "one shared table, or tie_word_embeddings false",
                f"correct tie_word_embeddings in {directory / 'config.json'}",
            )
        weights[HEAD] = weights[EMBEDDING]
    scales = read_cache_scales(stored, geometry.n_layers) if cache_dtype == "fp8" else ()
    return TargetCheckpoint(geometry, weights, dtype or weights[EMBEDDING].dtype, scales)


def _kept(files: NamedTensors, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """A map and its scales as they are stored in FP8; None of others, and of tables."""
    if not isinstance(files, Fp8Files) or name == EMBEDDING:
        return None
    return files.read_kept(name, shape)


def require_counts(config: Settings, geometry: TargetGeometry, n_tensors: int) -> None:
    """Refuse more layers or experts than tensors, before a name is made for each of perhaps millions.

    Raises:
        CheckpointError: names the key.
    """
    most, experts = f"no more than the {n_tensors} tensors there are", geometry.block.experts
    if geometry.n_layers > n_tensors:
        raise config.bad("num_hidden_layers", geometry.n_layers, most)
    if experts is not None and has_own_tensors(experts) and experts.n * geometry.n_expert_layers > n_tensors:
        key = next((key for key in ("num_experts", "num_local_experts") if key in config), "num_experts")
        raise config.bad(key, experts.n, f"in all of the {geometry.n_expert_layers} layers with experts {most}")


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


def read_block_geometry(
    config: Settings,
    *,
    max_position: int = 2048,
    head_dim: int | None = None,
    has_qk_norm: bool = False,
) -> BlockGeometry:
    """Widths of a decoder layer.

    Args:
        max_position, head_dim: where the file has none; None: hidden_size / num_attention_heads.
        has_qk_norm: as in `BlockGeometry`.

    Raises:
        CheckpointError: heads that do not divide, an odd head size, an activation other than SiLU.
    """
    hidden, n_heads = config.count("hidden_size"), config.count("num_attention_heads")
    n_kv_heads = config.count("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise config.bad("num_key_value_heads", n_kv_heads, f"a divisor of num_attention_heads = {n_heads}")
    if head_dim is None and "head_dim" not in config and hidden % n_heads:
        raise config.bad(
            "hidden_size", hidden, f"a multiple of num_attention_heads = {n_heads} when head_dim is absent"
        )
    head_dim = config.count("head_dim", head_dim or hidden // n_heads or None)
    if head_dim % 2:
        raise config.bad("head_dim", head_dim, "an even number: rotary embedding turns pairs")
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise config.bad("hidden_act", config.values["hidden_act"], "'silu': other activations are not built")
    rope = read_rope(config, config.count("max_position_embeddings", max_position))
    check_pairs(config, rope, head_dim)
    return BlockGeometry(
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),  # the Llama configuration's own default
        rope=rope,
        has_qk_norm=has_qk_norm,
    )


def read_target_geometry(config: Settings, directory: Path) -> TargetGeometry:
    """Shapes of a target; the end tokens of generation_config.json are merged in.

    Raises:
        CheckpointError: another architecture, quantised weights, a window of attention, or a missing or unusable key.
    """
    family = read_family(config)
    config = completed(config, family)
    if family.read_experts is None or not is_mxfp4(config):
        refuse_quantised(config, directory)
    n_layers = config.count("num_hidden_layers")
    if n_layers > MOST_LAYERS:  # before anything is listed for each of perhaps a billion
        raise config.bad("num_hidden_layers", n_layers, f"at most {MOST_LAYERS}, far beyond any model's")
    n_positions = config.count("max_position_embeddings", family.max_position)
    windows = read_windows(config, family, n_layers, n_positions)
    block = read_block_geometry(
        config,
        max_position=family.max_position,
        head_dim=family.head_dim,
        has_qk_norm=family.has_qk_norm,
    )
    experts, dense = family.read_experts(config, n_layers) if family.read_experts is not None else (None, ())
    if experts is not None and not dense:  # the width that the config has beside the experts' own is of no layer
        block = replace(block, intermediate_size=experts.intermediate_size)
    if block.rope.kind == "dynamic":  # its frequencies stretch with the session, and reach as much further
        n_positions = int(n_positions * block.rope.factor)
    ends = config.ids("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ends = (*Settings.read(generation).ids("eos_token_id"), *ends)
    return TargetGeometry(
        block=replace(block, experts=experts, has_sinks=family.has_sinks),
        n_layers=n_layers,
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=n_positions,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=family.reads_attention_bias and config.flag("attention_bias"),
        mlp_bias=family.reads_mlp_bias and config.flag("mlp_bias"),
        qkv_bias=family.qkv_bias,
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        dense_layers=dense,
        windows=windows,
    )


def target_shapes(geometry: TargetGeometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor a target must bring, in the order of the forward pass."""
    block = geometry.block
    hidden = block.hidden_size
    qkv, o, mlp = biased_maps(geometry)
    bias = {f"self_attn.{n}_proj": qkv for n in "qkv"} | {f"mlp.{n}_proj": mlp for n in ("gate", "up", "down")}
    bias["self_attn.o_proj"] = o
    yield EMBEDDING, (geometry.vocab_size, hidden)
    for i in range(geometry.n_layers):
        own = geometry.block_of(i)
        for name, shape in layer_shapes(own, hidden):
            yield f"model.layers.{i}.{name}.weight", shape
            if len(shape) == 2 and bias[name]:
                yield f"model.layers.{i}.{name}.bias", shape[:1]
        if own.has_sinks:
            yield f"model.layers.{i}.self_attn.sinks", (own.n_heads,)
        for name, shape in expert_shapes(own.experts, hidden) if own.experts is not None else ():
            yield f"model.layers.{i}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not geometry.tie_word_embeddings:
        yield HEAD, (geometry.vocab_size, hidden)


def biased_maps(geometry: TargetGeometry) -> tuple[bool, bool, bool]:
    """Whether there are biases of q, k and v; of attention's output map; of the feed-forward's maps."""
    return geometry.attention_bias or geometry.qkv_bias, geometry.attention_bias, geometry.mlp_bias


def layer_shapes(block: BlockGeometry, qkv_in: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight of one decoder layer whose q, k and v read `qkv_in` values, but of experts."""
    hidden, inner = block.hidden_size, block.intermediate_size
    yield "input_layernorm", (hidden,)
    yield "self_attn.q_proj", (block.n_heads * block.head_dim, qkv_in)
    yield "self_attn.k_proj", (block.n_kv_heads * block.head_dim, qkv_in)
    yield "self_attn.v_proj", (block.n_kv_heads * block.head_dim, qkv_in)
    if block.has_qk_norm:
        yield "self_attn.q_norm", (block.head_dim,)
        yield "self_attn.k_norm", (block.head_dim,)
    yield "self_attn.o_proj", (hidden, block.n_heads * block.head_dim)
    yield "post_attention_layernorm", (hidden,)
    if block.experts is not None:
        return
    yield "mlp.gate_proj", (inner, hidden)
    yield "mlp.up_proj", (inner, hidden)
    yield "mlp.down_proj", (hidden, inner)
