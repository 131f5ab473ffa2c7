"""Ways to call torch's attention over all keys of one sequence with no mask, which no tree allows: bounds, not peers.

A mask keeps the fastest kernels away and costs those that take one, so what the best of these takes is less than what
a library will take for a tree. Two changes give each backend its best: the query heads of a key head as rows of one
head, so that keys are read once; and the keys in pieces, each as a sequence of its own, so that all processors work.
Pieces are left unmerged, which flatters them.

Source: folding and pieces after Flash-Decoding (Dao et al.); torch's scaled_dot_product_attention documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.probes.kernels.attention_peers import folded

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


@dataclass(frozen=True)
class Way:
    """One way to call a backend.

    Attributes:
        backend: a name of `BACKENDS`.
        is_folded: the query heads of a key head are rows of one head.
        n_pieces: of the keys, each a sequence of its own.
    """

    backend: str
    is_folded: bool = True
    n_pieces: int = 1

    @property
    def name(self) -> str:
        """As rows name it, such as `sdpa_flash_folded_16`."""
        return f"sdpa_{self.backend}{'_folded' * self.is_folded}{f'_{self.n_pieces}' if self.n_pieces > 1 else ''}"

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the backend is given: queries `[P, heads, rows, D]`, keys and values `[P, K, S / P, D]`, P pieces.

        Args:
            q: `[1, T, H, D]`. k, v: `[1, K, S, D]`, contiguous; S a multiple of the pieces.
        """
        rows = folded(q, k.shape[1]) if self.is_folded else q.transpose(1, 2)
        if self.n_pieces == 1:
            return rows.contiguous(), k, v
        n_heads, n_keys, dim = k.shape[1:]
        pieces = (n_heads, self.n_pieces, n_keys // self.n_pieces, dim)
        keys, values = (each[0].view(pieces).transpose(0, 1) for each in (k, v))
        rows = rows.expand(self.n_pieces, -1, -1, -1)
        return rows if self.backend == "flash" else rows.contiguous(), keys, values  # cuDNN's plans know no stride of 0

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """The call over its `operands`."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, BACKENDS[self.backend])

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=not self.is_folded)

        return call


def whole_ways() -> list[Way]:
    """Calls that give the attention of all keys."""
    return [Way(backend, folds) for backend in ("flash", "cudnn", "efficient") for folds in (False, True)]


def pieced_ways(n_keys: int) -> list[Way]:
    """Calls that leave pieces to be merged, none of fewer than 64 keys, a tile's least."""
    counts = [n for n in (4, 8, 16, 32) if n_keys // n >= 64]
    return [Way(backend, n_pieces=n) for backend in ("flash", "cudnn") for n in counts]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition over a call's operands, at their precision."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    weights = ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.matmul(weights, v)


def products(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """The two plain products of attention over folded rows, `scores` and `output`; no softmax between them.

    Scores `[K, rows, S]` bf16 are written to memory by the one and read by the other, which attention avoids.
    """
    rows = folded(q, k.shape[1])[0]
    weights = torch.rand(*rows.shape[:2], k.shape[2], device=q.device).to(q.dtype)
    return {"scores": lambda: torch.matmul(rows, k[0].mT), "output": lambda: torch.matmul(weights, v[0])}
