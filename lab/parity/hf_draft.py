"""An EAGLE-3 head built from Hugging Face's modules, Llama's or (where heads are normed) Qwen3's, read from its files
by its own code.

Nothing of the engine is used here: the reference must not share a bug with what it judges.
Source: EAGLE-3, arXiv 2503.01840, section 3; the checkpoint layouts of SafeAILab/EAGLE and SpecForge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from lab.parity.exact import additive_mask, make_exact
from lab.parity.head_files import absolute_ids, read_draft_files, read_meaning, read_taps, read_window
from lab.parity.hf_target import TargetReference


def _layer_config(raw: dict[str, Any]) -> Any:
    """Hugging Face's config of the layer.

    It refuses a width that is no multiple of the heads even where the head size is given, so the width comes later.
    """
    settings = {**raw, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    if raw.get("model_type") == "llama4_text" and raw.get("intermediate_size_mlp"):
        settings["intermediate_size"] = raw["intermediate_size_mlp"]
    if raw.get("head_dim"):
        settings["hidden_size"] = raw["num_attention_heads"] * raw["head_dim"]
    config = LlamaConfig.from_dict(settings)
    config.hidden_size = raw["hidden_size"]
    return config


class DraftReference(nn.Module):
    """One EAGLE-3 layer over its own key/value cache.

    Args:
        directory: draft checkpoint.
        target: the reference target, whose embedding and head are shared where the draft brings none.
        dtype: the dtype under test; weights are rounded to it first.
        taps: explicit tap ids and their convention, or None for the checkpoint's.
        norm_output: as of `PairUnderTest`.
    """

    def __init__(
        self,
        directory: str | Path,
        target: TargetReference,
        *,
        dtype: torch.dtype,
        taps: tuple[Sequence[int], str] | None = None,
        norm_output: str = "",
    ) -> None:
        super().__init__()
        raw, tensors = read_draft_files(Path(directory))
        raw = {**(raw.get("transformer_layer_config") or {}), **raw}  # speculators nests the layer's own keys
        self.meaning, self.window = read_meaning(raw, tensors, norm_output), read_window(raw)
        self.config = _layer_config(raw)
        self.config._attn_implementation = target.attention
        is_last = self.meaning.fusion == "last"
        self.taps = (target.n_layers,) if is_last else read_taps(raw, target.n_layers, *(taps or (None, None)))
        self.final_norm = [target.model.model.norm]  # in a list: it is the target's, no part of this module
        if raw.get("tie_word_embeddings") and "lm_head.weight" not in tensors and "embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
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

        def linear(name: str, reads: int, writes: int) -> nn.Linear:
            return nn.Linear(reads, writes, bias=f"{name}.bias" in tensors)

        def norm(n: int) -> LlamaRMSNorm:
            return LlamaRMSNorm(n, eps=config.rms_norm_eps)

        if "fc.weight" in tensors:
            self.fc = linear("fc", tensors["fc.weight"].shape[1], width)
        if self.meaning.fusion == "all":
            self.input_norm = norm(tensors["input_norm.weight"].numel())
        if self.meaning.fusion == "each":
            self.fc_norm = nn.ModuleList(norm(target.hidden_size) for _ in self.taps)
        self.input_layernorm, self.post_attention_layernorm, self.norm = (norm(width) for _ in range(3))
        self.hidden_norm = norm(width) if "midlayer.hidden_norm.weight" in tensors else nn.Identity()
        self.has_head_norms = "midlayer.self_attn.q_norm.weight" in tensors
        self.self_attn = (Qwen3Attention if self.has_head_norms else LlamaAttention)(config, layer_idx=0)
        # The one change to Hugging Face's attention: q, k and v read embedding and hidden state side by side.
        queries, keys, part = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim, "midlayer."
        self.self_attn.q_proj = linear(f"{part}self_attn.q_proj", 2 * width, queries)
        self.self_attn.k_proj = linear(f"{part}self_attn.k_proj", 2 * width, keys)
        self.self_attn.v_proj = linear(f"{part}self_attn.v_proj", 2 * width, keys)
        self.self_attn.o_proj = linear(f"{part}self_attn.o_proj", queries, width)
        self.mlp = LlamaMLP(config)
        for name in ("gate_proj", "up_proj", "down_proj"):
            plain = getattr(self.mlp, name)
            setattr(self.mlp, name, linear(f"{part}mlp.{name}", plain.in_features, plain.out_features))
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
            if self.meaning.interleaved and name.startswith(("self_attn.q_", "self_attn.k_")):
                half = self.config.head_dim // 2  # pairs of neighbours become pairs half a head apart: the same scores
                source = source.reshape(-1, half, 2, *source.shape[1:]).transpose(1, 2).reshape(source.shape)
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
        h = self.fused(fed) if fuse else fed
        e = self.embed(torch.tensor(list(tokens), device=self.device))
        x = torch.cat([self.input_layernorm(e), self.hidden_norm(h)], dim=-1)
        seen |= {"fc": h, "concat": x}
        cos_sin = self.rotary(x[None], torch.tensor([list(positions)], device=self.device))
        seen |= self._project(x, cos_sin)
        n_old = self.n_cached
        visible = torch.ones(len(tokens), n_old + len(tokens), dtype=torch.bool, device=self.device).tril(n_old)
        if self.window:  # a key at its query's own position is the first of the window
            visible = visible.triu(n_old - self.window + 1)
        attended, _ = self.self_attn(
            hidden_states=x[None],
            position_embeddings=cos_sin,
            attention_mask=additive_mask(visible, self.wide),
            past_key_values=self.cache,
        )
        r = (self.hidden_norm(h) if self.meaning.residual else h) + attended[0]
        fed_forward = self.mlp(self.post_attention_layernorm(r))
        y = r + fed_forward
        normed = self.norm(y)
        # What attention adds to the layer's input, as programs have it: with a normed residual more than its output.
        added = r - h if self.meaning.residual else attended[0]
        seen |= {"attn": added, "mlp": fed_forward, "norm": self.meaning.scale * normed}
        seen["feedback"] = normed if self.meaning.feedback else y
        seen["head"] = self.meaning.scale * self.lm_head(normed)
        return seen

    def fused(self, taps: Tensor) -> Tensor:
        """`[T, Hd]` what enters the layer, of `taps: [T, taps * H]`."""
        if self.meaning.fusion == "last":
            state: Tensor = self.final_norm[0](taps)
            return state
        if self.meaning.fusion == "all":
            taps = self.input_norm(taps)
        if self.meaning.fusion == "each":
            parts = taps.chunk(len(self.taps), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(taps)
        return fused

    def _project(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """q, k and v side by side before, and q and k after, norm and rotation, as the attention module has them."""
        attention = self.self_attn
        q, k, v = (project(x) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        split = [t.view(1, len(x), -1, attention.head_dim) for t in (q, k)]
        if self.has_head_norms:
            split = [norm(t) for norm, t in zip((attention.q_norm, attention.k_norm), split, strict=True)]
        heads = [t.transpose(1, 2) for t in split]
        rotated = [t.transpose(1, 2).reshape(len(x), -1) for t in apply_rotary_pos_emb(*heads, *cos_sin)]
        return {"qkv": torch.cat([q, k, v], dim=-1), "rope": torch.cat(rotated, dim=-1)}
