"""Library attention with the same visible keys, to be timed beside ours on a GPU.

Libraries get contiguous keys and values, gathered from the pages before the timing starts: an advantage that our
kernels do not have. A peer that does not exist for a case raises `BackendUnavailable` with the reason.

Source: torch's scaled_dot_product_attention and flex_attention documentation; merging two softmax parts by their
log-sum-exp after Flash-Decoding (Dao et al.).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels import Case, Tensors

# flashinfer 0.7.2.post1 (decode for 1 token, else prefill with a custom mask), us, by (head size, batch, tokens):
# measured on another H200 run with the same kind of timing, since the package cannot be carried everywhere.
FLASHINFER_US = {
    (128, 1, 1): 41.6, (128, 1, 4): 52.5, (128, 1, 8): 90.6, (128, 1, 16): 92.9,
    (128, 4, 1): 71.6, (128, 4, 4): 89.4, (128, 4, 8): 170.0, (128, 4, 16): 175.0,
    (64, 1, 1): 27.9, (64, 1, 4): 76.8, (64, 1, 8): 78.3, (64, 1, 16): 139.0,
    (64, 4, 1): 43.1, (64, 4, 4): 147.0, (64, 4, 8): 153.0, (64, 4, 16): 281.0,
}  # fmt: skip
FLEX_TOKENS = (4, 8, 16, 32, 64)
# Below 128 tokens torch takes FlexAttention's decoding kernel, whose tile holds all rows of a key head: at 128 rows it
# spills (3.9 ms at 32 tokens, 32/8 heads), at 256 it does not compile. From here on the other kernel is asked for.
FLEX_TOKENS_BY_ROWS = 32


def contiguous(case: Case, inputs: Tensors) -> tuple[Tensor, Tensor, int]:
    """(keys, values `[B, K, S, D]`, old keys) of sequences that are equally long; under a window of one token its own.

    Raises:
        BackendUnavailable: several tokens under a window, of which each sees other old keys.
    """
    prefix = int(inputs["prefix"][0])
    n_keys, block = prefix + inputs["mask"].shape[2], inputs["k"].shape[2]
    used = inputs["tables"][:, : -(-n_keys // block)].long()
    whole = (inputs[name][used].transpose(1, 2).flatten(2, 3)[:, :, :n_keys].contiguous() for name in ("k", "v"))
    keys, values = whole
    window = case.get("window", 0)
    if window and case["tokens"] > 1:
        raise BackendUnavailable(f"{case['tokens']} tokens under a window", "one token", "time it without a window")
    if window:
        gone = max(prefix + 1 - window, 0)
        keys, values, prefix = keys[:, :, gone:].contiguous(), values[:, :, gone:].contiguous(), prefix - gone
    return keys, values, prefix


def sdpa(backend: str) -> Callable[[Case, Tensors], Callable[[], Any]]:
    """torch's attention with one of its backends; several tokens need a mask, which flash does not take."""

    def peer(case: Case, inputs: Tensors) -> Callable[[], Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if case["tokens"] > 1 and backend == "FLASH_ATTENTION":
            raise BackendUnavailable("flash attention with a tree mask", "one query token", "see flash_tail_merge")
        keys, values, prefix = contiguous(case, inputs)
        q = inputs["q"].transpose(1, 2)
        mask = None if case["tokens"] == 1 else _full_mask(inputs["mask"], prefix)

        def call() -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        return call

    return peer


def _full_mask(tree: Tensor, prefix: int) -> Tensor:
    """`[B, 1, T, S]` bool."""
    return F.pad(tree, (prefix, 0), value=True)[:, None]


def flash_tail_merge(case: Case, inputs: Tensors) -> Callable[[], Any]:
    """Flash attention over the old keys, all heads of a group as rows; torch over the new ones; merged."""
    if case["tokens"] == 1:
        raise BackendUnavailable("a prefix and a tail for one token", "more than one token", "see sdpa_flash")
    keys, values, prefix = contiguous(case, inputs)
    q = folded(inputs["q"], keys.shape[1])
    mask = inputs["mask"].repeat_interleave(q.shape[2] // case["tokens"], 1)[:, None]
    old_k, old_v = keys[:, :, :prefix], values[:, :, :prefix]
    new_k, new_v = keys[:, :, prefix:].contiguous(), values[:, :, prefix:].contiguous()

    def call() -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, old_k, old_v)[:2]
        return merged(out, lse, *tail(q, new_k, new_v, mask))

    return call


def folded(q: Tensor, n_kv_heads: int) -> Tensor:
    """`[B, T, H, D]` as `[B, K, T * G, D]`, the query heads of a key head as rows."""
    batch, tokens, n_heads, dim = q.shape
    grouped = q.view(batch, tokens, n_kv_heads, n_heads // n_kv_heads, dim)
    return grouped.transpose(1, 2).reshape(batch, n_kv_heads, -1, dim)


def tail(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the new keys and its log-sum-exp, fp32 `[B, K, rows]`; every row sees a key."""
    scores = (q @ k.mT).float().mul_(q.shape[-1] ** -0.5).masked_fill_(~mask, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def merged(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """One softmax's output from those of its two parts."""
    share = torch.sigmoid(first_lse - second_lse)[..., None].to(first.dtype)
    return torch.lerp(second, first, share)


def flex(case: Case, inputs: Tensors) -> Callable[[], Any]:
    """torch's compiled FlexAttention, with the mask of the first inputs it is given (time does not depend on it)."""
    if case["tokens"] not in FLEX_TOKENS:
        raise BackendUnavailable(f"FlexAttention at {case['tokens']} tokens", f"{FLEX_TOKENS}", "see flash_tail_merge")
    keys, values, prefix = contiguous(case, inputs)
    q = inputs["q"].transpose(1, 2).contiguous()
    key = (case["dim"], case["heads"], case["kv_heads"], case["tokens"], q.shape[0], prefix)
    if key not in _flex:
        _flex.clear()
        _flex[key] = _compiled_flex(inputs["mask"], prefix, keys.shape[2])
    compiled, mask = _flex[key]
    options = {"FORCE_USE_FLEX_ATTENTION": True} if case["tokens"] >= FLEX_TOKENS_BY_ROWS else {}
    return lambda: compiled(q, keys, values, block_mask=mask, enable_gqa=True, kernel_options=options)


_flex: dict[tuple[int, ...], tuple[Any, Any]] = {}  # the newest case's compiled attention and its mask


def _compiled_flex(tree: Tensor, prefix: int, n_keys: int) -> tuple[Any, Any]:
    """Compiled anew for every case: torch compiles a function for a few shapes only, then runs it uncompiled."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True), _flex_mask(tree, prefix, n_keys)


def _flex_mask(tree: Tensor, prefix: int, n_keys: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < prefix) | tree[b, query, (key - prefix).clamp_min(0)]

    return create_block_mask(sees, tree.shape[0], None, tree.shape[1], n_keys, device=str(tree.device))


ATTENTION: dict[str, Callable[[Case, Tensors], Callable[[], Any]]] = {
    "sdpa_flash": sdpa("FLASH_ATTENTION"),
    "sdpa_cudnn": sdpa("CUDNN_ATTENTION"),
    "flex": flex,
    "flash_tail_merge": flash_tail_merge,
}
