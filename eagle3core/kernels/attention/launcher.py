"""Attention of a few query tokens over a paged cache, with a tree mask over the newest keys.

out = softmax(q k^T / sqrt(D), masked) v, where every key before `prefix_lens` is visible and the T keys after it are
visible by `tree_mask`. A chain or a prefill chunk is the lower-triangular mask. Where a tree is read a level at a time,
the keys that earlier passes left lie between the prefix and the T of this pass; they are masked keys too, `earlier` of
them. A window lets a query at position p see positions p - window + 1 .. p only; a sink is a learned logit of a head
that takes part in the denominator only.

Two launches: `attention_streams` or `attention_splits` (up to 32 rows a key head), `attention_rows` or
`attention_group` (more), which leave one sum a split of the keys, then `attention_combine`; where a block of
`attention_group` has all splits of its rows, it leaves their output and nothing follows. All add in the same order
(`layout`), so bits do not depend on T, on the batch or on how many keys there are. Lengths are read on the device; the
grid does not depend on them.
Keys of earlier steps are read before the kernel before has finished: lengths, tables and cache rows below
`prefix_lens` are `const` here, so launch with `overlap=False` what follows a kernel that wrote them.

Source: Vaswani et al., arXiv 1706.03762; paging after Kwon et al., arXiv 2309.06180; docs/requirements.md R-108, R-109.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.attention.combine import combine_rows
from eagle3core.kernels.attention.layout import BLOCK_SHIFT, EARLIER_BITS, LOG2_E, UNIT, Shape, shape_over
from eagle3core.kernels.attention.paths import PLACES
from eagle3core.kernels.attention.plan import Plan, choose_plan, order_of
from eagle3core.kernels.attention.reference import paged_attention_reference
from eagle3core.kernels.attention.variant import attention_variant, combine_variant
from eagle3core.kernels.card import DTYPES, E4M3, PLAIN_TORCH, Launch, Op, Value
from eagle3core.kernels.gemm.order.pack import OrderedRows
from eagle3core.kernels.tensor_map import tensor_map
from eagle3core.kernels.tree.mask_words import unpack_words

MOST_TOKENS, MOST_MASKED, MOST_GROUP, DIMS = 64, 256, 16, (64, 128)
MOST_WINDOW = 1 << (31 - EARLIER_BITS)  # what is left of an int32
MOST_PATH = PLACES - UNIT + 1  # tokens, wherever in a unit the prefix ends


def attention_scratch(
    shape: Shape, batch: int, tokens: int, n_kv_heads: int, device: torch.device
) -> tuple[Tensor, ...]:
    """(partial, tops_sums): the splits' sums `[B, K, splits, T*G, D]` and their maxima and weights `[..., 2]`, fp32.

    They may be shared by all layers and by all launches of at most this size.
    """
    rows = (batch, n_kv_heads, shape.splits, tokens * shape.group)
    partial = torch.full((*rows, shape.dim), float("nan"), dtype=torch.float32, device=device)
    return partial, torch.full((*rows, 2), float("nan"), dtype=torch.float32, device=device)


def attention(
    arch: str,
    *,
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    prefix_lens: Tensor,
    masks: Tensor,
    out: Tensor,
    scratch: tuple[Tensor, ...],
    order: tuple[int, int] | None = None,
    plan: Plan | None = None,
    window: int = 0,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    counters: Tensor | None = None,
    earlier: int = 0,
    path_len: int = 0,
    ordered: OrderedRows | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> list[Launch]:
    """The launches of one layer's attention: two, or one where its blocks have all keys of their rows.

    Args:
        q, out: `[B, T, H, D]` bf16 or fp16.
        k_blocks, v_blocks: `[n_blocks, K, 64, D]`; the T new keys are written by the kernel before at the latest.
            Rows of masked keys that a mask hides from everyone must still be finite.
        block_tables: `[B, M]` int32. prefix_lens: `[B]` int32, negative for an empty slot.
        masks: `tree.mask_words.pack_words`, `[B, T, W]` int32 with room for earlier + T bits; bit j is key prefix + j.
        scratch: of `attention_scratch`.
        order: (splits, streams), by default `order_of`.
        plan: by default `choose_plan`.
        window, positions, sinks: as in the reference; positions `[B, T]` int32 at least prefix_lens, sinks fp32.
        counters: `[4]` int32, added to: tiles of 16 keys and the rows of one warp in all, outside the span of the
            keys, hidden by the mask, executed. None: nothing is counted.
        earlier: keys that passes before this one left between the prefix and the T new ones, in every sequence; a
            window hides none of them. One kernel serves every number, for masks of as many words.
        path_len: tokens of the longest path, the root included, where the T keys are the nodes of a tree, parents
            before children and no two of a path at one depth; 0 for a chain or a chunk. A row then adds its ancestors
            at their positions, to the bits of plain decoding after the same path. Not with earlier keys.
        scales: of a cache in e4m3: what its keys and values are multiplied by. That of keys joins the scale of scores,
            that of values the last division, so no entry is rounded once more.
        ordered: of `gemm.ordered_input`, where the output is written a second time, for the map that follows.

    Raises:
        KernelLimit: a shape these kernels are not made for.
    """
    batch, tokens, n_heads, dim = q.shape
    n_kv_heads = k_blocks.shape[1]
    check_limits(
        q.dtype, dim, n_heads, n_kv_heads, tokens, k_blocks.shape[2], earlier=earlier, window=window, path_len=path_len
    )
    assert not path_len or not earlier, "paths are of the nodes of one pass"
    words, least = masks.shape[-1], -(-(earlier + tokens) // 32)
    assert words >= least, f"{words} mask words for {earlier} + {tokens} keys, which take {least}"
    has_more = earlier > 0 or words > least  # than the T new keys, for which the mask of a pass has just the words
    splits, streams = order or order_of(arch, n_kv_heads, dim)
    is_fp8 = k_blocks.dtype == E4M3
    shape = shape_over(arch, is_fp8, DTYPES[q.dtype], dim, n_heads // n_kv_heads, (splits, streams))
    room = block_tables.shape[1] * k_blocks.shape[2]
    room = min(room, window + earlier + tokens) if window else room  # keys that are read at all
    plan = plan or choose_plan(arch, shape, tokens, batch, n_kv_heads, room, paths=path_len > 0)
    plan = replace(plan, counting=counters is not None)
    partial, tops_sums = scratch
    scale = dim**-0.5 * LOG2_E * scales[0]
    of_values = {"v_scale": scales[1]} if shape.is_fp8 else {}
    behind = {"window": window}
    if path_len or has_more:
        behind = {"path_len" if path_len else "earlier": (path_len or earlier) | window << EARLIER_BITS}
    further_words = words if has_more else 0
    whole = plan.is_whole(shape, paths=path_len > 0, words=further_words)
    variant = attention_variant(
        arch, shape, tokens, plan, words=further_words, paths=path_len > 0, windowed=window > 0, whole=whole
    )
    for_map = {"ordered": ordered.words if ordered else None, "x_tiles": ordered.x_tiles if ordered else 1}
    more: dict[str, Value] = {}
    if plan.grouped:
        more = {"k_map": tensor_map(k_blocks, UNIT), "v_map": tensor_map(v_blocks, UNIT), "sinks": None, "out": None}
        more |= {"ordered": None, "x_tiles": 1}
    if whole:
        more |= {"sinks": sinks, "out": out, **for_map}
    first = variant.launch(
        (plan.row_blocks(tokens * shape.group) * -(-splits // plan.run), n_kv_heads, batch),
        q=q, k=k_blocks, v=v_blocks, tables=block_tables, prefix=prefix_lens, masks=masks, positions=positions,
        partial=partial, tops_sums=tops_sums, counters=counters, tokens=tokens, table_width=block_tables.shape[1],
        run=plan.run, scale=scale, **behind, **more,
    )  # fmt: skip
    if whole:
        return [first]
    second = combine_variant(arch, shape, joined=plan.is_joined(shape), ordered=ordered is not None).launch(
        (-(-tokens * shape.group // combine_rows(dim)), n_kv_heads, batch),
        partial=partial, tops_sums=tops_sums, prefix=prefix_lens, sinks=sinks, out=out,
        words=for_map["ordered"], tokens=tokens, newest=earlier + tokens, x_tiles=for_map["x_tiles"], scale=scale,
        **of_values,
    )  # fmt: skip
    return [first, second]


def attention_meaning(
    *,
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    prefix_lens: Tensor,
    masks: Tensor,
    out: Tensor,
    scratch: tuple[Tensor, ...] = (),
    order: tuple[int, int] | None = None,
    earlier: int = 0,
    path_len: int = 0,
    ordered: OrderedRows | None = None,
    window: int = 0,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """What `attention` computes, in plain torch, for any head size, group and block.

    `scratch`, `order`, `path_len` and `ordered` are the kernels' own and not read.
    """
    if int(prefix_lens.max()) < 0:
        out.zero_()
        return
    seen = unpack_words(masks, earlier + q.shape[1])
    wide = q.double() if q.dtype in DTYPES else q  # see `gemm_meaning`
    cache = (k_blocks, v_blocks, block_tables, prefix_lens)
    out.copy_(
        paged_attention_reference(wide, *cache, seen, window=window, positions=positions, sinks=sinks, scales=scales)
    )


ATTENTION = Op("attention", attention, attention_meaning)


def check_limits(
    dtype: torch.dtype, dim: int, n_heads: int, n_kv_heads: int, tokens: int, block: int, *, earlier: int = 0,
    window: int = 0, path_len: int = 0,
) -> None:  # fmt: skip
    """Refuse what the kernels are not made for; `earlier`, `window` and `path_len` as in `attention`.

    Raises:
        KernelLimit: naming the value, what is allowed, and what to do.
    """
    heads_fit = n_heads % n_kv_heads == 0 and n_heads // n_kv_heads <= MOST_GROUP
    heads, most = (
        f"{n_heads} query heads over {n_kv_heads} key heads",
        f"a multiple, at most {MOST_GROUP} times as many",
    )
    refused = [
        (dtype in DTYPES, f"attention over {dtype}", "torch.bfloat16 or torch.float16"),
        (dim in DIMS, f"a head size of {dim}", f"one of {DIMS}"),
        (heads_fit, heads, most),
        (1 <= tokens <= MOST_TOKENS, f"{tokens} query tokens a sequence", f"1 to {MOST_TOKENS}"),
        (block == 1 << BLOCK_SHIFT, f"cache blocks of {block} tokens", f"{1 << BLOCK_SHIFT}"),
        (
            earlier >= 0 and earlier + tokens <= MOST_MASKED,
            f"{earlier} earlier and {tokens} new keys under a mask",
            f"0 or more earlier ones, {MOST_MASKED} in all",
        ),
        (path_len <= MOST_PATH, f"paths of {path_len} tokens in a tree", f"at most {MOST_PATH}"),
        (0 <= window < MOST_WINDOW, f"a window of {window}", f"0 for none, up to {MOST_WINDOW - 1}"),
    ]
    for is_fine, value, allowed in refused:
        if not is_fine:
            raise KernelLimit(value, allowed, f"{PLAIN_TORCH}; or choose another setting")
