"""The target as Hugging Face computes it, stage by stage, over a given sequence and tree of tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Mxfp4Config
from transformers.utils import logging as transformers_logging

from eagle3core.checkpoint import load_target, scale_name
from eagle3core.config import TargetFormat
from eagle3core.weights import Fp8Matrix, quantised
from lab.parity.exact import additive_mask, make_exact, shares_of

_PARTS = "gate", "up", "down"
_EXPERT = re.compile(rf"(.*\.experts)\.(\d+)\.({'|'.join(_PARTS)})_proj\.weight")


def load_model(directory: str | Path, dtype: torch.dtype, attention: str, weights: TargetFormat = "as_stored") -> Any:
    """The model of a checkpoint; weights in 4 bits are decoded, and what no fast attention serves is eager.

    Maps in FP8 hold what their bytes and scales mean, in fp64, whatever `dtype` is: they are never rounded to it.
    `weights`: as of `EngineConfig.target_weights`.
    """
    config = AutoConfig.from_pretrained(str(directory))
    how: dict[str, Any] = {"attn_implementation": attention, "experts_implementation": "eager"}
    if config.model_type == "gpt_oss":
        how["attn_implementation"] = "eager"
        if hasattr(config, "quantization_config"):
            how["quantization_config"] = Mxfp4Config(dequantize=True)
    elif hasattr(config, "quantization_config"):
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **how)
        meant, kept = _meant_by_fp8(directory, dtype, weights)
        model.load_state_dict(_together(meant))
        return _quantised(model, dtype, kept) if weights == "fp8" else model
    with _no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, **how)
    four_bits = hasattr(config, "quantization_config")
    return _quantised(model, dtype, keeps_experts=four_bits) if weights == "fp8" else model


def _meant_by_fp8(
    directory: str | Path, dtype: torch.dtype, weights: TargetFormat
) -> tuple[dict[str, Tensor], frozenset[str]]:
    """The weights of a checkpoint in FP8, fp64: of kept maps what they mean, others after a cast to `dtype`; and the
    names of the kept ones."""
    named = load_target(directory, dtype=dtype, keeps_fp8=weights != "dequantised").weights
    kept = {name: Fp8Matrix(named[name], named[scale_name(name)]) for name in named if scale_name(name) in named}
    scales = {scale_name(name) for name in kept}
    found = {name: tensor.double() for name, tensor in named.items() if name not in scales | kept.keys()}
    return found | {name: matrix.values(torch.float64) for name, matrix in kept.items()}, frozenset(kept)


def _together(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the experts of a layer as transformers 5 holds Qwen3's: `gate_up_proj` and `down_proj`, `[X, rows, k]`."""
    made = {name: tensor for name, tensor in named.items() if not _EXPERT.fullmatch(name)}
    n_experts = Counter(found[1] for found in map(_EXPERT.fullmatch, named) if found and found[3] == "down")
    for layer, n in n_experts.items():
        of_part = {part: [named[f"{layer}.{i}.{part}_proj.weight"] for i in range(n)] for part in _PARTS}
        gate_up = [torch.cat(pair) for pair in zip(of_part["gate"], of_part["up"], strict=True)]
        made[f"{layer}.gate_up_proj"], made[f"{layer}.down_proj"] = torch.stack(gate_up), torch.stack(of_part["down"])
    return made


def _quantised(
    model: Any, dtype: torch.dtype, kept: frozenset[str] = frozenset(), *, keeps_experts: bool = False
) -> Any:  # fmt: skip
    """The model in fp64 with what FP8 with a scale a row leaves of its maps in `dtype`, but for the `kept` ones."""
    model = model.double()
    tables = {model.get_input_embeddings().weight.data_ptr()}
    for name, module in model.named_modules():
        is_map = isinstance(module, nn.Linear) and (name.endswith("_proj") or name == "lm_head")
        if is_map and f"{name}.weight" not in kept and module.weight.data_ptr() not in tables:
            module.weight.data = quantised(module.weight.data.to(dtype)).values(torch.float64)
        if not name.endswith(".experts") or keeps_experts:
            continue
        reads_first = model.config.model_type == "gpt_oss"  # [X, reads, writes]
        for part, stored in (("gate_up", "gate"), ("down", "down")):
            if f"{name}.0.{stored}_proj.weight" not in kept:
                for matrix in getattr(module, f"{part}_proj").data:
                    rows = matrix.T if reads_first else matrix
                    rows.copy_(quantised(rows.to(dtype)).values(torch.float64))
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without the loading bar, which in a notebook would be output that differs from run to run."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


class TargetReference:
    """Hugging Face's model of a checkpoint, with a hook on every stage boundary.

    Args:
        directory: checkpoint of a family that the engine takes, whose model is built as Llama's is.
        dtype: the dtype under test; weights are rounded to it first.
        compute_dtype: the dtype to compute in. Wider than `dtype` for the truth, so that the rounding of the weights
            is no part of the error.
        device: where to compute.
        weights: format of its maps, as of `EngineConfig.target_weights`.
        attention: "eager" or "sdpa", two summation orders of plain torch; an fp64 model computes exactly instead.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        weights: TargetFormat = "as_stored",
        attention: str = "eager",
    ) -> None:
        model = load_model(directory, dtype, attention, weights)
        self.model = model.to(device=device, dtype=compute_dtype).eval().requires_grad_(False)
        # A cast of the whole model also casts the frequencies; they are fp32 constants, so make them anew.
        self.model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
        if compute_dtype == torch.float64:
            make_exact(self.model, self.model.config)
        self.dtype, self.device, self.attention = compute_dtype, device, attention
        self.n_layers = int(model.config.num_hidden_layers)
        self.hidden_size = int(model.config.hidden_size)
        self.vocab_size = int(model.config.vocab_size)
        self.seen: dict[str, Tensor] = {}
        self.cache = DynamicCache()
        self.routers = _routers(self.model.model)
        self.chosen: Mapping[int, Tensor] = {}
        self._hook(self.model.model)

    def _hook(self, llama: Any) -> None:
        """Record what enters and leaves each layer; a layer's attention output is what its second norm reads."""

        def output_of(name: str) -> Callable[..., None]:
            def keep(_module: nn.Module, _args: Any, output: Any) -> None:
                self.seen[name] = (output[0] if isinstance(output, tuple) else output)[0]

            return keep

        def input_of(name: str) -> Callable[..., None]:
            def keep(_module: nn.Module, args: Any) -> None:
                self.seen[name] = args[0][0]

            return keep

        llama.embed_tokens.register_forward_hook(output_of("embed"))
        for i, layer in enumerate(llama.layers):
            layer.post_attention_layernorm.register_forward_pre_hook(input_of(f"{i}.attn"))
            layer.register_forward_hook(output_of(f"{i}.mlp"))
        # The model's own last hidden state is already normed; the raw one is what its norm reads.
        llama.norm.register_forward_pre_hook(input_of("raw"))
        llama.norm.register_forward_hook(output_of("norm"))
        for i, router in self.routers.items():
            router.register_forward_hook(partial(self._route, i))

    def _route(self, layer: int, router: Any, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Keep a router's logits and choice; where `chosen` says otherwise for a row, its experts have that row."""
        logits, shares, indices = output
        if layer in self.chosen:
            taken, own = self.chosen[layer].to(indices.device).long(), indices.sort(dim=1).values
            taken = torch.cat([own[: len(own) - len(taken)], taken])
            is_other = (own != taken).any(dim=1)
            forced = shares_of(logits, taken, getattr(router, "norm_topk_prob", True))
            indices, shares = indices.clone(), shares.clone()
            indices[is_other], shares[is_other] = taken[is_other], forced[is_other].to(shares.dtype)
        self.seen[f"{layer}.router"], self.seen[f"{layer}.experts"] = logits, indices.sort(dim=1).values
        return logits, shares, indices

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], parents: Sequence[int] = (), *, after: int = 0,
        chosen: Mapping[int, Tensor] | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Every stage of one pass, each `[len(tokens), ...]`.

        Args:
            tokens: a sequence, then (optionally) the nodes of a tree that hangs on its end.
            parents: parent of each of those nodes among them, -1 for the root.
            after: how many tokens of the call before these follow, whose keys and values are used again; 0 begins anew.
            chosen: `[n, k]` the experts of the last n tokens, ascending, by layer: so that one near-tie of a router
                is not mistaken for a fault of all that follows. Tokens and layers that are left out choose themselves.

        Returns:
            "embed", "<i>.attn", "<i>.mlp" for each layer, with experts also "<i>.router" (logits) and "<i>.experts"
            (ids), "raw" (input of the final norm), "norm" and "head" (logits).
        """
        n_prefix = len(tokens) - len(parents)
        visible, depths = tree_visibility(after + len(tokens), parents)
        positions = torch.arange(after, after + len(tokens))
        positions[n_prefix:] = after + n_prefix + depths
        n_dropped = int(self.cache.get_seq_length()) - after
        if not after:
            self.cache = DynamicCache()
        elif n_dropped:
            self.cache.crop(-n_dropped)
        self.seen, self.chosen = {}, chosen or {}
        output = self.model.model(
            input_ids=torch.tensor([list(tokens)], device=self.device),
            position_ids=positions[None].to(self.device),
            attention_mask=self._masks(visible, positions, after),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.seen["head"] = self.model.lm_head(output.last_hidden_state)[0]
        return self.seen

    def _masks(self, visible: Tensor, positions: Tensor, after: int) -> Any:
        """Additive masks of the rows after `after`: one, or one a kind of layer where some have a window."""

        def mask(seen: Tensor) -> Tensor:
            return additive_mask(seen[after:].to(self.device), self.dtype)

        config = self.model.config
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if not kinds or not window or "sliding_attention" not in kinds:
            return mask(visible)
        stands = torch.cat([torch.arange(after), positions])
        near = stands[:, None] - stands < window
        return {"full_attention": mask(visible), "sliding_attention": mask(visible & near)}

    def taps(self, stages: dict[str, Tensor], ids: Sequence[int]) -> Tensor:
        """`[T, len(ids) * E]` the inputs of layers `ids` side by side; id n is what the final norm reads."""
        streams = [stages["embed"], *(stages[f"{i}.mlp"] for i in range(self.n_layers - 1)), stages["raw"]]
        return torch.cat([streams[i] for i in ids], dim=-1)


def _routers(llama: Any) -> dict[int, Any]:
    """The routers of the layers that have experts."""
    named = {i: getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None)) for i, layer in enumerate(llama.layers)}
    return {i: router for i, router in named.items() if hasattr(router, "top_k")}


def tree_visibility(n_tokens: int, parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which token sees which `[T, T]` bool, and the depth `[N]` of each tree node.

    A plain sequence is causal; a node sees the whole prefix, its ancestors and itself.
    """
    visible = torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril()
    n_prefix = n_tokens - len(parents)
    depths = torch.zeros(len(parents), dtype=torch.int64)
    visible[n_prefix:, n_prefix:] = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[n_prefix + node, n_prefix:] |= visible[n_prefix + parent, n_prefix:]
            depths[node] = depths[parent] + 1
    return visible, depths
