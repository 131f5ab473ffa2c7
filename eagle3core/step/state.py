"""State of running sequences on the device: one set of tensors with fixed addresses, allocated once.

Integers are int32, a slot's numbers in the table of `kernels.slots.slot_state`. A block of the cache has rows of the
target and rows of the draft, so one table serves both; which blocks a slot has, `cache.tables` writes. A rewind is a
shorter length. Source: docs/requirements.md R-25, R-47..R-49, R-53.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from eagle3core.geometry import BlockGeometry, DraftGeometry, TargetGeometry
from eagle3core.kernels.slots.open_chunk import ChunkRows, new_chunk_rows
from eagle3core.kernels.slots.slot_state import LIMIT, MOST_ENDS, N_FIELDS, RESULT_BLOCKS, result_width
from eagle3core.kernels.tree.mask_words import pack_words
from eagle3core.step.buffers import Activations, HeadRows, Sizes, new_activations, new_head_rows, rows_of
from eagle3core.step.draw import DrawSettings, new_draw_settings
from eagle3core.step.results import given_numbers
from eagle3core.step.sizes import DeviceSizes, StateShape, stored_dtype
from eagle3core.step.tree import FlatTree
from eagle3core.step.tree_tensors import TreeTensors, new_tree_tensors
from eagle3core.weights.packer import HEAD_STEP


@dataclass(frozen=True)
class StepTensors:
    """Scratch of a step, sized for all slots; a smaller batch uses the first elements (`buffers.rows_of`)."""

    active: Tensor
    inverse: Tensor
    count: Tensor
    no_ends: Tensor
    opened: dict[str, Tensor]
    drafted: Tensor
    node_tokens: Tensor
    ids: Tensor
    choices: Tensor
    accepted: dict[str, Tensor]
    kept: Tensor


@dataclass(frozen=True)
class DraftTensors:
    """Scratch of the draft's passes; `level_logits: [levels, S, Vd]` where `sizes.keeps_logits`, others by variant."""

    act: Activations
    head: HeadRows
    k: Tensor
    v: Tensor
    taps: Tensor
    hidden: Tensor
    x: Tensor
    out: Tensor
    feedback: Tensor
    next_feedback: Tensor
    scaled: Tensor
    sums: Tensor
    level_logits: Tensor | None
    normed: Tensor | None
    residual: Tensor | None


@dataclass(frozen=True)
class SmallTensors:
    """Scratch of a small model's passes; `k, v: [L, n_blocks, K, block, D]`, scaled and sums of one row a slot."""

    act: Activations
    head: HeadRows
    k: Tensor
    v: Tensor
    ids: Tensor
    scaled: Tensor
    sums: Tensor


@dataclass(frozen=True)
class DeviceState:
    """Everything a program reads and writes.

    Attributes:
        state, ends, pending_tokens, pending_rows, tables: per slot, see `kernels.slots`: `slot_state`, `open_step`.
        k, v: `[L, n_blocks, K, block, D]`.
        captured: a `[step_rows + n_slots (1 + n_kept), E]` for each tap: a step's rows, the seeds, what is kept.
        chunk_captured: a `[chunk, E]` for each tap.
        act, head: of the target. step, draft, small: scratch, the last two of a head or a small model.
        draws: how each slot's tokens are drawn.
        given: what a pass over prompts works on, `results.given_pass`. chunk: its rows.
        first: `[n_ends]` first tokens.
        turn: `[1]` newest of `results: [RESULT_BLOCKS, S, W]`, for kernels in the host's memory: see `ResultQueue`.
        last_stream, last_scaled, last_sums: of prompts' last rows, what their last layer, or the head, reads; last:
            where those rows sit.
        tree: of a step whose tree the draft grows, else None.
        ranks: `[RESULT_BLOCKS, S, depth]` beside `results`, where they are kept (`step.ranks`); of a grown tree the
            parents of its nodes, `[RESULT_BLOCKS, S, N]`.
    """

    sizes: DeviceSizes
    state: Tensor
    ends: Tensor
    pending_tokens: Tensor
    pending_rows: Tensor
    tables: Tensor
    k: Tensor
    v: Tensor
    captured: tuple[Tensor, ...]
    chunk_captured: tuple[Tensor, ...]
    act: Activations
    head: HeadRows
    step: StepTensors
    draft: DraftTensors | None
    small: SmallTensors | None
    tree: TreeTensors | None
    draws: DrawSettings
    given: Tensor
    chunk: ChunkRows
    first: Tensor
    turn: Tensor
    results: Tensor
    last: ChunkRows
    last_stream: Tensor
    last_scaled: Tensor
    last_sums: Tensor
    ranks: Tensor | None

    @property
    def pages(self) -> tuple[Tensor, ...]:
        """Keys and values of the target, and of a head or a small model where there is one."""
        return (self.k, self.v, *((own.k, own.v) if (own := self.draft or self.small) else ()))

    def last_results(self) -> list[list[int]]:
        """Rows of the newest result block, after waiting for the device; dead rows are older ones' or start with -1."""
        rows: list[list[int]] = self.results[int(self.turn)].tolist()
        return rows

    def last_paths(self, batch: int) -> Tensor:
        """`[batch, path_len]` int32: nodes of the accepted paths of the newest step, root first; dead ends -1."""
        return rows_of(self.step.accepted["path"], batch, self.sizes.path_len)


def state_bytes(arch: str | None, shape: StateShape, sizes: DeviceSizes) -> tuple[int, int]:
    """(bytes of both caches, bytes of everything else) of a state, counted without allocating it."""
    state = new_device_state(arch, replace(shape, device=torch.device("meta")), sizes)
    cached = sum(tensor.nbytes for tensor in state.pages)
    return cached, sum(tensor.nbytes for tensor in _tensors(state)) - cached


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor inside a value of dataclasses, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def new_device_state(
    arch: str | None, shape: StateShape, sizes: DeviceSizes, order: tuple[int, int] | None = None
) -> DeviceState:
    """An empty state."""
    target, draft, hidden = shape.target, shape.draft, shape.target.block.hidden_size
    device, dtype, slots = shape.device, shape.dtype, sizes.n_slots
    pending = sizes.pending if draft else 0
    passes = ((sizes.n_spans, sizes.span), (slots, sizes.nodes))
    sides = Sizes(sizes.most_rows, passes, sizes.positions, sizes.session_len)
    act = new_activations(arch, target.block, sides, dtype, device, order)

    def integers(*shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=device)

    def rows(n: int, width: int) -> Tensor:
        return torch.zeros(n, width, dtype=dtype, device=device)

    k, v = (_pages(target.block, target.n_layers, sizes, stored_dtype(sizes.cache_dtype, dtype), device) for _ in "kv")
    state = integers(N_FIELDS, slots)
    state[LIMIT] = sizes.entries * sizes.block
    return DeviceState(
        sizes=sizes,
        state=state,
        ends=integers(slots, MOST_ENDS, fill=-1),
        pending_tokens=integers(slots, pending),
        pending_rows=integers(slots, pending),
        tables=integers(slots, sizes.entries, fill=-1),
        k=k,
        v=v,
        captured=tuple(rows(sizes.kept_row + slots * sizes.n_kept, hidden) for _ in range(shape.n_taps)),
        chunk_captured=tuple(rows(sizes.chunk, hidden) for _ in range(shape.n_taps)),
        act=act,
        head=new_head_rows(sizes.step_rows, _padded(target.vocab_size), dtype, device),
        step=_step_tensors(sizes, pending, integers),
        draft=_draft_tensors(arch, draft, shape, sizes, order) if isinstance(draft, DraftGeometry) else None,
        small=_small_tensors(arch, draft, shape, sizes, order) if isinstance(draft, TargetGeometry) else None,
        tree=new_tree_tensors(sizes.grown, slots, _padded(draft.draft_vocab_size), device)
        if isinstance(draft, DraftGeometry) and sizes.grown
        else None,
        draws=new_draw_settings(slots, device),
        given=integers(given_numbers(sizes), fill=-1),
        chunk=new_chunk_rows(sizes.chunk, sizes.n_spans, sizes.entries, device),
        first=integers(sizes.n_ends),
        turn=integers(1),
        results=_result_blocks(arch, (RESULT_BLOCKS, slots, result_width(sizes.path_len, sizes.nodes)), device),
        last=new_chunk_rows(sizes.n_ends, sizes.n_ends, sizes.entries, device),
        last_stream=rows(sizes.n_ends, hidden),
        last_scaled=rows(sizes.n_ends, hidden),
        last_sums=torch.zeros(sizes.n_ends, act.sums.shape[1], dtype=act.sums.dtype, device=device),
        ranks=integers(RESULT_BLOCKS, slots, sizes.nodes if sizes.grown else sizes.path_len - 1)
        if sizes.keeps_ranks and draft
        else None,
    )


def _result_blocks(arch: str | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros that kernels can write and the host read without a copy; plain torch writes on its own device alone."""
    if arch is not None and device.type == "cuda":
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _pages(block: BlockGeometry, n_layers: int, sizes: DeviceSizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeros: rows never written get weight 0 in attention, and 0 times whatever lay there must be 0.
    shape = (n_layers, sizes.n_blocks, block.n_kv_heads, sizes.block, block.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def _step_tensors(sizes: DeviceSizes, pending: int, make: Callable[..., Tensor]) -> StepTensors:
    slots, nodes, path = sizes.n_slots, sizes.nodes, sizes.path_len
    words, levels = -(-nodes // 32), sizes.chain_levels if pending else 0
    opened = {
        "lengths": make(slots), "tables": make(slots, sizes.entries),
        **{name: make(slots, nodes) for name in ("token_rows", "positions", "slots")},
        "masks": make(slots, nodes, words), "entry_lengths": make(slots),
        **{f"entry_{name}": make(slots, pending) for name in ("rows", "tokens", "positions", "slots")},
        "last_rows": make(slots), "chain_lengths": make(levels, slots),
        **{f"chain_{name}": make(levels, slots, sizes.beam) for name in ("positions", "slots")},
    }  # fmt: skip
    accepted = {
        "n_accepted": make(slots), "n_committed": make(slots), "path": make(slots, path), "tokens": make(slots, path),
        "bonus": make(slots), "stop": make(slots),
    }  # fmt: skip
    return StepTensors(
        active=make(slots), inverse=make(slots), count=make(1), no_ends=make(0),
        opened=opened, drafted=make(nodes * slots),
        node_tokens=make(slots, nodes), ids=make(max(slots * nodes, sizes.chunk)), choices=make(slots, nodes),
        accepted=accepted, kept=make(slots),
    )  # fmt: skip


def _draft_tensors(
    arch: str | None, draft: DraftGeometry, shape: StateShape, sizes: DeviceSizes, order: tuple[int, int] | None
) -> DraftTensors:
    block, dtype, device = draft.block, shape.dtype, shape.device
    width, pending, slots = block.hidden_size, sizes.pending, sizes.n_slots
    n = max(slots * pending, slots * sizes.beam, sizes.chunk)
    sides = Sizes(n, ((slots, sizes.path_len), (slots, sizes.beam)), sizes.positions, sizes.session_len)
    act = new_activations(arch, block, sides, dtype, device, order)

    def rows(n: int, width: int) -> Tensor:
        return torch.zeros(n, width, dtype=dtype, device=device)

    vocabulary, levels = _padded(draft.draft_vocab_size), sizes.path_len - 1
    fused = shape.n_taps * draft.target_hidden_size
    k, v = (_pages(block, 1, sizes, stored_dtype(sizes.draft_cache_dtype, dtype), device)[0] for _ in "kv")
    return DraftTensors(
        act=act, head=new_head_rows(slots * sizes.beam, vocabulary, dtype, device), k=k, v=v,
        taps=rows(n, fused), hidden=rows(n, width),
        x=rows(n, 2 * width), out=rows(n, width), feedback=rows(slots, width), next_feedback=rows(slots, width),
        scaled=rows(slots, width),
        sums=torch.zeros(slots, act.sums.shape[1], dtype=act.sums.dtype, device=device),
        level_logits=rows(levels * slots, vocabulary).view(levels, slots, vocabulary) if sizes.keeps_logits else None,
        normed=rows(n, fused) if draft.variant.fusion_norm != "none" else None,
        residual=rows(n, width) if draft.variant.normed_residual else None,
    )  # fmt: skip


def _small_tensors(
    arch: str | None, model: TargetGeometry, shape: StateShape, sizes: DeviceSizes, order: tuple[int, int] | None
) -> SmallTensors:
    block, dtype, device, slots = model.block, shape.dtype, shape.device, sizes.n_slots
    n = max(slots * sizes.pending, sizes.chunk)
    sides = Sizes(n, ((sizes.n_spans, sizes.span), (slots, sizes.pending)), sizes.positions, sizes.session_len)
    act = new_activations(arch, block, sides, dtype, device, order)
    k, v = (_pages(block, model.n_layers, sizes, stored_dtype(sizes.draft_cache_dtype, dtype), device) for _ in "kv")
    return SmallTensors(
        act=act, head=new_head_rows(slots, _padded(model.vocab_size), dtype, device), k=k, v=v,
        ids=torch.zeros(n, dtype=torch.int32, device=device),
        scaled=torch.zeros(slots, block.hidden_size, dtype=dtype, device=device),
        sums=torch.zeros(slots, act.sums.shape[1], dtype=act.sums.dtype, device=device),
    )  # fmt: skip


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // HEAD_STEP) * HEAD_STEP


def tree_words(tree: FlatTree, device: torch.device) -> Tensor:
    """`[N, W]` int32 ancestor-or-self words of a tree."""
    return pack_words(tree.mask).to(device).contiguous()
