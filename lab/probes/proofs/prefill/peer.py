"""Peer: plain torch over the same prompts, F.linear, rms_norm and scaled_dot_product_attention, launch by launch.

One layer's weights, random, stand for all layers: their bytes are many times what a cache holds, and values change no
time. The head runs over the prompts' last tokens, as in the engine; nothing is drafted, and no cache is written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.geometry import TargetGeometry
from lab.rows.clock import measure


class TorchPrefill:
    """The layers of a geometry on a device, in a dtype."""

    def __init__(self, target: TargetGeometry, dtype: torch.dtype, device: torch.device) -> None:
        block = target.block
        self.target, self.block, self.dtype, self.device = target, block, dtype, device
        heads, width = (block.n_heads + 2 * block.n_kv_heads) * block.head_dim, block.hidden_size
        self.qkv, self.out = self._map(heads, width), self._map(width, block.n_heads * block.head_dim)
        self.gate_up = self._map(2 * block.intermediate_size, width)
        self.down = self._map(width, block.intermediate_size)
        self.head, self.gain = self._map(target.vocab_size, width), torch.ones(width, dtype=dtype, device=device)

    def ms(self, n_prompts: int, n_tokens: int, repeats: int = 3) -> float:
        """Median time to the logits of `n_prompts` prompts' last tokens, milliseconds."""
        x = torch.randn(n_prompts, n_tokens, self.block.hidden_size, device=self.device).to(self.dtype)
        with torch.no_grad():
            timing = measure(lambda: self._logits(x), warmup=1, repeats=repeats, device=self.device.type)
        return timing.median_us / 1e3

    def _map(self, n: int, k: int) -> Tensor:
        return torch.randn(n, k, dtype=self.dtype, device=self.device).mul_(k**-0.5)

    def _logits(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device)[:, None, None] / self.block.head_dim
        turn = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))  # `[T, 1, 1]`: rotation costs what it costs
        for _ in range(self.target.n_layers):
            x = x + self._attention(self._norm(x), *turn)
            gate, up = F.linear(self._norm(x), self.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, self.down)
        return F.linear(self._norm(x[:, -1]), self.head)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.gain, self.block.rms_norm_eps)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        block = self.block
        heads = F.linear(x, self.qkv).view(*x.shape[:2], -1, block.head_dim)
        turned, v = heads[:, :, : -block.n_kv_heads], heads[:, :, -block.n_kv_heads :]
        turned = torch.addcmul(turned * cos, turned.roll(block.head_dim // 2, -1), sin)
        q, k = (t.transpose(1, 2) for t in turned.tensor_split([block.n_heads], dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out)


def product_tflop_per_s(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """10^12 operations a second of the library's product of two `[n, n]` matrices in this run."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in "ab")
    timing = measure(lambda: F.linear(a, b), warmup=2, repeats=9, device=device.type)
    return 2 * n**3 / timing.median_us / 1e6
