"""The device's runner: programs replayed, results read one step behind, nothing allocated on the way.

A step is one graph replay, which writes its results to the host's memory, and one event; the host waits for the event
of the step before. The device stops a slot by itself at an end token or at the budget; whatever else ends a
request is found by the host a step late, and tokens made meanwhile are thrown away with the outcome.
Source: docs/requirements.md R-25, R-26, R-86..R-92, R-113(6).
"""

from __future__ import annotations

import torch

from eagle3core.kernels.gemm.launcher import workspace
from eagle3core.kernels.slots.slot_state import MOST_ENDS, N_REQUEST, RUNNING
from eagle3core.performance.gemm_audit import audit
from eagle3core.step.build import step_program
from eagle3core.step.passes import Emitter
from eagle3core.step.prefill import chunk_program, finish_program
from eagle3core.step.program import Program
from eagle3core.step.replay import Enqueue, Replayer, Staged
from eagle3core.step.results import ResultQueue
from eagle3core.step.runner import Outcome, RowOutcome, SlotRequest
from eagle3core.step.state import DeviceSizes, DeviceState, StateShape, new_device_state
from eagle3core.trace import Trace
from eagle3core.weights.packed import PackedDraft, PackedTarget

_SMALL_BATCH = 4


class DeviceRunner:
    """Runs packed models.

    Args:
        arch: compile target of the kernels.
        replayer: how programs are run.
        order: (splits, streams) of attention, or None for the architecture's own.
    """

    def __init__(
        self,
        target: PackedTarget,
        draft: PackedDraft | None,
        sizes: DeviceSizes,
        *,
        arch: str,
        replayer: Replayer,
        order: tuple[int, int] | None = None,
    ) -> None:
        self.target, self.draft, self.sizes, self.replayer = target, draft, sizes, replayer
        self.n_slots, self.depth, self.n_drafts = sizes.n_slots, sizes.path_len - 1, sizes.nodes - 1
        shape = StateShape(target.geometry, draft.geometry if draft else None, target.dtype, target.device)
        self.state: DeviceState = new_device_state(arch, shape, sizes, order)
        self.emit = Emitter(arch, order, workspace(target.device))
        self.programs = {batch: step_program(self.emit, target, draft, self.state, batch) for batch in buckets(sizes)}
        self.chunk = chunk_program(self.emit, target, draft, self.state)
        self.finish = finish_program(self.emit, target, draft, self.state)
        self.gemms = audit(arch, [self.chunk, self.finish, *self.programs.values()])
        self._whole: dict[int, Enqueue] = {}
        self._staged: dict[int, Staged] = {}
        self._running: set[int] = set()
        self._results = ResultQueue(self.state.results, target.device)

    def prepare(self) -> None:
        """Capture every program now, so that no step has to."""
        for program in (self.chunk, self.finish, *self.programs.values()):
            self._enqueue_of(program)

    def replay_by(self, replayer: Replayer) -> None:
        """Run programs by `replayer` from now on; what was captured before is dropped."""
        self.replayer = replayer
        self._whole.clear()
        self._staged.clear()

    def admit(self, slot: int, request: SlotRequest, trace: Trace) -> None:
        state, n_prompt = self.state, len(request.prompt)
        numbers = [slot, n_prompt, request.budget, 0, *request.ends[:MOST_ENDS]]
        numbers += [-1] * (N_REQUEST + MOST_ENDS - len(numbers))
        state.request.copy_(torch.tensor(numbers, dtype=torch.int32))
        state.prompt[:n_prompt].copy_(torch.tensor(list(request.prompt), dtype=torch.int32))
        with trace.scope("prefill"):
            for i in range(-(-n_prompt // self.sizes.chunk)):
                state.start.copy_(state.starts[i : i + 1])
                self._run(self.chunk, trace)
            self._run(self.finish, trace)
        self._running.add(slot)
        self._results.send(1, is_admission=True)

    def enqueue(self, trace: Trace) -> None:
        batch = next(n for n in self.programs if n >= len(self._running))
        self._run(self.programs[batch], trace)
        self._results.send(batch, is_admission=False)

    def collect(self, *, everything: bool) -> list[Outcome]:
        outcomes = []
        while len(self._results) > (0 if everything else 1):
            outcomes.append(self._outcome(*self._results.receive()))
        return outcomes

    def release(self, slot: int) -> None:
        if slot in self._running:  # the device does not know yet
            self._running.remove(slot)
            self.state.state[RUNNING, slot : slot + 1].zero_()

    def abandon(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        self._running.clear()
        self._results.forget()
        self.state.state[RUNNING].zero_()
        self.state.turn.zero_()  # where the host's count begins again; half a step may have moved it

    def _run(self, program: Program, trace: Trace) -> None:
        if not trace.is_detailed:
            self._enqueue_of(program)()
            return
        if id(program) not in self._staged:
            self._staged[id(program)] = self.replayer.staged(program)
        self._staged[id(program)](trace)

    def _enqueue_of(self, program: Program) -> Enqueue:
        if id(program) not in self._whole:
            self._whole[id(program)] = self.replayer.whole(program)
        return self._whole[id(program)]

    def _outcome(self, is_admission: bool, block: list[list[int]]) -> Outcome:
        path_len, rows = self.sizes.path_len, []
        for slot, n_accepted, _, finish, fault, *tokens in block:
            if slot < 0:
                continue
            if finish:
                self._running.discard(slot)
            rows.append(RowOutcome(slot, tokens[: n_accepted + 1], tokens[path_len:], n_accepted, None, fault))
        return Outcome(is_admission, rows)


def buckets(sizes: DeviceSizes) -> list[int]:
    """Batch sizes that programs are made for: 1 to 4, powers of two, and the most.

    Up to 4 every size has its own, so that work falls with each slot that finishes; beyond, a size in between costs a
    graph more than it saves.
    """
    found = [n for n in range(1, _SMALL_BATCH + 1) if n <= sizes.n_slots]
    while 2 * found[-1] < sizes.n_slots:
        found.append(2 * found[-1])
    return sorted({*found, sizes.n_slots})
