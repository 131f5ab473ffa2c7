"""Stages of many requests at once, kept by request: every row of a tap goes to the request that it was computed for.

A pass works on the rows of several sequences side by side, and a slot serves one request after another. Row b of a step
is the slot that the program itself calls active, and that slot holds the id of its request; a span of a prompt, and the
end of one, name theirs. Steps are counted by request, so a recording reads as if the request had been alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from eagle3core.kernels.slots import REQUEST, REQUEST_ID, SPAN
from eagle3core.step import DeviceState, Program, Tap, calls_of
from eagle3core.trace import Trace

NOBODY = -1


class RequestTrace(Trace):
    """Keeps every stage of the prefill and of the first `steps` steps of each request.

    Attributes:
        requests: tensors on the CPU by "<pass>/<stage>", in the order in which the requests were admitted.
    """

    is_detailed = True

    def __init__(self, steps: int) -> None:
        self.requests: list[dict[str, Tensor]] = []
        self._steps = steps
        self._scopes: list[str] = []
        self._index: dict[int, int] = {}  # of `requests`, by request id
        self._own_steps: list[list[str]] = []  # of each request: the engine's names of the steps it took part in
        self._n_first_tokens = 0

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
        """What the engine says itself, one request after the other: its prompt, and later its first token."""
        if name == "prompt_ids":
            self.requests.append({})
            self._own_steps.append([])
        if name == "first_token":
            self._n_first_tokens += 1
        index = self._n_first_tokens - 1 if name == "first_token" else len(self.requests) - 1
        self.requests[index][name] = value.flatten().cpu()

    def keep(self, name: str, tap: Tap, owners: Sequence[int]) -> None:
        """The rows of a stage, an equal number for each of `owners`: ids of requests, or `NOBODY`."""
        n = len(tap.value) // len(owners)
        for b, owner in enumerate(owners):
            prefix = None if owner == NOBODY else self._prefix(owner)
            if prefix is None:
                continue
            rows = tap.value[b * n : (b + 1) * n]
            if tap.slots is not None:
                rows = rows[tap.slots[b * n : (b + 1) * n] >= 0]
            key = "/".join([*prefix, *self._scopes[1:], *([tap.scope] if tap.scope else []), name])
            self._put(self.requests[self._index[owner]], key, rows)

    def _prefix(self, owner: int) -> list[str] | None:
        """First part of a name: the prefill, or the request's own number of this step; None past the last one kept."""
        step = self._scopes[0]
        if step == "prefill":
            self._index.setdefault(owner, len(self._index))  # prompts are read in the order in which they were begun
            return [step]
        own = self._own_steps[self._index[owner]]
        if not own or own[-1] != step:
            own.append(step)
        return [f"step{len(own) - 1}"] if len(own) <= self._steps else None

    def _put(self, tensors: dict[str, Tensor], key: str, rows: Tensor) -> None:
        rows = rows.detach().to("cpu", copy=True)
        # A later chunk of the same prompt follows the earlier ones.
        tensors[key] = torch.cat([tensors[key], rows]) if key in tensors else rows


class Owners:
    """Whose rows a program works on, read from the state while it runs.

    Attributes:
        opens: whether the program begins a pass over prompts. goes_on: whether it is the rest of such a pass, and so
            works on the rows of the one that began it.
    """

    def __init__(self, program: Program, state: DeviceState) -> None:
        self.state, self.batch = state, batch_of(program)
        self.slots, self.ids = _named_by(program)
        ops = {call.op for call in calls_of(program)}
        self.opens = "open_chunk" in ops and "admit" not in ops  # the end of prompts opens their last rows
        self.goes_on = not self.batch and not len(self.slots)

    def read(self) -> list[int]:
        """Request ids of the sequences of a pass, in the order of their rows."""
        if self.batch:
            slots, ids = self.state.step.active[: self.batch].tolist(), self.state.state[REQUEST_ID].tolist()
            return [ids[slot] if slot >= 0 else NOBODY for slot in slots]
        pairs = zip(self.slots.tolist(), self.ids.tolist(), strict=True)
        return [id_ if slot >= 0 else NOBODY for slot, id_ in pairs]


def _named_by(program: Program) -> tuple[Tensor, Tensor]:
    """(slots, request ids) that a program over prompts is given; none of a step's."""
    for call in calls_of(program):
        if call.op == "open_chunk":
            spans = call.operands["spans"]
            return spans[SPAN.index("slot")], spans[SPAN.index("request_id")]
        if call.op == "admit":
            requests = call.operands["requests"]
            return requests[REQUEST.index("slot")], requests[REQUEST.index("request_id")]
    return torch.empty(0), torch.empty(0)


def batch_of(program: Program) -> int:
    """Sequences of a step's program; 0 for one that reads a prompt."""
    return next((len(call.operands["out"].lengths) for call in calls_of(program) if call.op == "open_step"), 0)
