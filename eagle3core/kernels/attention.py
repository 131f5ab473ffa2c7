"""Attention of a few query tokens over a paged cache, with a tree mask over the newest keys.

out = softmax(q k^T / sqrt(D), masked) v, where every key before `prefix_lens` is visible and the T keys after it are
visible by `tree_mask`. A chain or a prefill chunk is the lower-triangular mask.
Source: Vaswani et al., arXiv 1706.03762; paging after Kwon et al., arXiv 2309.06180.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.kernels.rms_norm import accumulation_dtype


def paged_attention_reference(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor,
    *,
    window: int = 0,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output `[B, T, H, D]` in the dtype of `q`; scores and softmax in fp32 (fp64 for fp64).

    Args:
        q: `[B, T, H, D]` rotated queries.
        k_blocks, v_blocks: `[n_blocks, K, block, D]` one layer's cache, the T new keys already written.
        block_tables: `[B, M]` int32 block ids, -1 past the end.
        prefix_lens: `[B]` keys visible to every query; negative: an empty slot, whose output is 0.
        tree_mask: `[B, T, T]` bool, row t may see new key u. A row that sees no key at all gives 0.
        window: keys up to this many positions back, the query's own included; 0 for all.
        positions: `[B, T]` of the new tokens; needed with a window. Old keys stand at their index.
        sinks: `[H]` a logit a head.
    """
    wide = accumulation_dtype(q.dtype)
    batch, n_queries, n_heads, head_dim = q.shape
    keys, values = (_gather_blocks(blocks, block_tables, prefix_lens, n_queries) for blocks in (k_blocks, v_blocks))
    n_kv_heads = keys.shape[1]
    grouped = q.view(batch, n_queries, n_kv_heads, n_heads // n_kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.einsum("bkgtd,bksd->bkgts", grouped.to(wide), keys.to(wide)) * head_dim**-0.5
    visible = visible_keys(prefix_lens, tree_mask, keys.shape[2]) & (prefix_lens >= 0)[:, None, None]
    if window:
        assert positions is not None, "a window needs the positions of the new tokens"
        visible = visible & _within(window, positions, prefix_lens, keys.shape[2])
    unwritten = torch.arange(keys.shape[2], device=q.device) >= (prefix_lens + n_queries)[:, None]  # [B, S]
    # These rows have weight 0, but may be another sequence's, and 0 times an infinity of theirs would be NaN here.
    values = values.masked_fill(unwritten[:, None, :, None], 0.0)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        logits = sinks.to(wide).view(1, n_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    weights = weights.masked_fill(~visible.any(-1)[:, None, None, :, None], 0.0)
    mixed = torch.einsum("bkgts,bksd->bkgtd", weights, values.to(wide))
    return mixed.permute(0, 3, 1, 2, 4).reshape(batch, n_queries, n_heads, head_dim).to(q.dtype)


def visible_keys(prefix_lens: Tensor, tree_mask: Tensor, n_keys: int) -> Tensor:
    """`[B, T, n_keys]` bool: which cached keys each query may read."""
    n_queries = tree_mask.shape[-1]
    offset = torch.arange(n_keys, device=prefix_lens.device)[None] - prefix_lens[:, None]  # [B, S]
    index = offset.clamp(0, n_queries - 1).long()[:, None].expand(-1, n_queries, -1)
    in_tree = tree_mask.gather(2, index) & ((offset >= 0) & (offset < n_queries))[:, None]
    return in_tree | (offset < 0)[:, None]


def _within(window: int, positions: Tensor, prefix_lens: Tensor, n_keys: int) -> Tensor:
    """`[B, T, n_keys]` bool: keys less than `window` positions back."""
    index = torch.arange(n_keys, device=positions.device)[None].expand(len(positions), -1)
    new = (index - prefix_lens[:, None]).clamp(0, positions.shape[1] - 1).long()
    stands = torch.where(index < prefix_lens[:, None], index, positions.gather(1, new))
    return positions[:, :, None] - stands[:, None] < window


def _gather_blocks(blocks: Tensor, block_tables: Tensor, prefix_lens: Tensor, n_new: int) -> Tensor:
    """Contiguous `[B, K, S, D]` keys or values of every sequence, up to the longest, rounded up to whole blocks."""
    block_size = blocks.shape[2]
    longest = int(prefix_lens.max()) + n_new
    used = block_tables[:, : -(-longest // block_size)].clamp_min(0).long()  # missing blocks are masked off later
    batch, n_used = used.shape
    return blocks[used].permute(0, 2, 1, 3, 4).reshape(batch, blocks.shape[1], n_used * block_size, -1)
