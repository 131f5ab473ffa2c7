"""Admission: prompts that have been read become running slots, with the first sampled tokens as their roots.

A token may end its request at once; so does none, where the logits were not finite. As many requests are looked at as a
pass over prompts can end; one without a slot is nobody's.
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
    `turn: [1]` becomes the other of `results: [RESULT_BLOCKS, S, W]`, of which row i is written for request i."""

    state: Tensor
    ends: Tensor
    pending_tokens: Tensor
    pending_rows: Tensor
    turn: Tensor
    results: Tensor


def admit_reference(
    requests: Tensor, request_ends: Tensor, first: Tensor, before: Admitted, unread: int = 1
) -> Admitted:
    """The state with `requests: [N_REQUEST, E]` in their slots, their taps in the rows they name.

    Args:
        request_ends: `[E, MOST_ENDS]`. first: `[E]` first tokens.
        unread: entries of a prompt that the draft's cache still lacks: a head's last one takes the first token with it.
    """
    made = Admitted(*(tensor.clone() for tensor in before))
    made.turn[0] = (made.turn[0] + 1) % RESULT_BLOCKS
    for i, request in enumerate(requests.T.tolist()):
        slot, n_prompt, budget, plain, request_id, _, seed_row, most = request
        if slot < 0:
            continue
        token, ends = int(first[i]), request_ends[i]
        finish = FOUND_END if token in ends.tolist() else SPENT_BUDGET if budget <= 1 else GOES_ON
        finish = NO_CHOICE_LEFT if token < 0 else finish
        field = made.state[:, slot]
        for name, value in (
            (RUNNING, int(finish == GOES_ON)), (LENGTH, n_prompt), (ROOT, token), (DRAFT_LENGTH, n_prompt - unread),
            (N_PENDING, 1), (BUDGET, budget - 1), (PLAIN, plain), (REQUEST_ID, request_id), (MOST_DRAFTS, most),
        ):  # fmt: skip
            field[name] = value
        made.ends[slot] = ends
        if made.pending_tokens.shape[1]:
            made.pending_tokens[slot, 0], made.pending_rows[slot, 0] = token, seed_row
        row = made.results[int(made.turn), i]
        row[:] = -1
        row[: N_RESULT + 1] = torch.tensor([slot, 0, int(token >= 0), finish, 0, request_id, token], dtype=torch.int32)
    return made


def make_admit(isa: Any, *, overlap: bool) -> Any:
    """One warp, request after request; lane e handles end token e."""
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64

    def kernel(
        requests: Any, request_ends: Any, first: Any, state: Any, ends: Any, pending_tokens: Any, pending_rows: Any,
        turn: Any, results: Any, n_requests: Any, n_slots: Any, pending: Any, width: Any, unread: Any,
    ) -> None:  # fmt: skip
        lane = i32(cuda.threadIdx.x)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        # An admission takes a block of results as a step does, however many requests are in it.
        block = i32((isa.load_u32(turn) + 1) & (RESULT_BLOCKS - 1))
        pitch, i = i64(n_requests) * 4, i32(0)
        while i < n_requests:
            request = requests + i64(i) * 4
            slot = isa.load_u32(request)
            if slot >= 0:
                n_prompt, budget = isa.load_u32(request + pitch), isa.load_u32(request + 2 * pitch)
                plain, request_id = isa.load_u32(request + 3 * pitch), isa.load_u32(request + 4 * pitch)
                seed_row, most = isa.load_u32(request + 6 * pitch), isa.load_u32(request + 7 * pitch)
                token = isa.load_u32(first + i64(i) * 4)
                end = isa.load_u32(request_ends + (i64(i) * MOST_ENDS + lane) * 4)
                result = results + i64(i32(block * n_slots + i)) * width * 4
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
                    fields, step = state + i64(slot) * 4, i64(n_slots) * 4
                    isa.store_u32(fields + RUNNING * step, is_running)
                    isa.store_u32(fields + LENGTH * step, n_prompt)
                    isa.store_u32(fields + ROOT * step, token)
                    isa.store_u32(fields + DRAFT_LENGTH * step, n_prompt - unread)
                    isa.store_u32(fields + N_PENDING * step, 1)
                    isa.store_u32(fields + BUDGET * step, budget - 1)
                    isa.store_u32(fields + PLAIN * step, plain)
                    isa.store_u32(fields + REQUEST_ID * step, request_id)
                    isa.store_u32(fields + MOST_DRAFTS * step, most)
                    if pending > 0:
                        isa.store_u32(pending_tokens + i64(slot) * pending * 4, token)
                        isa.store_u32(pending_rows + i64(slot) * pending * 4, seed_row)
                    isa.store_u32(result, slot)
                    isa.store_u32(result + 4, 0)
                    isa.store_u32(result + 8, n_committed)
                    isa.store_u32(result + 12, finish)
                    isa.store_u32(result + 16, 0)
                    isa.store_u32(result + 20, request_id)
                    isa.store_u32(result + 24, token)
            i = i32(i + 1)
        if lane == 0:  # last, since every lane has read it: a request's vote keeps them together
            isa.store_u32(turn, block)

    return kernel


def admit_variant(arch: str) -> Variant:
    """The one kernel."""
    return Variant(
        name="admit",
        make=make_admit,
        constants={"overlap": overlaps(arch)},
        parameters=parameters(
            "requests:in request_ends:in first:in state:inout ends:inout pending_tokens:inout pending_rows:inout "
            "turn:inout results:out n_requests:i32 n_slots:i32 pending:i32 width:i32 unread:i32"
        ),
        threads=THREADS,
        max_registers=48,
        instructions={"VOTE": 1},
        dependent=overlaps(arch),
    )


def admit(
    arch: str, requests: Tensor, request_ends: Tensor, first: Tensor, out: Admitted, unread: int = 1
) -> list[Launch]:
    """`out` with `requests: [N_REQUEST, E]` in their slots, E at most S; int32, the rest as in the reference."""
    return [
        admit_variant(arch).launch(
            (1,), requests=requests, request_ends=request_ends, first=first, **out._asdict(),
            n_requests=requests.shape[1], n_slots=out.state.shape[1], pending=out.pending_tokens.shape[1],
            width=out.results.shape[2], unread=unread,
        )
    ]  # fmt: skip


def admit_meaning(requests: Tensor, request_ends: Tensor, first: Tensor, out: Admitted, unread: int = 1) -> None:
    """What `admit` computes, in plain torch."""
    for after, tensor in zip(admit_reference(requests, request_ends, first, out, unread), out, strict=True):
        tensor.copy_(after)


ADMIT = Op("admit", admit, admit_meaning)


def admit_cost(requests: int, width: int, pending: int) -> Cost:
    """The turn in and out; of a request seven numbers, its ends and its token in, and nine fields, the ends, a pending
    entry and a row out."""
    each = 4 * (7 + MOST_ENDS + 1 + 9 + MOST_ENDS + width) + (8 if pending else 0)
    return Cost(8 + requests * each)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    n_slots, n = case["slots"], len(case["budgets"])
    requests = torch.full((N_REQUEST, n), -1, dtype=torch.int32, device=device)
    for i, budget in enumerate(case["budgets"]):
        if budget is not None:
            seed_row = case["seed_row"] + n_slots - 1 - i
            numbers = [n_slots - 1 - i, 17 + i, budget, 0, 41 + i, 3, seed_row, 2 + i]
            requests[:, i] = torch.tensor(numbers, dtype=torch.int32)
    ends = torch.full((n, MOST_ENDS), -1, dtype=torch.int32, device=device)
    ends[:, :2] = torch.tensor([5, 9], dtype=torch.int32)
    return {
        "requests": requests, "request_ends": ends,
        "first": torch.tensor(case["first"], dtype=torch.int32, device=device),
        "state": integers(0, 9, N_FIELDS, n_slots), "ends": integers(0, 9, n_slots, MOST_ENDS),
        "pending_tokens": integers(0, 9, n_slots, case["pending"]),
        "pending_rows": integers(0, 9, n_slots, case["pending"]), "turn": integers(0, RESULT_BLOCKS, 1),
    }  # fmt: skip


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    made = {name: inputs[name].clone() for name in Admitted._fields[:-1]}
    size = (RESULT_BLOCKS, case["slots"], case["width"])
    return {**made, "results": poison(*size, dtype=torch.int32, device=inputs["state"].device)}


def _given(inputs: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    return inputs["requests"], inputs["request_ends"], inputs["first"]


CARD = Card(
    name="admit",
    equation="slot = (running unless first ends it, length = n_prompt, root = first, budget - 1)",
    source="derived here",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: dict(
        admit_reference(*_given(inputs), Admitted(**_outputs(case, inputs)), case.get("unread", 1))._asdict()
    ),
    launches=lambda arch, case, inputs, outputs: admit(
        arch, *_given(inputs), Admitted(**outputs), case.get("unread", 1)
    ),
    cost=lambda case: admit_cost(len(case["budgets"]), case["width"], case["pending"]),
    variants=lambda arch: [admit_variant(arch)],
    # By request its budget, None where there is none.
    cases=(
        {"slots": 3, "budgets": (7, 1, 5), "first": (4, 4, 9), "pending": 4, "width": 12, "seed_row": 12},
        {"slots": 1, "budgets": (1,), "first": (4,), "pending": 0, "width": 7, "seed_row": 1},
        {"slots": 2, "budgets": (1, None), "first": (9, 5), "pending": 1, "width": 70, "seed_row": 3},
        {"slots": 2, "budgets": (1, 8), "first": (-1, 2), "pending": 1, "width": 12, "seed_row": 3},
        {"slots": 2, "budgets": (7, None), "first": (4, -1), "pending": 4, "width": 12, "seed_row": 3, "unread": 0},
    ),
    shapes=(
        {"slots": 8, "budgets": (7,) * 8, "first": tuple(range(8)), "pending": 4, "width": 12, "seed_row": 32},
    ),
    hand_counts=(
        ({"budgets": (7, 7), "width": 12, "pending": 4}, Cost(8 + 2 * (4 * (7 + 32 + 1 + 9 + 32 + 12) + 8))),
    ),
)  # fmt: skip
