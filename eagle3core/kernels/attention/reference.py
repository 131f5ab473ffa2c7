"""What attention over a paged cache under a tree mask is, in plain torch.

Source: Vaswani et al., arXiv 1706.03762; paging after Kwon et al., arXiv 2309.06180; docs/requirements.md R-108, R-109.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.kernels.layer.rms_norm import accumulation_dtype


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
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Attention output `[B, T, H, D]` in the dtype of `q`; scores and softmax in fp32 (fp64 for fp64).

    Args:
        q: `[B, T, H, D]` rotated queries.
        k_blocks, v_blocks: `[n_blocks, K, block, D]` one layer's cache, the masked keys already written.
        block_tables: `[B, M]` int32 block ids, -1 past the end.
        prefix_lens: `[B]` keys visible to every query; negative: an empty slot, whose output is 0.
        tree_mask: `[B, T, N]` bool, N >= T: row t may see key prefix + u. The N keys after the prefix are N - T of
            earlier passes and then the T new ones. A row that sees no key at all gives 0.
        window: keys up to this many positions back, the query's own included; 0 for all. With keys of earlier passes it
            hides old keys alone.
        positions: `[B, T]` of the new tokens; needed with a window. Old keys stand at their index.
        sinks: `[H]` a logit a head.
        scales: what cached keys and values are multiplied by.
    """
    wide = accumulation_dtype(q.dtype)
    batch, n_queries, n_heads, head_dim = q.shape
    n_masked = tree_mask.shape[-1]
    block = k_blocks.shape[2]
    used = block_tables[:, : -(-(int(prefix_lens.max()) + n_masked) // block)]  # those of the longest sequence
    held = used.clamp_min(0).long()  # missing blocks are masked off later
    keys, values = (_gather_blocks(blocks, held) for blocks in (k_blocks, v_blocks))
    n_kv_heads = keys.shape[1]
    grouped = q.view(batch, n_queries, n_kv_heads, n_heads // n_kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.einsum("bkgtd,bksd->bkgts", grouped.to(wide), keys.to(wide)) * (head_dim**-0.5 * scales[0])
    visible = visible_keys(prefix_lens, tree_mask, keys.shape[2]) & (prefix_lens >= 0)[:, None, None]
    if window:
        assert positions is not None, "a window needs the positions of the new tokens"
        near = within_window(window, positions, prefix_lens, keys.shape[2])
        if n_masked > n_queries:  # whose positions nobody gives: a row's ancestors are its own nodes, all of them near
            near |= torch.arange(keys.shape[2], device=q.device) >= prefix_lens[:, None, None]
        visible = visible & near
    written = (prefix_lens + n_masked).where(prefix_lens >= 0, 0)  # an empty slot's table may name another's block
    unwritten = torch.arange(keys.shape[2], device=q.device) >= written[:, None]  # [B, S]
    unwritten |= (used < 0).repeat_interleave(block, dim=1)
    # These rows have weight 0, but may be another sequence's, and 0 times an infinity of theirs would be NaN here.
    values = values.to(wide).masked_fill(unwritten[:, None, :, None], 0.0)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        logits = sinks.to(wide).view(1, n_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    weights = weights.masked_fill(~visible.any(-1)[:, None, None, :, None], 0.0)
    mixed = torch.einsum("bkgts,bksd->bkgtd", weights, values) * scales[1]
    return mixed.permute(0, 3, 1, 2, 4).reshape(batch, n_queries, n_heads, head_dim).to(q.dtype)


def visible_keys(prefix_lens: Tensor, tree_mask: Tensor, n_keys: int) -> Tensor:
    """`[B, T, n_keys]` bool: which cached keys each query may read; those after the prefix by `tree_mask`."""
    n_queries, n_masked = tree_mask.shape[1:]
    offset = torch.arange(n_keys, device=prefix_lens.device)[None] - prefix_lens[:, None]  # [B, S]
    index = offset.clamp(0, n_masked - 1).long()[:, None].expand(-1, n_queries, -1)
    in_tree = tree_mask.gather(2, index) & ((offset >= 0) & (offset < n_masked))[:, None]
    return in_tree | (offset < 0)[:, None]


def within_window(window: int, positions: Tensor, prefix_lens: Tensor, n_keys: int) -> Tensor:
    """`[B, T, n_keys]` bool: keys less than `window` positions back."""
    index = torch.arange(n_keys, device=positions.device)[None].expand(len(positions), -1)
    new = (index - prefix_lens[:, None]).clamp(0, positions.shape[1] - 1).long()
    stands = torch.where(index < prefix_lens[:, None], index, positions.gather(1, new))
    return positions[:, :, None] - stands[:, None] < window


def _gather_blocks(blocks: Tensor, held: Tensor) -> Tensor:
    """Contiguous `[B, K, S, D]` keys or values of every sequence, of whole blocks `held: [B, M]`."""
    (batch, n_held), block = held.shape, blocks.shape[2]
    return blocks[held].permute(0, 2, 1, 3, 4).reshape(batch, blocks.shape[1], n_held * block, -1)
