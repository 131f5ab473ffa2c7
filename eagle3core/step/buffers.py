"""Device memory of a model's passes: activations, scratch and rotary tables, allocated once for the largest pass.

Every smaller pass uses the first rows of the same tensors, so addresses stay what they were when a graph was captured
(docs/requirements.md R-25).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.geometry import BlockGeometry, ExpertsGeometry
from eagle3core.kernels.attention.launcher import attention_scratch
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.plan import order_of
from eagle3core.kernels.card import DTYPES
from eagle3core.kernels.experts.maps.form import x_tiles_for
from eagle3core.kernels.experts.route import Routed
from eagle3core.kernels.experts.routing.lists import Lists, new_lists
from eagle3core.kernels.isa.by_row import one_up
from eagle3core.kernels.layer.embedding import partials_pitch
from eagle3core.kernels.layer.rms_norm import accumulation_dtype
from eagle3core.weights.rope import rope_table


def rows_of(tensor: Tensor, *shape: int) -> Tensor:
    """The first elements of a tensor, as a contiguous tensor of another shape at the same address."""
    n = 1
    for size in shape:
        n *= size
    return tensor.view(-1)[:n].view(shape)


def routed_rows(act: Activations, n: int) -> Routed:
    """What the router leaves of `n` rows."""
    rows = _experts_of(act)
    return Routed(*(rows_of(t, n, t.shape[1]) for t in (rows.logits, rows.chosen, rows.shares)))


def expert_rows(act: Activations, n: int, k: int) -> tuple[Tensor, Tensor]:
    """`[n, k, F]` and `[n, k, E]`: what chosen experts give, within and in the end."""
    rows = _experts_of(act)
    inner, parts = (rows_of(t, n, k, t.shape[1] // k) for t in (rows.inner, rows.parts))
    return inner, parts


def expert_lists(act: Activations, n: int) -> Lists | None:
    """Which of n rows go to which expert, for the kernels; None where none run."""
    rows = _experts_of(act)
    if rows.lists is None:
        return None
    k, n_experts = rows.chosen.shape[1], rows.logits.shape[1]
    lists = rows.lists
    return lists._replace(
        norms=lists.norms[:n], groups=lists.groups[: 1 + n * k], places=lists.places[: n * k],
        group_rows=8 * x_tiles_for(n, k, n_experts),
    )  # fmt: skip


def _experts_of(act: Activations) -> ExpertRows:
    assert act.experts is not None, "a state made for layers with experts has their rows"
    return act.experts


def columns_of(table: Tensor, width: int) -> list[Tensor]:
    """The columns of a table, `width` at a time."""
    return [table[:, at : at + width] for at in range(0, table.shape[1], width)]


@dataclass(frozen=True)
class ExpertRows:
    """Rows of a layer's experts, X of which each row has k.

    Attributes:
        logits, chosen, shares: of the router, `[R, X]`, `[R, k]` int32, `[R, k]`: `kernels.experts.route.Routed`.
        inner: `[R, k * F]` of each chosen expert. parts: `[R, k * E]` what each gives, one precision up from 16 bits.
        lists: for the kernels; None where none run.
    """

    logits: Tensor
    chosen: Tensor
    shares: Tensor
    inner: Tensor
    parts: Tensor
    lists: Lists | None = None


@dataclass(frozen=True)
class Activations:
    """Rows of one model's layers.

    Attributes:
        stream, middle: `[R, E]` residual stream at a layer's input and after its attention.
        scaled, sums: what the next GEMM reads of it: times the next gain, and partial sums of squares fp32.
        q, mixed: `[R, H * D]`. act: `[R, F]`.
        heads: `[R, (H + 2 K) * D]` q, k and v before their norms; empty where they have none.
        partial, tops: attention's scratch.
        rope: `[positions, D / 2, 2]` fp32 (fp64 for fp64); sums are one precision up, fp32 for 16-bit rows.
        experts: None where no layer has any.
    """

    stream: Tensor
    middle: Tensor
    scaled: Tensor
    sums: Tensor
    q: Tensor
    mixed: Tensor
    act: Tensor
    heads: Tensor
    partial: Tensor
    tops: Tensor
    rope: Tensor
    experts: ExpertRows | None = None


@dataclass(frozen=True)
class HeadRows:
    """Rows of an output map: logits `[R, V]`, and the best of every 16 with its column `[R, V / 16]`."""

    logits: Tensor
    best: Tensor
    column: Tensor


@dataclass(frozen=True)
class Sizes:
    """The largest pass of a model.

    Attributes:
        rows: of all its GEMMs.
        attention: (sequences, tokens a sequence) of the passes; scratch serves the largest product.
        positions: rotary positions.
        length: tokens of the longest session, which some kinds of rotary frequencies depend on.
    """

    rows: int
    attention: tuple[tuple[int, int], ...]
    positions: int
    length: int = 0


def attention_order(arch: str, block: BlockGeometry, order: tuple[int, int] | None) -> tuple[int, int]:
    """(splits, streams) of an engine: one value for all its passes, since it sets the bits."""
    return order or order_of(arch, block.n_kv_heads, block.head_dim)


def new_activations(
    arch: str | None,
    block: BlockGeometry,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    order: tuple[int, int] | None = None,
) -> Activations:
    """Tensors for passes up to `sizes`; attention's scratch for kernels of `arch` alone."""

    def rows(width: int) -> Tensor:
        return torch.zeros(sizes.rows, width, dtype=dtype, device=device)

    queries = block.n_heads * block.head_dim
    wide = one_up(dtype)
    partial = tops = torch.empty(0, device=device)
    if arch is not None:
        splits, streams = attention_order(arch, block, order)
        shape = Shape(DTYPES[dtype], block.head_dim, block.n_heads // block.n_kv_heads, splits, streams)
        batch, tokens = max(sizes.attention, key=lambda pass_: pass_[0] * pass_[1])
        partial, tops = attention_scratch(shape, batch, tokens, block.n_kv_heads, device)
    merged = (block.n_heads + 2 * block.n_kv_heads) * block.head_dim
    return Activations(
        stream=rows(block.hidden_size),
        middle=rows(block.hidden_size),
        scaled=rows(block.hidden_size),
        # Zeros stay behind the last partial sum of a row, as the GEMM that adds them up expects.
        sums=torch.zeros(sizes.rows, partials_pitch(block.hidden_size), dtype=wide, device=device),
        q=rows(queries),
        mixed=rows(queries),
        act=rows(block.intermediate_size),
        heads=rows(merged if block.has_qk_norm else 0),
        partial=partial,
        tops=tops,
        rope=rope_table(block.rope, block.head_dim, sizes.length, sizes.positions, accumulation_dtype(dtype), device),
        experts=_expert_rows(arch, block, block.experts, sizes.rows, dtype, device) if block.experts else None,
    )


def _expert_rows(
    arch: str | None, block: BlockGeometry, experts: ExpertsGeometry, n: int, dtype: torch.dtype, device: torch.device
) -> ExpertRows:
    wide, k = accumulation_dtype(dtype), experts.n_chosen
    return ExpertRows(
        logits=torch.zeros(n, experts.n, dtype=wide, device=device),
        chosen=torch.zeros(n, k, dtype=torch.int32, device=device),
        shares=torch.zeros(n, k, dtype=wide, device=device),
        inner=torch.zeros(n, k * experts.intermediate_size, dtype=dtype, device=device),
        parts=torch.zeros(n, k * block.hidden_size, dtype=wide, device=device),
        lists=None if arch is None else new_lists(n, k, device),
    )


def new_head_rows(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> HeadRows:
    """Tensors for `rows` rows of logits."""
    partials = vocabulary // 16
    return HeadRows(
        torch.zeros(rows, vocabulary, dtype=dtype, device=device),
        torch.zeros(rows, partials, dtype=accumulation_dtype(dtype), device=device),
        torch.zeros(rows, partials, dtype=torch.int32, device=device),
    )
