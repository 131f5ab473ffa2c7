"""An EAGLE-1 head in plain fp64, beside the witness that `oracle` is: nothing of the engine is used."""

from __future__ import annotations

from pathlib import Path

import torch
from oracle import Chain, Draft, Layer, Target, Tokens, first_largest, read_config, read_tensors, rms_norm
from torch import Tensor


class EagleLayer(Layer):
    """A Llama layer whose q, k and v have biases where the file has them."""

    def linear(self, part: str, x: Tensor) -> Tensor:
        y = super().linear(part, x)
        return y + self.tensors.get(f"{self.prefix}{part}.bias", torch.zeros(()))


class Eagle(Draft):
    """An EAGLE-1 head under SafeAILab's names (`fc`, `layers.0.*`, `embed_tokens`): arXiv 2401.15077, section 3.

    It joins each token's embedding with the state before it, which is the target's after its final norm or the head's
    own output; its layer has no norm before attention, and nothing stands between it and the target's head.
    """

    def __init__(self, directory: str | Path, target: Target) -> None:
        self.config, self.tensors = read_config(directory), read_tensors(directory)
        self.target, self.head = target, target.head
        self.eps = float(self.config.get("rms_norm_eps", 1e-6))
        self.embedding = self.tensors.get("embed_tokens.weight", target.embedding)
        self.layer = EagleLayer(self.config, self.tensors, "layers.0.")
        self.target_ids = list(range(len(self.head)))

    def features(self, tokens: Tokens) -> Tensor:
        """`[T, H]` what the target's head reads."""
        return rms_norm(self.target.streams(tokens)[-1], self.target.tensors["model.norm.weight"], self.target.eps)

    def outputs(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        """`[n, H]` the layer's outputs for states `hidden: [n, H]` and a token each."""
        h = torch.cat([self.embedding[torch.tensor(list(tokens))], hidden], dim=-1) @ self.tensors["fc.weight"].T
        h = h + self.tensors.get("fc.bias", torch.zeros(()))
        r = h + self.layer.attention(h)
        return r + self.layer.mlp(rms_norm(r, self.tensors["layers.0.post_attention_layernorm.weight"], self.eps))

    def chain(self, tokens: Tokens, k: int) -> Chain:
        """The `k` tokens drafted after `tokens`, of which the target has read all but the last."""
        states, entries, drafted, logits = self.features(tokens[:-1]), list(tokens[1:]), [], []
        for _ in range(k):
            y = self.outputs(states, entries)[-1:]
            states, logits = torch.cat([states, y]), [*logits, (y @ self.head.T)[0]]
            drafted.append(first_largest(logits[-1]))
            entries.append(drafted[-1])
        return Chain(drafted, torch.stack(logits), states[-k:])
