"""Admission: a prompt that has been read becomes a running slot, with the first sampled token as its root.

The token may end the request at once; so does none, where the logits were not finite.
Source: docs/requirements.md R-47, R-75, R-81.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.slots.slot_state import (
    BUDGET,
    DRAFT_LENGTH,
    FOUND_END,
    GOES_ON,
    LENGTH,
    MOST_DRAFTS,
    MOST_ENDS,
    N_FIELDS,
    N_PENDING,
    N_REQUEST,
    N_RESULT,
    NO_CHOICE_LEFT,
    PLAIN,
    REQUEST_ID,
    RESULT_BLOCKS,
    ROOT,
    RUNNING,
    SPENT_BUDGET,
)

THREADS = 32


class Admitted(NamedTuple):
    """What changes, int32: `state: [N_FIELDS, S]`, `ends: [S, MOST_ENDS]`, `pending_tokens, pending_rows: [S, P]`,
    `turn: [1]` becomes the other of `results: [RESULT_BLOCKS, S, W]`, whose first row is written."""

    state: Tensor
    ends: Tensor
    pending_tokens: Tensor
    pending_rows: Tensor
    turn: Tensor
    results: Tensor


def admit_reference(request: Tensor, first: Tensor, before: Admitted, seed_row: int, unread: int = 1) -> Admitted:
    """The state with the request in its slot; its taps lie at row `seed_row` + slot.

    `unread`: entries of the prompt that the draft's cache still lacks: a head's last one takes the first token with it.
    """
    made = Admitted(*(tensor.clone() for tensor in before))
    slot, n_prompt, budget, plain, request_id, most = request[:N_REQUEST].tolist()
    token, ends = int(first[0]), request[N_REQUEST:]
    finish = FOUND_END if token in ends.tolist() else SPENT_BUDGET if budget <= 1 else GOES_ON
    finish = NO_CHOICE_LEFT if token < 0 else finish
    field = made.state[:, slot]
    for name, value in (
        (RUNNING, int(finish == GOES_ON)), (LENGTH, n_prompt), (ROOT, token), (DRAFT_LENGTH, n_prompt - unread),
        (N_PENDING, 1), (BUDGET, budget - 1), (PLAIN, plain), (REQUEST_ID, request_id),
        (MOST_DRAFTS, most),
    ):  # fmt: skip
        field[name] = value
    made.ends[slot] = ends
    if made.pending_tokens.shape[1]:
        made.pending_tokens[slot, 0], made.pending_rows[slot, 0] = token, seed_row + slot
    made.turn[0] = (made.turn[0] + 1) % RESULT_BLOCKS
    row = made.results[int(made.turn), 0]
    row[:] = -1
    row[: N_RESULT + 1] = torch.tensor([slot, 0, int(token >= 0), finish, 0, request_id, token], dtype=torch.int32)
    return made


def make_admit(isa: Any, *, overlap: bool) -> Any:
    """One warp; lane e handles end token e."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64

    def kernel(
        request: Any, first: Any, state: Any, ends: Any, pending_tokens: Any, pending_rows: Any, turn: Any,
        results: Any, n_slots: Any, pending: Any, width: Any, seed_row: Any, unread: Any,
    ) -> None:  # fmt: skip
        lane = i32(cuda.threadIdx.x)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        slot, n_prompt = isa.load_u32(request), isa.load_u32(request + 4)
        budget, plain, request_id = isa.load_u32(request + 8), isa.load_u32(request + 12), isa.load_u32(request + 16)
        most = isa.load_u32(request + 20)
        token, end = isa.load_u32(first), isa.load_u32(request + (N_REQUEST + lane) * 4)
        # An admission takes a block of results as a step does.
        block = i32((isa.load_u32(turn) + 1) & (RESULT_BLOCKS - 1))
        result = results + i64(i32(block * n_slots)) * width * 4
        is_end = i32(0)
        if end == token and token >= 0:
            is_end = i32(1)
        finish = i32(0)
        if budget <= 1:
            finish = i32(SPENT_BUDGET)
        if isa.any_lane(is_end):
            finish = i32(FOUND_END)
        n_committed = i32(1)
        if token < 0:
            finish, n_committed = i32(NO_CHOICE_LEFT), i32(0)
        # The request's end tokens, a lane each, stay with the slot for `commit`.
        isa.store_u32(ends + (i64(slot) * MOST_ENDS + lane) * 4, end)
        at = i32(lane + N_RESULT + 1)
        while at < width:
            isa.store_u32(result + at * 4, -1)
            at = i32(at + THREADS)
        if lane == 0:
            is_running = i32(0)
            if finish == 0:
                is_running = i32(1)
            fields, pitch = state + slot * 4, i64(n_slots) * 4
            isa.store_u32(fields + RUNNING * pitch, is_running)
            isa.store_u32(fields + LENGTH * pitch, n_prompt)
            isa.store_u32(fields + ROOT * pitch, token)
            isa.store_u32(fields + DRAFT_LENGTH * pitch, n_prompt - unread)
            isa.store_u32(fields + N_PENDING * pitch, 1)
            isa.store_u32(fields + BUDGET * pitch, budget - 1)
            isa.store_u32(fields + PLAIN * pitch, plain)
            isa.store_u32(fields + REQUEST_ID * pitch, request_id)
            isa.store_u32(fields + MOST_DRAFTS * pitch, most)
            if pending > 0:
                isa.store_u32(pending_tokens + i64(slot) * pending * 4, token)
                isa.store_u32(pending_rows + i64(slot) * pending * 4, seed_row + slot)
            isa.store_u32(turn, block)
            isa.store_u32(result, slot)
            isa.store_u32(result + 4, 0)
            isa.store_u32(result + 8, n_committed)
            isa.store_u32(result + 12, finish)
            isa.store_u32(result + 16, 0)
            isa.store_u32(result + 20, request_id)
            isa.store_u32(result + 24, token)

    return kernel


def admit_variant(arch: str) -> Variant:
    """The one kernel."""
    return Variant(
        name="admit",
        make=make_admit,
        constants={"overlap": overlaps(arch)},
        parameters=parameters(
            "request:in first:in state:inout ends:inout pending_tokens:inout pending_rows:inout turn:inout results:out "
            "n_slots:i32 pending:i32 width:i32 seed_row:i32 unread:i32"
        ),
        threads=THREADS,
        max_registers=48,
        instructions={"VOTE": 1},
        dependent=overlaps(arch),
    )


def admit(arch: str, request: Tensor, first: Tensor, out: Admitted, seed_row: int, unread: int = 1) -> list[Launch]:
    """`out` with `request: [N_REQUEST + MOST_ENDS]` in its slot, `first: [1]` its first token; int32."""
    return [
        admit_variant(arch).launch(
            (1,), request=request, first=first, **out._asdict(), n_slots=out.state.shape[1],
            pending=out.pending_tokens.shape[1], width=out.results.shape[2], seed_row=seed_row,
            unread=unread,
        )
    ]  # fmt: skip


def admit_meaning(request: Tensor, first: Tensor, out: Admitted, seed_row: int, unread: int = 1) -> None:
    """What `admit` computes, in plain torch."""
    for after, tensor in zip(admit_reference(request, first, out, seed_row, unread), out, strict=True):
        tensor.copy_(after)


ADMIT = Op("admit", admit, admit_meaning)


def admit_cost(width: int, pending: int) -> Cost:
    """The request, its token and the turn in; nine fields, the ends, a pending entry, the turn and a row out."""
    return Cost(4 * (N_REQUEST + MOST_ENDS + 1 + 1 + 9 + 1 + MOST_ENDS + width) + (8 if pending else 0))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    n_slots = case["slots"]
    request = torch.full((N_REQUEST + MOST_ENDS,), -1, dtype=torch.int32, device=device)
    request[:N_REQUEST] = torch.tensor([n_slots - 1, 17, case["budget"], 0, 41, 3], dtype=torch.int32)
    request[N_REQUEST : N_REQUEST + 2] = torch.tensor([5, 9], dtype=torch.int32)
    return {
        "request": request, "first": torch.tensor([case["first"]], dtype=torch.int32, device=device),
        "state": integers(0, 9, N_FIELDS, n_slots), "ends": integers(0, 9, n_slots, MOST_ENDS),
        "pending_tokens": integers(0, 9, n_slots, case["pending"]),
        "pending_rows": integers(0, 9, n_slots, case["pending"]), "turn": integers(0, RESULT_BLOCKS, 1),
    }  # fmt: skip


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    made = {name: inputs[name].clone() for name in Admitted._fields[:-1]}
    size = (RESULT_BLOCKS, case["slots"], case["width"])
    return {**made, "results": poison(*size, dtype=torch.int32, device=inputs["state"].device)}


CARD = Card(
    name="admit",
    equation="slot = (running unless first ends it, length = n_prompt, root = first, budget - 1)",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: dict(
        admit_reference(
            inputs["request"],
            inputs["first"],
            Admitted(**_outputs(case, inputs)),
            case["seed_row"],
            case.get("unread", 1),
        )._asdict()
    ),
    launches=lambda arch, case, inputs, outputs: admit(
        arch, inputs["request"], inputs["first"], Admitted(**outputs), case["seed_row"], case.get("unread", 1)
    ),
    cost=lambda case: admit_cost(case["width"], case["pending"]),
    variants=lambda arch: [admit_variant(arch)],
    cases=(
        {"slots": 3, "budget": 7, "first": 4, "pending": 4, "width": 12, "seed_row": 12},
        {"slots": 1, "budget": 1, "first": 4, "pending": 0, "width": 7, "seed_row": 1},
        {"slots": 2, "budget": 1, "first": 9, "pending": 1, "width": 70, "seed_row": 3},
        {"slots": 2, "budget": 1, "first": -1, "pending": 1, "width": 12, "seed_row": 3},
        {"slots": 2, "budget": 7, "first": 4, "pending": 4, "width": 12, "seed_row": 3, "unread": 0},
    ),
    shapes=({"slots": 4, "budget": 7, "first": 4, "pending": 4, "width": 12, "seed_row": 12},),
    hand_counts=(({"width": 12, "pending": 4}, Cost(4 * (38 + 1 + 1 + 9 + 1 + 32 + 12) + 8)),),
)
