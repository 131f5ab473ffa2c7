"""Commit: what a verify step decided becomes the slots' state, and the row of numbers that the host reads later.

Accepted drafts and the bonus are appended up to an end token or the request's budget, whichever comes first; a finished
slot stops running, so the next step does not see it. Where an invariant is broken (an acceptance outside the path, a
cache row without a block) the slot commits the target's choice after its root, which is the baseline's token, and goes
on without its drafts; without room for the root it stops.
Source: docs/requirements.md R-48, R-51..R-61, R-62, R-77, R-84, R-85.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.slots.commit_kernel import THREADS, make_commit
from eagle3core.kernels.slots.slot_state import (
    BAD_ACCEPTANCE,
    BUDGET,
    DRAFT_LENGTH,
    FOUND_END,
    LENGTH,
    MISSING_BLOCKS,
    MOST_ENDS,
    N_FIELDS,
    N_PENDING,
    NO_ROOM,
    PLAIN,
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


def commit_reference(decided: Decided, before: Committed) -> Committed:
    """The state after the commit."""
    made = Committed(*(tensor.clone() for tensor in before))
    results = made.results[int(before.turn)]
    path_len, nodes, pending = decided.path.shape[1], decided.choices.shape[1], before.pending_tokens.shape[1]
    for b in range(len(decided.n_accepted)):
        slot = int(decided.active[b])
        if slot < 0:
            made.kept[b], results[b] = 0, -1
            continue
        field = made.state[:, slot]
        n, places = int(decided.n_accepted[b]), decided.places[b]
        fault = BAD_ACCEPTANCE if not 0 <= n < path_len else 0
        fault |= MISSING_BLOCKS if bool((places < 0).any()) else 0
        fault |= NO_ROOM if int(places[0]) < 0 else 0
        field[PLAIN] |= int(fault != 0)
        path, tokens = decided.path[b].tolist(), decided.tokens[b].tolist()
        if int(field[PLAIN]):
            n, path, tokens = 0, [0] + [-1] * (path_len - 1), [int(decided.choices[b, 0])] + [-1] * (path_len - 1)
        ends = [token for token in decided.ends[slot].tolist() if token >= 0]
        budget, cut, finish = int(field[BUDGET]), n + 1, 0
        for t in range(n + 1):
            if tokens[t] in ends:
                cut, finish = t + 1, FOUND_END
                break
        if cut > budget or (cut == budget and not finish):
            cut, finish = budget, SPENT_BUDGET
        if fault & NO_ROOM:
            cut, finish = 0, STOPPED
        for name, value in (
            (RUNNING, int(finish == 0)), (LENGTH, int(field[LENGTH]) + n + 1), (ROOT, tokens[n]),
            (DRAFT_LENGTH, int(field[DRAFT_LENGTH] + field[N_PENDING])), (N_PENDING, n + 1), (BUDGET, budget - cut),
        ):  # fmt: skip
            field[name] = value
        for t in range(min(n + 1, pending)):
            made.pending_tokens[slot, t], made.pending_rows[slot, t] = tokens[t], b * nodes + path[t]
        made.kept[b] = n + 1
        shown = [token if t <= n else -1 for t, token in enumerate(tokens)]
        numbers = [slot, n, cut, finish, fault, *shown, *decided.node_tokens[b, 1:].tolist()]
        results[b] = torch.tensor(numbers, dtype=torch.int32)
    return made


def commit_variant(arch: str, nodes: int, path_len: int, pending: int) -> Variant:
    """The commit of trees of `nodes` with paths of up to `path_len`, and `pending` draft entries (0: no draft)."""
    if nodes < 1 or path_len < 1:
        raise KernelLimit(f"{nodes} nodes, paths of {path_len}", "at least 1 of each", "give a tree with a root")
    return Variant(
        name=f"commit_{nodes}_{path_len}_{pending}",
        make=make_commit,
        constants={"nodes": nodes, "path_len": path_len, "pending": pending, "overlap": overlaps(arch)},
        parameters=parameters(
            "active:in n_accepted:in path:in tokens:in choices:in node_tokens:in places:in ends:in state:inout "
            "pending_tokens:inout pending_rows:inout kept:out turn:in results:out n_slots:i32"
        ),
        threads=THREADS,
        max_registers=96,  # the loop over a path is unrolled
        instructions={"VOTE": 1},
        dependent=overlaps(arch),
    )


def commit(arch: str, decided: Decided, out: Committed) -> list[Launch]:
    """`out` after the step that `decided` describes."""
    (batch, path_len), nodes = decided.path.shape, decided.choices.shape[1]
    return [
        commit_variant(arch, nodes, path_len, out.pending_tokens.shape[1]).launch(
            (batch,), **decided._asdict(), **out._asdict(), n_slots=out.state.shape[1]
        )
    ]


def commit_cost(batch: int, nodes: int, path_len: int, pending: int) -> Cost:
    """Slot, turn, acceptance, path, tokens, choice, nodes and places, ends, five fields in; seven fields, pending
    entries, kept and the result row out."""
    read = 4 + 4 + 4 + 8 * path_len + 4 + 8 * nodes - 4 + 4 * MOST_ENDS + 5 * 4
    return Cost(batch * (read + 7 * 4 + 8 * min(pending, path_len) + 4 + 4 * result_width(path_len, nodes)))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    batch, nodes, path_len, n_slots = case["batch"], case["nodes"], case["path_len"], case["slots"]

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    state = integers(1, 9, N_FIELDS, n_slots)
    state[PLAIN], state[BUDGET] = 0, integers(1, 2 * path_len, n_slots)
    order = torch.randperm(n_slots, generator=generator, device=device).sort().values.int()
    active = torch.where(torch.arange(n_slots, device=device) < case["active"], order, -1).int()
    ends = torch.full((n_slots, MOST_ENDS), -1, dtype=torch.int32, device=device)
    ends[:, :2] = integers(0, 12, n_slots, 2)
    accepted, places = integers(0, path_len, batch), integers(0, 99, batch, nodes)
    if case.get("broken"):  # one row of each fault, and one slot that has had its own before
        accepted[0], places[1, -1], places[2, 0] = path_len, -1, -1
        state[PLAIN, int(order[3])] = 1
    return {
        "active": active, "n_accepted": accepted,
        "path": integers(0, 2, batch, path_len).cumsum(1).clamp(max=nodes - 1).int(),
        "tokens": integers(0, 12, batch, path_len), "choices": integers(0, 12, batch, nodes),
        "node_tokens": integers(0, 12, batch, nodes), "places": places, "ends": ends, "state": state,
        "pending_tokens": integers(0, 12, n_slots, case["pending"]),
        "pending_rows": integers(0, 12, n_slots, case["pending"]), "turn": integers(0, RESULT_BLOCKS, 1),
    }  # fmt: skip


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    made = {name: inputs[name].clone() for name in ("state", "pending_tokens", "pending_rows", "turn")}
    device, width = inputs["state"].device, result_width(case["path_len"], case["nodes"])
    made["kept"] = poison(case["batch"], dtype=torch.int32, device=device)
    results = poison(RESULT_BLOCKS, case["slots"], width, dtype=torch.int32, device=device)
    return {**made, "results": results}


def _decided(inputs: Tensors) -> Decided:
    return Decided(**{name: inputs[name] for name in Decided._fields})


CARD = Card(
    name="commit",
    equation="tokens += accepted + bonus, cut at an end or the budget; length += n + 1; root = bonus",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: dict(
        commit_reference(_decided(inputs), Committed(**_outputs(case, inputs)))._asdict()
    ),
    launches=lambda arch, case, inputs, outputs: commit(arch, _decided(inputs), Committed(**outputs)),
    cost=lambda case: commit_cost(case["batch"], case["nodes"], case["path_len"], case["pending"]),
    variants=lambda arch: [commit_variant(arch, 4, 4, 4)],
    slow_variants=lambda arch: [commit_variant(arch, 1, 1, 0), commit_variant(arch, 64, 9, 9)],
    cases=(
        {"batch": 5, "slots": 6, "active": 4, "nodes": 4, "path_len": 4, "pending": 4, "broken": True},
        {"batch": 6, "slots": 6, "active": 6, "nodes": 4, "path_len": 4, "pending": 4},
        {"batch": 2, "slots": 3, "active": 2, "nodes": 1, "path_len": 1, "pending": 0},
    ),
    slow_cases=({"batch": 9, "slots": 9, "active": 8, "nodes": 40, "path_len": 35, "pending": 35},),
    shapes=tuple(
        {"batch": b, "slots": 16, "active": b, "nodes": 4, "path_len": 4, "pending": 4} for b in (1, 4, 16)
    ),
    hand_counts=(
        (
            {"batch": 2, "nodes": 4, "path_len": 3, "pending": 3},
            # in: 12 + 24 + 4 + 28 + 128 + 20; out: 28 + 24 + 4 + 4 * 11
            Cost(2 * (216 + 100)),
        ),
    ),
)  # fmt: skip
