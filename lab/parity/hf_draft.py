"""An EAGLE-3 head built from Hugging Face's Llama modules, read from its files by its own code.

Nothing of the engine is used here: the reference must not share a bug with what it judges.
Source: EAGLE-3, arXiv 2503.01840, section 3; the checkpoint layouts of SafeAILab/EAGLE and SpecForge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from lab.errors import ExperimentError
from lab.parity.exact import additive_mask, make_exact
from lab.parity.hf_target import TargetReference


def read_draft_tensors(directory: Path) -> dict[str, Tensor]:
    """Tensors of a draft directory on the CPU, under the names SafeAILab gives them.

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
            "*.safetensors, or *.bin as written by torch.save",
            "give the directory of an EAGLE-3 draft checkpoint",
        )
    return {name.removeprefix("model.").replace("layers.0.", "midlayer."): value for name, value in tensors.items()}


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
    name = "eagle_aux_hidden_state_layer_ids"
    if ids is None:
        stated = config.get("eagle_aux_hidden_state_layer_convention") or nested.get(
            "eagle_aux_hidden_state_layer_convention"
        )
        if config.get(name) is not None:
            ids, convention = config[name], stated or "input"
        elif nested.get(name) is not None:
            ids, convention = nested[name], stated or "output"
        else:
            ids, convention = (2, n_layers // 2, n_layers - 3), "input"
    return tuple(sorted(int(i) + (convention == "output") for i in ids))


def _layer_config(raw: dict[str, Any]) -> Any:
    """Hugging Face's config of the layer.

    It refuses a width that is no multiple of the heads even where the head size is given, so the width comes later.
    """
    settings = {**raw, "attention_bias": False, "mlp_bias": False}
    if raw.get("head_dim"):
        settings["hidden_size"] = raw["num_attention_heads"] * raw["head_dim"]
    config = LlamaConfig.from_dict(settings)
    config.hidden_size = raw["hidden_size"]
    return config


def absolute_ids(tensors: dict[str, Tensor], draft_vocab: int) -> Tensor:
    """`[Vd]` int64 target id of each draft id; `d2t` holds offsets, and without it both vocabularies are one."""
    ids = torch.arange(draft_vocab)
    return ids + tensors["d2t"].to(torch.int64) if "d2t" in tensors else ids


class DraftReference(nn.Module):
    """One EAGLE-3 layer over its own key/value cache.

    Args:
        directory: draft checkpoint.
        target: the reference target, whose embedding and head are shared where the draft brings none.
        dtype: the dtype under test; weights are rounded to it first.
        taps: explicit tap ids and their convention, or None for the checkpoint's.
    """

    def __init__(
        self,
        directory: str | Path,
        target: TargetReference,
        *,
        dtype: torch.dtype,
        taps: tuple[Sequence[int], str] | None = None,
    ) -> None:
        super().__init__()
        raw = json.loads((Path(directory) / "config.json").read_text())
        raw = {**raw.get("transformer_layer_config", {}), **raw}  # speculators nests the layer's own keys
        tensors = read_draft_tensors(Path(directory))
        self.config = _layer_config(raw)
        self.config._attn_implementation = target.attention
        self.taps = read_taps(raw, target.n_layers, *(taps or (None, None)))
        self._build(tensors, target)
        self.to(device=target.device)
        self._fill(tensors, dtype, target)
        self.target_ids = absolute_ids(tensors, self.lm_head.out_features)
        if target.dtype == torch.float64:
            make_exact(self, self.config)
        self.wide = target.dtype
        self.device = target.device
        self.cache = DynamicCache()
        self.eval()

    def _build(self, tensors: dict[str, Tensor], target: TargetReference) -> None:
        config, width = self.config, self.config.hidden_size
        head_dim = config.head_dim
        self.fc = nn.Linear(tensors["fc.weight"].shape[1], width, bias=False)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            LlamaRMSNorm(width, eps=config.rms_norm_eps) for _ in range(4)
        )
        self.self_attn = LlamaAttention(config, layer_idx=0)
        # The one change to Hugging Face's attention: q, k and v read embedding and hidden state side by side.
        self.self_attn.q_proj = nn.Linear(2 * width, config.num_attention_heads * head_dim, bias=False)
        self.self_attn.k_proj = nn.Linear(2 * width, config.num_key_value_heads * head_dim, bias=False)
        self.self_attn.v_proj = nn.Linear(2 * width, config.num_key_value_heads * head_dim, bias=False)
        self.mlp = LlamaMLP(config)
        self.rotary = LlamaRotaryEmbedding(config=config)
        embedding = tensors.get("embed_tokens.weight")
        head = tensors.get("lm_head.weight")
        shared_head = target.model.lm_head.weight
        self.embed = nn.Embedding(*(embedding.shape if embedding is not None else (target.vocab_size, width)))
        self.lm_head = nn.Linear(width, (head if head is not None else shared_head).shape[0], bias=False)

    def _fill(self, tensors: dict[str, Tensor], dtype: torch.dtype, target: TargetReference) -> None:
        """Copy the weights in, rounded to `dtype`, held in the dtype of the target reference."""
        layer = "midlayer."
        sources = {
            "embed.weight": tensors.get("embed_tokens.weight", target.model.model.embed_tokens.weight),
            "lm_head.weight": tensors.get("lm_head.weight", target.model.lm_head.weight),
        }
        for name, parameter in self.named_parameters():
            own = name if name in tensors else layer + name
            source = sources[name] if name in sources else tensors[own]
            parameter.data = source.detach().to(target.device).to(dtype).to(target.dtype).reshape(parameter.shape)
            parameter.requires_grad_(False)

    def target_token(self, logits: Tensor) -> int:
        """Target id of the largest of `logits: [Vd]`, the lowest id among equals; -1 when none is largest (NaN)."""
        largest = (logits == logits.max()).nonzero()
        return int(self.target_ids[int(largest[0])]) if len(largest) else -1

    @property
    def n_cached(self) -> int:
        """Entries in the key/value cache."""
        return int(self.cache.get_seq_length())

    def forget(self, n_entries: int) -> None:
        """Drop the newest `n_entries` entries: those a chain wrote from its own states."""
        if n_entries:
            self.cache.crop(-n_entries)

    @torch.no_grad()
    def run(self, tokens: Sequence[int], positions: Sequence[int], fed: Tensor, *, fuse: bool) -> dict[str, Tensor]:
        """Every stage of one pass over `len(tokens)` new entries, each `[T, ...]`; their keys and values are kept.

        Args:
            tokens: target ids, one position ahead of their features.
            positions: rotary positions.
            fed: `[T, taps * H]` captured target states with `fuse`, else `[T, Hd]` the draft's own fed-back state.
            fuse: apply `fc`.
        """
        seen: dict[str, Tensor] = {("taps" if fuse else "feedback_in"): fed}
        h = self.fc(fed) if fuse else fed
        e = self.embed(torch.tensor(list(tokens), device=self.device))
        x = torch.cat([self.input_layernorm(e), self.hidden_norm(h)], dim=-1)
        seen |= {"fc": h, "concat": x}
        cos_sin = self.rotary(x[None], torch.tensor([list(positions)], device=self.device))
        seen |= self._project(x, cos_sin)
        n_old = self.n_cached
        visible = torch.ones(len(tokens), n_old + len(tokens), dtype=torch.bool, device=self.device).tril(n_old)
        attended, _ = self.self_attn(
            hidden_states=x[None],
            position_embeddings=cos_sin,
            attention_mask=additive_mask(visible, self.wide),
            past_key_values=self.cache,
        )
        r = h + attended[0]
        fed_forward = self.mlp(self.post_attention_layernorm(r))
        y = r + fed_forward
        normed = self.norm(y)
        seen |= {"attn": attended[0], "mlp": fed_forward, "feedback": y, "norm": normed}
        seen["head"] = self.lm_head(normed)
        return seen

    def _project(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """q, k and v side by side before, and q and k after, rotation, as the attention module computes them."""
        attention = self.self_attn
        q, k, v = (project(x) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        heads = [t.view(1, len(x), -1, attention.head_dim).transpose(1, 2) for t in (q, k)]
        rotated = [t.transpose(1, 2).reshape(len(x), -1) for t in apply_rotary_pos_emb(*heads, *cos_sin)]
        return {"qkv": torch.cat([q, k, v], dim=-1), "rope": torch.cat(rotated, dim=-1)}
