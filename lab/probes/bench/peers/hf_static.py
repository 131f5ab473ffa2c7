"""Peer: Hugging Face's Llama or Qwen3 with a StaticCache, compiled with mode="reduce-overhead".

The model's parameters are views into the plain-torch peer's matrices, so both together hold one copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache

from eagle3core.geometry import TargetGeometry
from lab.pairs.planted.disk import rope_config
from lab.probes.bench.peers.fused import FusedTarget
from lab.probes.bench.peers.step_loop import PeerRound, StepLoop

COMPILING_STEPS = 4  # reduce-overhead runs once eagerly and once to record before it replays


class HFStatic:
    """The peer at one point; plain decoding only, as transformers has no EAGLE-3.

    Args:
        target: row-major weights.
        geometry: their shapes.
        context: cached tokens of every sequence.
        first: `[B]` int64 tokens that decoding goes on from.
        successor: planted successors on the CPU, if known.
        n_steps: steps of a round.
    """

    def __init__(
        self,
        target: FusedTarget,
        geometry: TargetGeometry,
        *,
        context: int,
        first: Tensor,
        successor: Tensor | None,
        n_steps: int,
    ) -> None:
        self.name = "hf-static"
        like, block = target.table, geometry.block
        self.context, self.first = context, first.to(like.device)
        self.model = _model(target, geometry)
        self.cache = StaticCache(config=self.model.config, max_cache_len=context + n_steps)
        self.cache.early_initialization(len(first), block.n_kv_heads, block.head_dim, like.dtype, like.device)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.is_compiled = like.is_cuda
        self.forward: Callable[..., Any] = self.model.forward
        if self.is_compiled:
            self.forward = torch.compile(self.model.forward, mode="reduce-overhead")
        self.tokens = self.first.clone()
        self.position = torch.full((1, 1), context, dtype=torch.int64, device=like.device)
        self.loop = StepLoop(self._step, self.tokens, None, successor, n_steps, self._reset)
        if self.is_compiled:
            self._compile()

    def run(self) -> PeerRound:
        """A round of steps."""
        with torch.no_grad():
            return self.loop.run(self.first)

    def facts(self) -> dict[str, Any]:
        """Whether it was compiled."""
        return {"compiled": self.is_compiled, "attention": str(self.model.config._attn_implementation)}

    def _compile(self) -> None:
        """Compile and record the graphs now, so that no round does."""
        with torch.no_grad():
            self._reset()
            for _ in range(COMPILING_STEPS):
                self._step()

    def _reset(self) -> None:
        self.position.fill_(self.context)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)

    def _step(self) -> None:
        if self.is_compiled:
            begin: Any = torch.compiler.cudagraph_mark_step_begin
            begin()
        ids = self.tokens[:, None].clone()
        output = self.forward(
            input_ids=ids, position_ids=self.position, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.tokens.copy_(output.logits[:, -1].argmax(-1))
        self.position += 1


def _model(target: FusedTarget, geometry: TargetGeometry) -> Any:
    """The model over the shared weights, nothing copied."""
    block, like = geometry.block, target.table
    make_config: Any = Qwen3Config if block.has_qk_norm else LlamaConfig
    config = make_config(
        vocab_size=geometry.vocab_size,
        hidden_size=block.hidden_size,
        intermediate_size=block.intermediate_size,
        num_hidden_layers=geometry.n_layers,
        num_attention_heads=block.n_heads,
        num_key_value_heads=block.n_kv_heads,
        head_dim=block.head_dim,
        rms_norm_eps=block.rms_norm_eps,
        max_position_embeddings=geometry.max_position_embeddings,
        tie_word_embeddings=geometry.tie_word_embeddings,
        attn_implementation="sdpa",
        **rope_config(block.rope),
    )
    with torch.device("meta"):
        model: Any = (Qwen3ForCausalLM if block.has_qk_norm else LlamaForCausalLM)(config)
    model.load_state_dict(target.named(block), assign=True)
    # A buffer that no checkpoint holds, so it is still without storage.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(like.device)
    return model.eval().requires_grad_(False)
