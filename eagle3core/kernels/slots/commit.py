"""Commit: what a verify step decided becomes the slots' state, and the row of numbers that the host reads later.

Accepted drafts and the bonus are appended up to an end token or the request's budget, whichever comes first; a finished
slot stops running, so the next step does not see it. Where an invariant is broken (an acceptance outside the path, a
cache row without a block) the slot commits the target's choice after its root, which is the baseline's token, and goes
on without its drafts; without room for the root it stops.

A choice of -1 says that the target's logits were not finite. A drafted row can do that to the rows before it, which
give it weight 0, and 0 times NaN is not 0: so the slot commits what comes before, be it nothing, and does the rest once
more without its drafts; where nothing is chosen then either, the request is at its end.
Source: docs/requirements.md R-48, R-51..R-61, R-62, R-77, R-84, R-85.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.slots.commit_kernel import THREADS, make_commit
from eagle3core.kernels.slots.keep_states import NOT_KEPT, Kept, kept_row
from eagle3core.kernels.slots.slot_state import (
    BAD_ACCEPTANCE,
    BUDGET,
    DRAFT_LENGTH,
    FOUND_END,
    GOES_ON,
    LENGTH,
    MISSING_BLOCKS,
    MOST_DRAFTS,
    MOST_ENDS,
    N_FIELDS,
    N_PENDING,
    NO_CHOICE_LEFT,
    NO_FAULT,
    NO_ROOM,
    NOT_FINITE,
    PLAIN,
    REQUEST_ID,
    RESULT_BLOCKS,
    ROOT,
    RUNNING,
    SPENT_BUDGET,
    STOPPED,
    result_width,
)


class Decided(NamedTuple):
    """What the step found out, int32.

    Attributes:
        active: `[S]` slot of each row, -1 past the last.
        n_accepted: `[B]`. path, tokens: `[B, P]` of `accept`.
        choices: `[B, N]` the target's choice after each node. node_tokens: `[B, N]`.
        places: `[B, N]` cache row of each node, -1 where a block is missing.
        ends: `[S, MOST_ENDS]` end tokens of each slot's request, filled up with -1.
    """

    active: Tensor
    n_accepted: Tensor
    path: Tensor
    tokens: Tensor
    choices: Tensor
    node_tokens: Tensor
    places: Tensor
    ends: Tensor


class Committed(NamedTuple):
    """What changes, int32: `state: [N_FIELDS, S]`, `pending_tokens, pending_rows: [S, P]`, `kept: [B]` nodes kept;
    `turn: [1]` says which block of `results: [RESULT_BLOCKS, S, result_width(P, N)]` gets the rows."""

    state: Tensor
    pending_tokens: Tensor
    pending_rows: Tensor
    kept: Tensor
    turn: Tensor
    results: Tensor


def commit_reference(decided: Decided, before: Committed, keeps: Kept = NOT_KEPT) -> Committed:
    """The state after the commit; `keeps`: of a step without drafts, where its states lie for the draft to read."""
    made = Committed(*(tensor.clone() for tensor in before))
    batch, path_len = decided.path.shape
    rows = (decided.active[:batch] >= 0).nonzero()[:, 0]  # [L] the live ones
    slot = decided.active[rows].long()
    field = made.state[:, slot]  # [fields, L]
    fault = _faults(decided.n_accepted[rows], decided.places[rows], path_len)
    field[PLAIN] |= (fault != NO_FAULT).int()
    is_plain = field[PLAIN] != 0
    n, path, tokens = _followed(decided, rows, is_plain)
    n = n.minimum(field[MOST_DRAFTS])  # the target's choice behind the last that counts is its bonus
    at = torch.arange(path_len, device=n.device)
    n, is_stuck, redoes = _chosen(tokens, n, ~is_plain & (decided.choices.shape[1] > 1))
    fault |= redoes * NOT_FINITE
    field[PLAIN] |= redoes
    cut, finish = _ended(tokens, n, decided.ends[slot], field[BUDGET], fault)
    finish = finish.masked_fill(is_stuck & (finish == GOES_ON), NO_CHOICE_LEFT)
    is_kept = at <= n[:, None]  # [L, P]
    field[RUNNING] = (finish == GOES_ON).int()
    entry = field[N_PENDING].clone() if keeps.is_unread else torch.zeros_like(n)  # the first that is new
    source = rows[:, None].int() * decided.choices.shape[1] + path
    if keeps.n:
        source = kept_row(keeps, slot, field[LENGTH]).int()[:, None]
    field[LENGTH] += n + 1
    goes_forward = n >= 0
    field[ROOT] = tokens.gather(1, n.clamp_min(0)[:, None].long())[:, 0].where(goes_forward, field[ROOT])
    field[DRAFT_LENGTH] += field[N_PENDING].where(goes_forward, 0) * (not keeps.is_unread)
    field[N_PENDING] = (entry + n + 1).where(goes_forward, field[N_PENDING])
    field[BUDGET] -= cut
    made.state[:, slot] = field
    if made.pending_tokens.shape[1]:
        places = entry[:, None] + at  # [L, P]
        live, j = (is_kept & (places < made.pending_tokens.shape[1])).nonzero(as_tuple=True)
        for pending, values in ((made.pending_tokens, tokens), (made.pending_rows, source)):
            pending[slot[live], places[live, j].long()] = values.expand(len(rows), path_len)[live, j]
    made.kept[:] = 0
    made.kept[rows] = n + 1
    numbers = torch.stack([slot.int(), n.clamp_min(0), cut, finish, fault, field[REQUEST_ID]], dim=1)
    block = made.results[int(before.turn)]
    told = torch.cat([numbers, tokens.where(is_kept, -1), decided.node_tokens[rows, 1:]], dim=1)
    block[:batch, : told.shape[1]] = -1  # a row may have room for a larger step's
    block[rows, : told.shape[1]] = told
    return made


def _faults(n_accepted: Tensor, places: Tensor, path_len: int) -> Tensor:
    """Fault bits `[L]` int32 of acceptances `[L]` and cache rows `[L, N]`."""
    is_outside = (n_accepted < 0) | (n_accepted >= path_len)
    bits = ((is_outside, BAD_ACCEPTANCE), ((places < 0).any(dim=1), MISSING_BLOCKS), (places[:, 0] < 0, NO_ROOM))
    return sum(((is_broken.int() * bit) for is_broken, bit in bits), torch.zeros_like(n_accepted))


def _followed(decided: Decided, rows: Tensor, is_plain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts `[L]`, path and tokens `[L, P]` of the live rows; of a plain one the target's choice alone."""
    path, tokens = decided.path[rows].clone(), decided.tokens[rows].clone()
    path[is_plain], tokens[is_plain] = -1, -1
    path[is_plain, 0], tokens[is_plain, 0] = 0, decided.choices[rows, 0][is_plain]
    return decided.n_accepted[rows].masked_fill(is_plain, 0), path, tokens


def _chosen(tokens: Tensor, n: Tensor, has_drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts `[L]` before the first of `tokens: [L, P]` that the target did not choose, -1 without even one;
    whether that is the request's end (bool), and whether drafts may be to blame and the rest is done without (int)."""
    at = torch.arange(tokens.shape[1], device=n.device)
    n_chosen = at.where((tokens < 0) & (at <= n[:, None]), len(at)).amin(dim=1).minimum(n + 1).int()
    is_short = n_chosen <= n
    return n_chosen - 1, is_short & ~has_drafts, (is_short & has_drafts).int()


def _ended(tokens: Tensor, n: Tensor, ends: Tensor, budget: Tensor, fault: Tensor) -> tuple[Tensor, Tensor]:
    """How many of `tokens: [L, P]` count and what finished the slot, `[L]` each: an end token, the budget, no room."""
    at = torch.arange(tokens.shape[1], device=tokens.device)
    is_end = (tokens[:, :, None] == ends[:, None]).any(dim=2) & (tokens >= 0) & (at <= n[:, None])
    has_end = is_end.any(dim=1)
    cut = torch.where(has_end, is_end.int().argmax(dim=1) + 1, n + 1).int()
    finish = has_end.int() * FOUND_END
    is_spent = (cut > budget) | ((cut == budget) & ~has_end)
    cut, finish = torch.where(is_spent, budget, cut), finish.masked_fill(is_spent, SPENT_BUDGET)
    has_no_room = (fault & NO_ROOM) != 0
    return cut.masked_fill(has_no_room, 0), finish.masked_fill(has_no_room, STOPPED)


def commit_variant(arch: str, nodes: int, path_len: int, pending: int, keeps: Kept = NOT_KEPT) -> Variant:
    """The commit of trees of `nodes` with paths of up to `path_len`, and `pending` draft entries (0: no draft)."""
    if nodes < 1 or path_len < 1:
        raise KernelLimit(f"{nodes} nodes, paths of {path_len}", "at least 1 of each", "give a tree with a root")
    return Variant(
        name=f"commit_{nodes}_{path_len}_{pending}{keeps.name}",
        make=make_commit,
        constants={
            "nodes": nodes, "path_len": path_len, "pending": pending, **keeps.constants, "overlap": overlaps(arch)
        },
        parameters=parameters(
            "active:in n_accepted:in path:in tokens:in choices:in node_tokens:in places:in ends:in state:inout "
            "pending_tokens:inout pending_rows:inout kept:out turn:in results:out n_slots:i32 width:i32 first_kept:i32"
        ),
        threads=THREADS, instructions={"VOTE": 1},
        max_registers=96,  # the loop over a path is unrolled
        dependent=overlaps(arch),
    )  # fmt: skip


def commit(arch: str, decided: Decided, out: Committed, keeps: Kept = NOT_KEPT) -> list[Launch]:
    """`out` after the step that `decided` describes."""
    (batch, path_len), nodes = decided.path.shape, decided.choices.shape[1]
    return [
        commit_variant(arch, nodes, path_len, out.pending_tokens.shape[1], keeps).launch(
            (batch,), **decided._asdict(), **out._asdict(), first_kept=keeps.first, n_slots=out.state.shape[1],
            width=out.results.shape[2],
        )
    ]  # fmt: skip


def commit_meaning(decided: Decided, out: Committed, keeps: Kept = NOT_KEPT) -> None:
    """What `commit` computes, in plain torch."""
    for after, tensor in zip(commit_reference(decided, out, keeps), out, strict=True):
        tensor.copy_(after)


COMMIT = Op("commit", commit, commit_meaning)


def commit_cost(batch: int, nodes: int, path_len: int, pending: int) -> Cost:
    """Slot, turn, acceptance, path, tokens, choice, nodes and places, ends, seven fields in; seven fields, pending
    entries, kept and the result row out."""
    read = 4 + 4 + 4 + 8 * path_len + 4 + 8 * nodes - 4 + 4 * MOST_ENDS + 7 * 4
    return Cost(batch * (read + 7 * 4 + 8 * min(pending, path_len) + 4 + 4 * result_width(path_len, nodes)))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    batch, nodes, path_len, n_slots = case["batch"], case["nodes"], case["path_len"], case["slots"]

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    state = integers(1, 9, N_FIELDS, n_slots)
    state[PLAIN], state[BUDGET] = 0, integers(1, 2 * path_len, n_slots)
    state[MOST_DRAFTS] = path_len if "unchosen" in case else integers(0, path_len + 1, n_slots)
    if "keeps" in case:
        state[N_PENDING] = integers(1, case["pending"], n_slots)
    order = torch.randperm(n_slots, generator=generator, device=device).sort().values.int()
    active = torch.where(torch.arange(n_slots, device=device) < case["active"], order, -1).int()
    ends = torch.full((n_slots, MOST_ENDS), -1, dtype=torch.int32, device=device)
    ends[:, :2] = integers(0, 12, n_slots, 2)
    accepted, places = integers(0, path_len, batch), integers(0, 99, batch, nodes)
    tokens, choices = integers(0, 12, batch, path_len), integers(0, 12, batch, nodes)
    if case.get("broken"):  # one row of each fault, and one slot that has had its own before
        accepted[0], places[1, -1], places[2, 0] = path_len, -1, -1
        state[PLAIN, int(order[3])] = 1
    if case.get("unchosen"):  # the bonus; all; the plain choice; a draft where the budget ends; past an end; no drafts
        accepted[:], state[BUDGET] = path_len - 1, 99
        tokens[0, -1], tokens[1], choices[2, 0], tokens[3, -1], tokens[4, -1] = -1, -1, -1, -1, -1
        state[PLAIN, int(order[2])], state[BUDGET, int(order[3])] = 1, max(path_len - 1, 1)
        ends[order[4], 0] = tokens[4, 0]
    return {
        "active": active, "n_accepted": accepted,
        "path": integers(0, 2, batch, path_len).cumsum(1).clamp(max=nodes - 1).int(),
        "tokens": tokens, "choices": choices,
        "node_tokens": integers(0, 12, batch, nodes), "places": places, "ends": ends, "state": state,
        "pending_tokens": integers(0, 12, n_slots, case["pending"]),
        "pending_rows": integers(0, 12, n_slots, case["pending"]), "turn": integers(0, RESULT_BLOCKS, 1),
    }  # fmt: skip


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    made = {name: inputs[name].clone() for name in ("state", "pending_tokens", "pending_rows", "turn")}
    device, width = inputs["state"].device, result_width(case["path_len"], case["nodes"])
    made["kept"] = poison(case["batch"], dtype=torch.int32, device=device)
    results = poison(RESULT_BLOCKS, case["slots"], case.get("width", width), dtype=torch.int32, device=device)
    return {**made, "results": results}


def _kept(case: Case) -> Kept:
    return Kept(*case["keeps"]) if "keeps" in case else NOT_KEPT


def _decided(inputs: Tensors) -> Decided:
    return Decided(**{name: inputs[name] for name in Decided._fields})


CARD = Card(
    name="commit",
    equation="tokens += accepted + bonus, cut at an end or the budget; length += n + 1; root = bonus",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: dict(
        commit_reference(_decided(inputs), Committed(**_outputs(case, inputs)), _kept(case))._asdict()
    ),
    launches=lambda arch, case, inputs, outputs: commit(arch, _decided(inputs), Committed(**outputs), _kept(case)),
    cost=lambda case: commit_cost(case["batch"], case["nodes"], case["path_len"], case["pending"]),
    variants=lambda arch: [commit_variant(arch, 4, 4, 4), commit_variant(arch, 1, 1, 8, Kept(8, 9, True))],
    slow_variants=lambda arch: [commit_variant(arch, 1, 1, 0), commit_variant(arch, 64, 9, 9)],
    cases=(
        {"batch": 5, "slots": 6, "active": 4, "nodes": 4, "path_len": 4, "pending": 4, "broken": True},
        {"batch": 6, "slots": 6, "active": 6, "nodes": 4, "path_len": 4, "pending": 4},
        {"batch": 6, "slots": 6, "active": 6, "nodes": 4, "path_len": 4, "pending": 4, "unchosen": True},
        {"batch": 5, "slots": 5, "active": 5, "nodes": 1, "path_len": 1, "pending": 0, "unchosen": True},
        {"batch": 2, "slots": 3, "active": 2, "nodes": 1, "path_len": 1, "pending": 0},
        {"batch": 3, "slots": 4, "active": 3, "nodes": 1, "path_len": 1, "pending": 8, "keeps": (8, 40, True)},
        {"batch": 5, "slots": 5, "active": 5, "nodes": 1, "path_len": 1, "pending": 8, "keeps": (8, 40, False),
         "unchosen": True},
        {"batch": 3, "slots": 4, "active": 3, "nodes": 2, "path_len": 2, "pending": 5, "width": 15},
    ),
    slow_cases=({"batch": 9, "slots": 9, "active": 8, "nodes": 40, "path_len": 35, "pending": 35},),
    shapes=tuple(
        {"batch": b, "slots": 16, "active": b, "nodes": 4, "path_len": 4, "pending": 4} for b in (1, 4, 16)
    ),
    hand_counts=(
        (
            {"batch": 2, "nodes": 4, "path_len": 3, "pending": 3},
            Cost(2 * (224 + 104)),  # in: 12 + 24 + 4 + 28 + 128 + 28; out: 28 + 24 + 4 + 4 * 12
        ),
    ),
)  # fmt: skip
