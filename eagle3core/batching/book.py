"""The one book of an engine: which requests wait, whose prompt is being read, and who runs.

Result rows carry a request's id, and a row whose request has left the book was made before the host knew, so it is
thrown away. A slot is where a request lies. One prompt is under reading at a time, first come first served; while
others run it is read chunk by chunk, steps in between. What waits when nothing runs is read before the first step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from eagle3core.batching import step_log
from eagle3core.batching.proposals import Proposals
from eagle3core.batching.share import ReadingShare
from eagle3core.config import EngineConfig
from eagle3core.errors import InvariantViolated
from eagle3core.kernels.slots.slot_state import NO_ROOM, NOT_FINITE
from eagle3core.metrics import StepRecord
from eagle3core.performance import mode as performance_mode
from eagle3core.request import Request
from eagle3core.step.admission import Reading, SlotRequest
from eagle3core.step.outcome import RowOutcome
from eagle3core.step.run import DeviceRunner
from eagle3core.trace import Trace
from eagle3core.trees import StepTree

log = logging.getLogger("eagle3core")


class Book:
    """Takes requests from the waiting line through a slot to their end, one round at a time. One thread at a time.

    Args:
        runner: does the work. promises: what performance mode watches.

    Attributes:
        waiting, reading, running: the requests; those that run by their id.
    """

    def __init__(self, runner: DeviceRunner, promises: performance_mode.Watch, config: EngineConfig) -> None:
        self.runner, self.promises, self.config = runner, promises, config
        self.waiting: deque[Request] = deque()
        self.reading: Request | None = None
        self.running: dict[int, Request] = {}
        self._progress: Reading | None = None  # of the prompt under reading
        self._share = ReadingShare(config.prefill_share)
        self._proposals = Proposals(config.speculative_config)
        self._n_steps = 0
        self._is_counting = False  # a run, from the first request in an empty book to an empty book, is open

    @property
    def unfinished(self) -> Iterator[Request]:
        """Requests in the book: those that run, the one under reading, those that wait."""
        yield from self.running.values()
        if self.reading is not None:
            yield self.reading
        yield from self.waiting

    @property
    def is_empty(self) -> bool:
        """Whether no request is in the book; may be asked by a thread whose turn it is not."""
        # In the order in which requests move, and they are put down before they are taken away, so none is overlooked.
        return not self.waiting and self.reading is None and not self.running

    def add(self, requests: Sequence[Request], trace: Trace) -> None:
        """Let requests wait.

        Raises:
            InvariantViolated: in performance mode, a promise of it that does not hold. Nothing has been added then.
        """
        if not requests:
            return
        if self.is_empty:
            self.settle()
            self.promises.begin(trace)
        else:
            self.promises.check(trace)
        self.waiting.extend(requests)
        self._is_counting = True

    def advance(self, trace: Trace, pauses: Callable[[], bool]) -> bool:
        """Read a prompt as far as is due, or else decode a step; whether that ends a round of scheduling.

        Args:
            pauses: asked between chunks that follow each other: whether to come back before the next.
        """
        if self._may_read:
            self._read_prompt(trace, pauses)
            return False
        if self.running:
            self._decode(trace)
        if self.is_empty:
            self.settle()
        return True

    def settle(self) -> None:
        """With an empty book: read what is still under way, of requests that ended meanwhile, and end the run."""
        self._proposals.forget()
        self.runner.collect(everything=True)
        if self._is_counting:
            self._is_counting = False
            self.promises.end(self.runner.target.embedding)

    def cancel(self, request: Request) -> bool:
        """End a request wherever it is; False where it has ended already."""
        if request.finish_reason is not None:
            return False
        if request.id in self.running:
            del self.running[request.id]
            self.runner.release(request.slot)
        elif request is self.reading:
            self.reading = self._progress = None  # its slot does not run, and the next prompt's `begin` clears it
        elif request in self.waiting:
            self.waiting.remove(request)
        request.cancel()
        if self.is_empty:
            self._proposals.forget()
            self.runner.collect(everything=True)
        return True

    def fail(self, cause: BaseException) -> None:
        """End every request with `cause` and empty every slot, so that the engine is usable again."""
        for request in list(self.unfinished):
            request.fail(cause)
        self.running.clear()  # before the runner is asked: one that fails here must not leave requests in the book
        self.waiting.clear()
        self.reading = self._progress = None
        self._is_counting = False
        self._share.forget()
        self._proposals.forget()
        self.runner.abandon()

    @property
    def _may_read(self) -> bool:
        if self.reading is None and not (self.waiting and len(self.running) < self.runner.n_slots):
            return False
        # Who waits before the first step is read before it, so that a batch that begins together steps together.
        return not self.running or self._n_steps == 0 or self._share.may_read

    def _read_prompt(self, trace: Trace, pauses: Callable[[], bool]) -> None:
        if not self.running:
            self._n_steps = 0  # steps are numbered from the first request of a batch, as taps name them
            self._share.forget()
        if self._progress is None:
            self._begin(trace)
        request, progress = self.reading, self._progress
        assert request is not None, "a prompt under reading has its request"
        assert progress is not None, "a request under reading has its progress"
        is_paused = False
        with trace.scope("prefill"):
            while self._may_read and not (progress.is_done or is_paused):
                rows = self.runner.read_on(progress, trace)
                if self._n_steps:
                    self._share.read(rows)
                is_paused = pauses()
        if progress.is_done:
            self.running[request.id] = request
            self.reading = self._progress = None
            self._collect(trace)

    def _begin(self, trace: Trace) -> None:
        self.reading = request = self.waiting[0]
        self.waiting.popleft()
        request.slot = min(set(range(self.runner.n_slots)) - {other.slot for other in self.running.values()})
        trace.tap("prompt_ids", torch.tensor([request.prompt]))
        wanted = SlotRequest(
            request.id, request.prompt, request.stop.limit, request.stop.end_tokens, request.sampling,
            logprobs=request.n_top is not None,
        )  # fmt: skip
        self._progress = self.runner.begin(request.slot, wanted)

    def _decode(self, trace: Trace) -> None:
        number, n_running = self._n_steps, len(self.running)
        step_log.log_active(number, [request.slot for request in self.running.values()], self.runner.n_slots)
        draws = any(request.sampling is not None for request in self.running.values())
        logprobs = any(request.n_top is not None for request in self.running.values())
        self.runner.ready(n_running, trace, draws=draws, logprobs=logprobs)
        self._proposals.write(self.runner, self.running)
        with trace.scope(f"step{number}"), self.promises.step(n_running):
            self.runner.enqueue(n_running, number, trace, draws=draws, logprobs=logprobs)
        self._n_steps += 1
        self._share.stepped(self.runner.rows_of_step(n_running))
        self._collect(trace)

    def _collect(self, trace: Trace) -> None:
        """Read the outcomes that are known, row by row, and retire who is finished."""
        for outcome in self.runner.collect(everything=False):
            asked = step_log.asked_families()
            for row in outcome.rows:
                request = self.running.get(row.request_id)
                if request is None:
                    continue  # made before the host knew: text that does not exist
                if outcome.step is None:
                    request.take(row.tokens, row.logprobs)
                    trace.tap("first_token", torch.tensor([row.tokens]))
                else:
                    self._read(request, row, outcome.step, asked)
                if row.is_broken:
                    request.break_off()
                    log.error("[EAGLE] slot %d: %s", row.slot, request.error)
                self._retire(request, row)

    def _read(self, request: Request, row: RowOutcome, number: int, asked: frozenset[str]) -> None:
        if row.fault:
            self._report(row, number)
        elif not row.is_broken:
            self.promises.row(row)
        start = len(request.token_ids)
        n_committed = request.take(row.tokens, row.logprobs)
        # Positions past a stop were drafted for text that does not exist, so they have no rank.
        ranks = None if row.ranks is None else row.ranks[:n_committed]
        cut = n_committed < row.n_accepted + 1
        tree = None if row.parents is None else self._tree_of(row, row.parents)
        drafts = self._proposals.made_of(row.drafts)
        step = StepRecord(start, len(drafts), row.n_accepted, n_committed, cut, ranks, tree)
        has_drafts = self.runner.n_drafts > 0
        if self.config.enable_metrics and has_drafts:
            request.steps.append(step)
        made = (row.slot, number, step, drafts, request.token_ids[start:])
        if self.config.speculative_config is not None and has_drafts:
            step_log.log_flags(self.config.speculative_config, *made)
        if asked:
            step_log.log_families(asked, *made, n_prompt=len(request.prompt))

    def _tree_of(self, row: RowOutcome, parents: tuple[int, ...]) -> StepTree:
        spec = self.config.speculative_config
        static = spec.static_tree if spec is not None else None
        accepted = row.tokens[: row.n_accepted]
        return StepTree.of(row.drafts, parents, accepted, static.ranks if static is not None else None)

    def _report(self, row: RowOutcome, number: int) -> None:
        """Say that an invariant broke: the slot goes on as the baseline would, or nothing can go on.

        Raises:
            InvariantViolated: in performance mode (docs/requirements.md R-62), or when the slot has no room left.
        """
        broken = performance_mode.broken_by_fault(row.slot, row.fault, number)
        is_of_engine = row.fault & ~NOT_FINITE  # numbers that overflow are the model's, and no reason to end a batch
        if row.fault & NO_ROOM or (is_of_engine and performance_mode.is_on()):
            raise broken
        log.error("[EAGLE] slot %d goes on without its drafts: %s", row.slot, broken)

    def _retire(self, request: Request, row: RowOutcome) -> None:
        """Take a finished request out of the book, and its slot out of the next steps.

        Raises:
            InvariantViolated: the device has ended a request that the host would go on with.
        """
        if request.finish_reason is None:
            if row.is_finished:
                raise InvariantViolated(
                    f"slot {row.slot} stopped after {len(request.token_ids)} of {request.stop.limit} tokens",
                    "a stop at an end token or at the limit",
                    "report this with the request: device and host disagree about its end",
                )
            return
        del self.running[request.id]
        self.promises.answered(self.runner.target.embedding, request.prompt, request.token_ids)
        if not row.is_finished:
            self.runner.release(request.slot)
