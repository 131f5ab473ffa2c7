"""What a step works on, gathered from the slots into rows: lengths, roots, block tables, masks, and where rows go.

Row b of the batch is slot active[b]; a row without a slot is dead: length -1, tokens -1, masks 0, slots of the cache
-1. The tree's node t stands at position length + depth and is written to cache row length + t. With a draft, the
entries it has not read yet (`pending`) and the rows of its chained passes are placed too: entry j stands at position j.
A pass over a tree's level has `beam` rows a sequence, which share a position but not a place.
Source: docs/requirements.md R-45, R-46, R-82..R-84; paging after Kwon et al., arXiv 2309.06180.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.slots.cache_rows import THREADS, check_block, place_in
from eagle3core.kernels.slots.open_step_kernel import make_open_step, step_parts
from eagle3core.kernels.slots.slot_state import DRAFT_LENGTH, LENGTH, MOST_DRAFTS, N_FIELDS, N_PENDING, PLAIN, ROOT
from eagle3core.kernels.tree.mask_words import pack_words


class OpenSlots(NamedTuple):
    """What is read, int32.

    Attributes:
        active: `[S]` slot of each row, -1 past the last.
        state: `[N_FIELDS, S]`.
        pending_tokens, pending_rows: `[S, P']` entries the draft has not read: their tokens, and where their taps lie;
            P of them are read, which is as many as there can be then.
        tables: `[S, M]` cache blocks, the same for target and draft.
        depths: `[N]` of the tree. mask: `[N, W]` its ancestor-or-self words.
    """

    active: Tensor
    state: Tensor
    pending_tokens: Tensor
    pending_rows: Tensor
    tables: Tensor
    depths: Tensor
    mask: Tensor


class OpenRows(NamedTuple):
    """What is written, int32.

    Attributes:
        lengths: `[B]` cached tokens, -1 for a dead row. tables: `[B, M]`. roots: `[B]`.
        token_rows: `[B, N]` where node t's token will lie if nobody puts it into rows, t B + b; -1, no token, for
            drafts of a plain slot, and for those deeper than its request uses.
        positions, slots: `[B, N]` of the nodes. masks: `[B, N, W]`.
        entry_lengths: `[B]` the draft's entries before the pending ones.
        entry_rows, entry_tokens, entry_positions, entry_slots: `[B, P]`; row -1 and slot -1 past the last.
        last_rows: `[B]` row of the last pending entry among the B P.
        chain_lengths: `[levels, B]`, chain_positions, chain_slots: `[levels, B, beam]` of the chained passes.
    """

    lengths: Tensor
    tables: Tensor
    roots: Tensor
    token_rows: Tensor
    positions: Tensor
    slots: Tensor
    masks: Tensor
    entry_lengths: Tensor
    entry_rows: Tensor
    entry_tokens: Tensor
    entry_positions: Tensor
    entry_slots: Tensor
    last_rows: Tensor
    chain_lengths: Tensor
    chain_positions: Tensor
    chain_slots: Tensor


def new_open_rows(
    batch: int, nodes: int, pending: int, levels: int, beam: int, entries: int, device: torch.device
) -> OpenRows:
    """Poisoned outputs."""
    words = -(-nodes // 32)
    shapes = (
        (batch,), (batch, entries), (batch,), *((batch, nodes),) * 3, (batch, nodes, words),
        (batch,), *((batch, pending),) * 4, (batch,), (levels, batch), *((levels, batch, beam),) * 2,
    )  # fmt: skip
    return OpenRows(*(poison(*shape, dtype=torch.int32, device=device) for shape in shapes))


def open_step_reference(
    read: OpenSlots, batch: int, levels: int, block: int, *, beam: int = 1, pending: int | None = None
) -> OpenRows:
    """The rows of a step, in plain torch; `pending`: entries that are read of each slot; None: all that there is room
    for."""
    nodes, device = len(read.depths), read.state.device
    pending = read.pending_tokens.shape[1] if pending is None else pending
    slot = read.active[:batch]
    is_dead, held = slot < 0, slot.clamp_min(0).long()
    length, root, start, n = (read.state[field, held][:, None] for field in (LENGTH, ROOT, DRAFT_LENGTH, N_PENDING))
    tables = read.tables[held]

    def place(tokens: Tensor) -> Tensor:
        """Cache row of tokens `[B, n]`, -1 where no block holds it."""
        return place_in(tables, tokens, block)

    node, entry, level = (torch.arange(count, device=device) for count in (nodes, pending, levels))
    is_entry = entry < n  # [B, P]
    chained = start + n + level  # [B, levels]
    behind = start + n + torch.arange(levels * beam, device=device)  # [B, levels * beam]
    pending_rows, pending_tokens = read.pending_rows[held, :pending], read.pending_tokens[held, :pending]
    row = torch.arange(batch, device=device)
    first_row = row * pending
    at = node * batch + row[:, None]
    is_plain, most = read.state[PLAIN, held][:, None] != 0, read.state[MOST_DRAFTS, held][:, None]
    is_left_out = (is_plain & (node > 0)) | (read.depths > most)  # [B, N]
    made = OpenRows(
        lengths=length[:, 0], tables=tables, roots=root[:, 0],
        token_rows=at.masked_fill(is_left_out, -1), positions=length + read.depths,
        slots=place(length + node), masks=read.mask.expand(batch, -1, -1), entry_lengths=start[:, 0],
        entry_rows=pending_rows.where(is_entry, -1), entry_tokens=pending_tokens.where(is_entry, 0),
        entry_positions=(start + entry).where(is_entry, 0), entry_slots=place(start + entry).where(is_entry, -1),
        last_rows=first_row + (n[:, 0] - 1).clamp_min(0), chain_lengths=chained.T,
        chain_positions=chained.T[..., None].expand(-1, -1, beam),
        chain_slots=place(behind).view(batch, levels, beam).transpose(0, 1),
    )  # fmt: skip
    return OpenRows(**{name: _dead(name, value, is_dead, first_row).int() for name, value in made._asdict().items()})


_DEAD_ZERO = {"positions", "masks", "entry_tokens", "entry_positions", "chain_positions"}  # else a dead row has -1


def _dead(name: str, value: Tensor, is_dead: Tensor, first_row: Tensor) -> Tensor:
    """`value` with what dead rows have under `name`."""
    if name == "last_rows":
        return torch.where(is_dead, first_row, value)
    further = value.ndim - (2 if name.startswith("chain") else 1)  # axes behind that of the rows
    rows = is_dead.view(-1, *(1,) * further)
    return value.masked_fill(rows, 0 if name in _DEAD_ZERO else -1)


def open_step_variant(arch: str, nodes: int, pending: int, levels: int, block: int, beam: int = 1) -> Variant:
    """The gather for trees of `nodes`, `pending` draft entries (0: no draft) and `levels` passes over `beam` rows.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    check_block(block)
    return Variant(
        name=f"open_step_{nodes}_{pending}_{levels}x{beam}_{block}",
        make=make_open_step,
        constants={
            "nodes": nodes, "pending": pending, "levels": levels, "beam": beam, "block": block,
            "overlap": overlaps(arch),
        },
        parameters=parameters(
            "active:in state:in pending_tokens:in pending_rows:in slot_tables:in depths:const mask:const "
            "lengths:out tables:out roots:out token_rows:out positions:out slots:out masks:out entry_lengths:out "
            "entry_rows:out entry_tokens:out entry_positions:out entry_slots:out last_rows:out "
            "chain_lengths:out chain_positions:out chain_slots:out n_slots:i32 entries:i32 batch:i32 held:i32"
        ),
        threads=THREADS,
        max_registers=64,
        dependent=overlaps(arch),
    )  # fmt: skip


def open_step(arch: str, read: OpenSlots, out: OpenRows, block: int) -> list[Launch]:
    """`out` from `read`; the batch is that of `out.lengths`.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    (nodes,), (batch, entries) = read.depths.shape, out.tables.shape
    pending, (levels, _, beam) = out.entry_rows.shape[1], out.chain_slots.shape
    inputs = read._asdict()
    return [
        open_step_variant(arch, nodes, pending, levels, block, beam).launch(
            (sum(step_parts(nodes, pending, levels * beam, entries)), batch),
            **{"slot_tables" if name == "tables" else name: value for name, value in inputs.items()},
            **out._asdict(), n_slots=read.state.shape[1], entries=entries, batch=batch,
            held=read.pending_tokens.shape[1],
        )
    ]  # fmt: skip


def open_step_meaning(read: OpenSlots, out: OpenRows, block: int) -> None:
    """What `open_step` computes, in plain torch."""
    pending, (levels, batch, beam) = out.entry_rows.shape[1], out.chain_slots.shape
    made = open_step_reference(read, batch, levels, block, beam=beam, pending=pending)
    for name, value in made._asdict().items():
        if pending or not name.startswith(("entry", "last", "chain")):
            getattr(out, name).copy_(value)


OPEN_STEP = Op("open_step", open_step, open_step_meaning)


def open_step_cost(batch: int, nodes: int, pending: int, levels: int, entries: int, beam: int = 1) -> Cost:
    """Slot, six fields, table and pending entries in; everything of `OpenRows` out; depths and mask once."""
    words = -(-nodes // 32)
    read = 28 + 4 * entries + 8 * pending
    written = (
        8 + 4 * entries + nodes * (12 + 4 * words) + (8 + 16 * pending + (4 + 8 * beam) * levels if pending else 0)
    )
    return Cost(batch * (read + written) + nodes * (4 + 4 * words))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    n_slots, entries, block, nodes = case["slots"], case["entries"], case["block"], case["nodes"]
    held = case.get("held", case["pending"])

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    state = integers(0, 9, N_FIELDS, n_slots)
    state[LENGTH] = integers(0, entries * block, n_slots)
    state[DRAFT_LENGTH] = integers(0, entries * block, n_slots)
    state[N_PENDING] = integers(0, case["pending"] + 1, n_slots)
    state[PLAIN], state[MOST_DRAFTS] = integers(0, 2, n_slots), integers(0, nodes, n_slots)
    tables = integers(0, 99, n_slots, entries)
    tables[0, -1] = -1
    others = torch.randperm(n_slots - 1, generator=generator, device=device)[: case["active"] - 1].sort().values
    active = torch.full((n_slots,), -1, dtype=torch.int32, device=device)
    active[: case["active"] - 1], active[case["active"] - 1] = others.int(), n_slots - 1
    depths = torch.arange(nodes, device=device, dtype=torch.int32) // 2
    mask = torch.rand(nodes, nodes, generator=generator, device=device) > 0.5
    return {
        "active": active, "state": state, "pending_tokens": integers(0, 99, n_slots, held),
        "pending_rows": integers(0, 50, n_slots, held), "tables": tables, "depths": depths,
        "mask": pack_words(mask),
    }  # fmt: skip


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    sizes = (case["batch"], case["nodes"], case["pending"], case["levels"], case.get("beam", 1), case["entries"])
    return dict(new_open_rows(*sizes, inputs["state"].device)._asdict())


def _reference(case: Case, inputs: Tensors) -> Tensors:
    made = open_step_reference(
        OpenSlots(**inputs),
        case["batch"],
        case["levels"],
        case["block"],
        beam=case.get("beam", 1),
        pending=case["pending"],
    )._asdict()
    is_drafting = case["pending"] > 0
    return {name: t for name, t in made.items() if is_drafting or not name.startswith(("entry", "last", "chain"))}


CARD = Card(
    name="open_step",
    equation="rows of a step = fields of slot active[b]; cache row of token n = table[n / block] block + n mod block",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=lambda arch, case, inputs, outputs: open_step(
        arch, OpenSlots(**inputs), OpenRows(**outputs), case["block"]
    ),
    cost=lambda case: open_step_cost(
        case["batch"], case["nodes"], case["pending"], case["levels"], case["entries"], case.get("beam", 1)
    ),
    variants=lambda arch: [open_step_variant(arch, 4, 4, 2, 64)],
    slow_variants=lambda arch: [
        open_step_variant(arch, 1, 0, 0, 64), open_step_variant(arch, 64, 9, 7, 64),
        open_step_variant(arch, 60, 8, 6, 64, 10),
    ],
    cases=(
        {"batch": 4, "slots": 6, "active": 3, "nodes": 5, "pending": 3, "levels": 2, "entries": 3, "block": 4},
        {"batch": 2, "slots": 2, "active": 2, "nodes": 1, "pending": 0, "levels": 0, "entries": 70, "block": 2},
        {"batch": 2, "slots": 3, "active": 2, "nodes": 3, "pending": 2, "levels": 1, "entries": 3, "block": 4,
         "held": 5},
    ),
    slow_cases=(
        {"batch": 3, "slots": 4, "active": 2, "nodes": 7, "pending": 4, "levels": 2, "entries": 3, "block": 4,
         "beam": 3},
        {"batch": 3, "slots": 4, "active": 3, "nodes": 67, "pending": 1, "levels": 0, "entries": 3, "block": 64},
        {"batch": 2, "slots": 33, "active": 2, "nodes": 3, "pending": 2, "levels": 70, "entries": 260, "block": 4},
    ),
    shapes=tuple(
        {"batch": b, "slots": 8, "active": b, "nodes": 4, "pending": 4, "levels": 2, "entries": 513, "block": 64}
        for b in (1, 4)
    ),
    hand_counts=(
        (
            {"batch": 2, "nodes": 3, "pending": 2, "levels": 1, "entries": 5},
            Cost(2 * (28 + 20 + 16 + 8 + 20 + 3 * 16 + 8 + 32 + 12) + 24),
        ),
    ),
)  # fmt: skip
