"""The calls of a layer's parts for one architecture, and where the rows of a pass sit.

The kernels fuse what lies between the matrices: whoever makes the residual stream also makes what the next norm needs,
rotation and cache writes happen in the epilogue of q, k, v, and a captured residual stream is written straight where
the draft will read it. Source: docs/requirements.md R-93, R-104..R-109; fusions derived in `kernels.gemm.epilogue`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eagle3core.geometry import BlockGeometry, CacheScales
from eagle3core.kernels.attention.launcher import ATTENTION
from eagle3core.kernels.card import E4M3, Call
from eagle3core.kernels.choice.argmax import ARGMAX_OF_PARTIALS
from eagle3core.kernels.experts.feed import EXPERT_DOWN, EXPERT_GATE_UP, EXPERT_SUM
from eagle3core.kernels.experts.route import ROUTE
from eagle3core.kernels.gemm.meaning import GEMM
from eagle3core.kernels.gemm.order.pack import OrderedRows
from eagle3core.kernels.gemm.scratch import ordered_input
from eagle3core.kernels.layer.rope import ROPE
from eagle3core.step.buffers import Activations, HeadRows, expert_lists, expert_rows, routed_rows, rows_of
from eagle3core.step.program import after_all
from eagle3core.weights.experts import PackedExperts
from eagle3core.weights.packed import PackedLayer, PackedLinear

MOST_LEFT_INNER = 128  # rows; see `Emitter.inner_for`
TARGET = ("BASE_DECODE_STEP",)
TREE = ("EAGLE_TREE_MASKS",)
DRAFT = ("EagleModule::forward",)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a pass sit, int32 tensors that a kernel before has filled.

    Attributes:
        positions, slots: `[B * T]` rotary position and cache row, -1 for padding.
        prefix: `[B]` keys that every row sees, -1 for a dead sequence. tables: `[B, M]`. masks: `[B, T, W]`.
        keys_are_old: keys before the pass were written before this program began, or before a launch that waited for
            everything; if not, attention itself has to wait.
        earlier: rows of earlier passes whose keys lie between those of `prefix` and this pass's own, in every sequence;
            the masks' first bits are theirs.
        path_len: tokens of the longest path of a tree, the root included, whose rows' bits are to be those of plain
            decoding; 0 for a chain or a chunk, which have them anyway, and where nobody asks.
        window: a row at position p sees old keys from position p - window + 1 on; 0: all.
    """

    positions: Tensor
    slots: Tensor
    prefix: Tensor
    tables: Tensor
    masks: Tensor
    keys_are_old: bool = True
    earlier: int = 0
    path_len: int = 0
    window: int = 0

    @property
    def batch(self) -> int:
        return self.masks.shape[0]

    @property
    def tokens(self) -> int:
        return self.masks.shape[1]

    @property
    def n(self) -> int:
        return self.batch * self.tokens


@cache
def factors_of(scales: CacheScales, device: torch.device) -> Tensor:
    """`[2]` fp32 what keys and values are multiplied by as they are stored in e4m3; one tensor for all equal scales."""
    return torch.tensor([1.0 / scales.k, 1.0 / scales.v], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Emitter:
    """Makes calls for one architecture.

    Attributes:
        arch: compile target of the kernels; None where none run, and calls have meanings alone.
        order: (splits, streams) of attention, or None for the architecture's own.
        scratch: workspace of GEMMs that split K between blocks, or None.
        dtype: of the rows that maps read, which W in e4m3 does not say.
    """

    arch: str | None
    order: tuple[int, int] | None = None
    scratch: tuple[Tensor, Tensor] | None = None
    dtype: torch.dtype = torch.bfloat16

    def linear(
        self, m: PackedLinear, x: Tensor, y: Tensor, block: BlockGeometry, ordered: OrderedRows | None = None,
        leave: OrderedRows | None = None, *, q_heads: int | None = None, **operands: Tensor | None,
    ) -> list[Call]:  # fmt: skip
        """y = epilogue(x W^T); `ordered`: where x lies for the kernel as well, `leave`: where the next map reads it;
        `q_heads`: of the map, where those are not the block's."""
        own = {"bias": m.bias, "scales": m.scales}
        given = {name: tensor for name, tensor in {**operands, **own}.items() if tensor is not None}
        call = GEMM.call(
            self.arch, m.epilogue, x=x, w=m.weight, y=y, k=m.k, packed=m.is_packed, weight_rows=m.rows,
            q_heads=block.n_heads if q_heads is None else q_heads, kv_heads=block.n_kv_heads, eps=block.rms_norm_eps,
            scratch=self.scratch, ordered=ordered, leave=leave, operands=given,
        )  # fmt: skip
        return [call]

    def ordered_for(self, m: PackedLinear, n: int) -> OrderedRows | None:
        """Where whoever makes `n` rows for a map may leave them for its kernel; nobody else may run in between.

        Maps of the residual stream and others take turns in a layer, so each kind has a place of its own.
        """
        if self.arch is None or not m.is_packed:
            return None
        far = m.epilogue.kind != "residual"
        fp8 = m.fp8
        dtype = self.dtype if fp8 else m.weight.dtype
        return ordered_input(self.arch, n, m.rows, m.k, dtype, self.scratch, far=far, fp8=fp8)

    def left_for(self, m: PackedLinear, before: PackedLayer, n: int) -> OrderedRows | None:
        """Where the feed-forward of the layer before leaves `n` rows for the map `m`; experts leave none."""
        return None if isinstance(before.mlp, PackedExperts) else self.ordered_for(m, n)

    def inner_for(self, down: PackedLinear, n: int) -> OrderedRows | None:
        """Where gate and up leave `n` rows for the map `down`.

        Of a prompt's 256 rows or more they are packed by a launch: each block of gate and up writes few of the many
        columns, and to write those twice took an H200 0.6 ms of a pass of 512 rows more (docs/log.md).
        """
        return self.ordered_for(down, n) if n <= MOST_LEFT_INNER else None

    def qkv(
        self, layer: PackedLayer, x: Tensor, sums: Tensor | None, act: Activations, rows: Rows,
        pages: tuple[Tensor, Tensor], block: BlockGeometry, ordered: OrderedRows | None = None,
        *, attends: bool = True,
    ) -> list[Call]:  # fmt: skip
        """Rotated q of `x`; k and v go to the cache. Where heads are normed first, a second launch does both.

        `ordered`: where the layer before has left `x`. `attends`: whether anybody reads q, which else is left out where
        its heads are not normed.
        """
        q = rows_of(act.q, len(x), act.q.shape[1])
        factors = factors_of(layer.cache_scales, x.device) if pages[0].dtype == E4M3 else None
        if layer.q_gain is not None:
            heads = rows_of(act.heads, len(x), act.heads.shape[1])
            turned = ROPE.call(
                self.arch, heads, rows.positions, rows.slots, act.rope, q.view(len(x), block.n_heads, block.head_dim),
                *pages, q_gain=layer.q_gain, k_gain=layer.k_gain, factors=factors, eps=block.rms_norm_eps,
            )  # fmt: skip
            return [*self.linear(layer.qkv, x, heads, block, ordered, sums=sums), turned]
        q_heads = block.n_heads if attends else 0
        own = layer.qkv if attends else layer.qkv.from_row(block.n_heads * block.head_dim)
        return self.linear(
            own, x, q[:, : q_heads * block.head_dim], block, ordered, q_heads=q_heads, sums=sums,
            positions=rows.positions, slots=rows.slots, table=act.rope, second=pages[0], third=pages[1],
            factors=factors,
        )  # fmt: skip

    def attend(
        self, layer: PackedLayer, act: Activations, rows: Rows, pages: tuple[Tensor, Tensor], block: BlockGeometry
    ) -> list[Call]:  # fmt: skip
        """Attention of the pass's q into `act.mixed`, and where `project` reads it."""
        shape = (rows.batch, rows.tokens, block.n_heads, block.head_dim)
        near: dict[str, Any] = {}
        if rows.window:
            near = {"window": rows.window, "positions": rows.positions.view(rows.batch, rows.tokens)}
        if layer.sinks is not None:
            near["sinks"] = layer.sinks
        if pages[0].dtype == E4M3:
            near["scales"] = layer.cache_scales
        call = ATTENTION.call(
            self.arch, q=rows_of(act.q, *shape), k_blocks=pages[0], v_blocks=pages[1], block_tables=rows.tables,
            prefix_lens=rows.prefix, masks=rows.masks, out=rows_of(act.mixed, *shape),
            scratch=(act.partial, act.tops), order=self.order, earlier=rows.earlier,
            path_len=rows.path_len, ordered=self.ordered_for(layer.o, rows.n), **near,
        )  # fmt: skip
        return [call] if rows.keys_are_old else after_all([call])

    def mlp(
        self, layer: PackedLayer, act: Activations, n: int, out: Tensor, next_gain: Tensor, block: BlockGeometry,
        leave: OrderedRows | None = None,
    ) -> list[Call]:  # fmt: skip
        """Feed-forward of `act.middle`, right after `project`, of experts as `route` has chosen; the new stream: `out`.

        `leave`: where a next layer reads the stream times `next_gain`; experts leave nothing.
        """
        middle, scaled, sums, inner = (rows_of(t, n, t.shape[1]) for t in (act.middle, act.scaled, act.sums, act.act))
        mlp = layer.mlp
        if isinstance(mlp, PackedExperts):
            routed, k = routed_rows(act, n), mlp.geometry.n_chosen
            (inner, parts), lists = expert_rows(act, n, k), expert_lists(act, n)
            by = {"is_normalised": mlp.geometry.is_normalised, "lists": lists}
            gated = {**by, "eps": block.rms_norm_eps, "gate": mlp.geometry.gate}
            return [
                EXPERT_GATE_UP.call(self.arch, scaled, sums, routed, mlp.gate_up, inner, **gated),
                EXPERT_DOWN.call(self.arch, inner, routed, mlp.down, parts, **by),
                EXPERT_SUM.call(self.arch, parts, routed.shares, middle, next_gain, out, scaled, sums),
            ]
        left = self.inner_for(mlp.down, n)
        return [
            *self.linear(mlp.gate_up, scaled, inner, block, self.ordered_for(mlp.gate_up, n), left, sums=sums),
            *self.linear(
                mlp.down, inner, out, block, left, leave, residual=middle, gain=next_gain, second=scaled, third=sums,
            ),
        ]  # fmt: skip

    def route(self, experts: PackedExperts, act: Activations, n: int, block: BlockGeometry) -> Call:
        """Which experts each row of `act.middle` goes to, and their shares."""
        scaled, sums = (rows_of(t, n, t.shape[1]) for t in (act.scaled, act.sums))
        return ROUTE.call(
            self.arch, scaled, sums, experts.router, routed_rows(act, n), eps=block.rms_norm_eps,
            is_normalised=experts.geometry.is_normalised, bias=experts.router_bias, lists=expert_lists(act, n),
        )  # fmt: skip

    def project(
        self, layer: PackedLayer, act: Activations, n: int, residual: Tensor, block: BlockGeometry
    ) -> list[Call]:
        """Attention's output map; the residual stream after attention goes to `act.middle`."""
        mixed, middle, scaled, sums = (rows_of(t, n, t.shape[1]) for t in (act.mixed, act.middle, act.scaled, act.sums))
        # A router reads rows as they are: only a map's warpgroups fetch them in order.
        leave = None if isinstance(layer.mlp, PackedExperts) else self.ordered_for(layer.mlp.gate_up, n)
        return self.linear(
            layer.o, mixed, middle, block, self.ordered_for(layer.o, n), leave,
            residual=residual, gain=layer.mlp_gain, second=scaled, third=sums,
        )  # fmt: skip

    def head(
        self, m: PackedLinear, scaled: Tensor, sums: Tensor, out: HeadRows, block: BlockGeometry,
        powers: Tensor | None = None, ordered: OrderedRows | None = None,
    ) -> list[Call]:  # fmt: skip
        """Logits of `scaled: [n, E]` and the best of every 16: with its column, or with the sum of powers.

        `ordered`: where `scaled` lies for the kernel as well, if the launch before has left it there.
        """
        n, third = len(scaled), out.column if powers is None else powers
        logits, best, third = (rows_of(t, n, t.shape[1]) for t in (out.logits, out.best, third))
        m = m if powers is None else replace(m, epilogue=replace(m.epilogue, has_powers=True))
        return self.linear(m, scaled, logits, block, ordered, sums=sums, second=best, third=third)

    def choose(self, out: HeadRows, n: int, ids: Tensor, to_target: Tensor | None = None) -> list[Call]:
        """`ids: [n]` target ids of the largest logits."""
        best, column = (rows_of(t, n, t.shape[1]) for t in (out.best, out.column))
        return [ARGMAX_OF_PARTIALS.call(self.arch, best, column, ids, to_target)]
