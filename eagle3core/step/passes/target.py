"""A pass over the target, or over a small model that drafts: embedding and layers, as stages.

A prompt needs of its last layer keys and values alone, but for its last token, whose logits are asked for: so a pass
over prompts may end with them, and the rest of that layer is made of the rows that end, by the kernels of a step and to
the same bits. Source: docs/requirements.md R-93, R-104..R-109; what a prompt needs is derived here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from eagle3core.kernels.card import Call
from eagle3core.kernels.gemm.order.pack import OrderedRows
from eagle3core.kernels.layer.embedding import EMBEDDING
from eagle3core.step.buffers import Activations, routed_rows, rows_of
from eagle3core.step.passes.emitter import DRAFT, TARGET, Emitter, Rows
from eagle3core.step.program import Stage, Tap, after_all
from eagle3core.weights.experts import PackedExperts
from eagle3core.weights.packed import PackedTarget


@dataclass(frozen=True)
class TargetPass:
    """Operands of a pass over the target: `tokens: [n]`, `ids: [n]` scratch, caches `[L, n_blocks, K, block, D]`, and a
    tensor of rows for each captured residual stream."""

    model: PackedTarget
    act: Activations
    tokens: Tensor
    ids: Tensor
    k: Tensor
    v: Tensor
    captured: tuple[Tensor, ...]

    def input_of(self, layer: int, n: int) -> LayerInput:
        """Where `n` rows of the input of `layer` lie; of layer L, the last one's output."""
        is_captured = layer in self.model.taps and self.captured  # without a draft nobody reads them
        buffer = self.captured[self.model.taps.index(layer)] if is_captured else self.act.stream
        stream, scaled, sums = (rows_of(t, n, t.shape[1]) for t in (buffer, self.act.scaled, self.act.sums))
        return LayerInput(stream, scaled, sums)


@dataclass(frozen=True)
class LayerInput:
    """What a layer reads of `n` rows.

    Attributes:
        stream: `[n, E]` residual stream. scaled: `[n, E]`, times the layer's first gain. sums: partial sums of squares.
        left: where the layer before has left `scaled` beside its rows, in the order of the map of q, k and v.
    """

    stream: Tensor
    scaled: Tensor
    sums: Tensor
    left: OrderedRows | None = None


def target_stages(
    emit: Emitter, over: TargetPass, rows: Rows, scope: str, *, first_waits: bool, role: str = "target",
    ends_with_keys: bool = False,
) -> list[Stage]:  # fmt: skip
    """Embedding and layers. What the head reads, the scaled stream and its sums, is left in the activations, and in the
    head's order for one that follows at once.

    `first_waits`: the pass follows a kernel that wrote its lengths or tables. `role`: of the model,
    "target" or "draft". `ends_with_keys`: of the last layer keys and values are made and nothing else.
    """
    layers = _Layers(emit, over, rows, scope, role)
    given, stages = over.input_of(0, rows.n), [layers.embed(first_waits=first_waits)]
    last = len(over.model.layers) - 1
    for i in range(last + 1):
        if i == last and ends_with_keys:
            return [*stages, layers.keys(i, given)]
        stages += layers.whole(i, given)
        given = replace(over.input_of(i + 1, rows.n), left=layers.left_behind(i))
    return stages


def rest_of_last_layer(
    emit: Emitter, over: TargetPass, rows: Rows, given: LayerInput, first: list[Call]
) -> list[Stage]:
    """The last layer over `rows`, of which a pass has made keys and values alone; `first`: calls that bring `given`.

    Keys and values are written again, the same ones. What the head reads is left as by `target_stages`.
    """
    layers = _Layers(emit, over, rows, "", "target")
    attention, *others = layers.whole(len(over.model.layers) - 1, given)
    return [replace(attention, calls=(*first, *attention.calls)), *others]


class _Layers:
    """Makes the stages of one pass."""

    def __init__(self, emit: Emitter, over: TargetPass, rows: Rows, scope: str, role: str) -> None:
        self.emit, self.over, self.rows, self.scope, self.role = emit, over, rows, scope, role
        self.model, self.act, self.block = over.model, over.act, over.model.geometry.block
        self.ranges = DRAFT if role == "draft" else TARGET

    def embed(self, *, first_waits: bool) -> Stage:
        """The tokens' rows of the table, and what the first layer reads of them."""
        into, over = self.over.input_of(0, self.rows.n), self.over
        gather = EMBEDDING.call(
            self.emit.arch, over.tokens, self.model.embedding, over.ids, into.stream,
            gain=self.model.layers[0].attn_gain, scaled=into.scaled, sums=into.sums,
        )  # fmt: skip
        return self._stage("embed", after_all([gather]) if first_waits else [gather], embed=into.stream)

    def keys(self, i: int, given: LayerInput) -> Stage:
        """Keys and values of a layer. Of q too, which nobody reads: its map is tuned for all three."""
        return Stage(f"{self.role}.{i}.attn", tuple(self._qkv(i, given)), self.ranges)

    def whole(self, i: int, given: LayerInput) -> list[Stage]:
        """A layer, from its `given` input to that of the next."""
        emit, act, rows, n, layer = self.emit, self.act, self.rows, self.rows.n, self.model.layers[i]
        window = self.model.geometry.window_of(i)
        attend = [
            *self._qkv(i, given),
            *emit.attend(layer, act, replace(rows, window=window), (self.over.k[i], self.over.v[i]), self.block),
            *emit.project(layer, act, n, given.stream, self.block),
        ]
        stages = [self._stage(f"{i}.attn", attend, attn=rows_of(act.middle, n, act.middle.shape[1]))]
        left: dict[str, Tensor] = {}
        if isinstance(layer.mlp, PackedExperts):
            routed, route = routed_rows(act, n), emit.route(layer.mlp, act, n, self.block)
            stages.append(self._stage(f"{i}.router", [route], router=routed.logits))
            left = {"experts": routed.chosen}  # kernels choose where they read the experts
        out = self.over.input_of(i + 1, n).stream
        forward = emit.mlp(layer, act, n, out, self._gain_after(i), self.block, self.left_behind(i))
        return [*stages, self._stage(f"{i}.mlp", forward, **left, mlp=out)]

    def left_behind(self, i: int) -> OrderedRows | None:
        """Where a layer leaves its output beside its rows, for the next one's first map or the head."""
        is_last = i + 1 == len(self.model.layers)
        following = self.model.head if is_last else self.model.layers[i + 1].qkv
        return self.emit.left_for(following, self.model.layers[i], self.rows.n)

    def _gain_after(self, i: int) -> Tensor:
        is_last = i + 1 == len(self.model.layers)
        return self.model.final_gain if is_last else self.model.layers[i + 1].attn_gain

    def _qkv(self, i: int, given: LayerInput) -> list[Call]:
        pages = (self.over.k[i], self.over.v[i])
        layer = self.model.layers[i]
        return self.emit.qkv(layer, given.scaled, given.sums, self.act, self.rows, pages, self.block, given.left)

    def _stage(self, name: str, calls: list[Call], **left: Tensor) -> Stage:
        """A stage, and what it leaves behind under the last part of a name."""
        prefix = f"{self.role}.{name.rpartition('.')[0]}".rstrip(".")
        taps = {f"{prefix}.{part}": Tap(value, self.rows.slots, self.scope) for part, value in left.items()}
        return Stage(f"{self.role}.{name}", tuple(calls), self.ranges, taps)
