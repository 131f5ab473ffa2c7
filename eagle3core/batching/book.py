"""The one book of an engine: which requests wait, whose prompt is being read, and who runs.

Result rows carry a request's id, and a row whose request has left the book was made before the host knew, so it is
thrown away. Prompts are read first come first served, as many in a pass as fill it; while others run, pass by pass with
steps in between. What waits when nothing runs is read before the first step. Where cache blocks run out, the youngest
request waits again, before all others, and is read again with its tokens.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from eagle3core.batching import acceptance_log, step_log
from eagle3core.batching.blocks import CacheBlocks
from eagle3core.batching.depths import depths_for
from eagle3core.batching.faults import report_fault
from eagle3core.batching.proposals import Proposals
from eagle3core.batching.share import ReadingShare
from eagle3core.batching.step_record import record_of
from eagle3core.config import EngineConfig
from eagle3core.errors import InvariantViolated
from eagle3core.performance import mode as performance_mode
from eagle3core.request import Request
from eagle3core.step.admission import EVERY_DRAFT, Reading, SlotRequest, is_full
from eagle3core.step.outcome import Outcome, RowOutcome
from eagle3core.step.run import DeviceRunner
from eagle3core.trace import Trace

log = logging.getLogger("eagle3core")


class Book:
    """Takes requests from the waiting line through a slot to their end, one round at a time. One thread at a time.

    Args:
        runner: does the work. promises: what performance mode watches.

    Attributes:
        waiting, reading, running: the requests, oldest first; those that are read or run by their id.
        blocks: who holds which of the cache. n_passes: over prompts, so far. depths: chooses a step's, where chosen.
    """

    def __init__(self, runner: DeviceRunner, promises: performance_mode.Watch, config: EngineConfig) -> None:
        self.runner, self.promises, self.config = runner, promises, config
        self.blocks = CacheBlocks(runner, keeps=config.prefix_cache)
        self.waiting: deque[Request] = deque()
        self.reading: dict[int, Request] = {}  # between two passes one at most: whose prompt the last one cut
        self.running: dict[int, Request] = {}
        self._progress: dict[int, Reading] = {}  # of the prompts under reading
        self._share, self._proposals = ReadingShare(config.prefill_share), Proposals(config.speculative_config)
        self.depths, self._log = depths_for(runner, config), acceptance_log.AcceptanceLog(config.acceptance_log)
        # A run, whose steps are counted, goes from the first request in an empty book to its end.
        self.n_passes, self._n_steps, self._is_counting = 0, 0, False

    @property
    def unfinished(self) -> Iterator[Request]:
        """Requests in the book: those that run, those under reading, those that wait."""
        return chain(self.running.values(), self.reading.values(), self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether no request is in the book; may be asked by a thread whose turn it is not."""
        # In the order in which requests move, and they are put down before they are taken away, so none is overlooked.
        return not (self.waiting or self.reading or self.running)

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
        """Read prompts as far as is due, or else decode a step; whether that ends a round of scheduling.

        Args:
            pauses: asked between passes that follow each other: whether to come back before the next.
        """
        if self._may_read:
            self._read_prompts(trace, pauses)
            return False
        if self.running:
            self._decode(trace)
        if self.is_empty:
            self.settle()
        return True

    def settle(self) -> None:
        """With an empty book: read what is under way, of requests that ended meanwhile, and end the run."""
        self._forget()
        self.runner.collect(everything=True)
        if self._is_counting:
            self._is_counting = False
            self.promises.end(self.runner.target.embedding)

    def cancel(self, request: Request) -> bool:
        """End a request wherever it is; False where it has ended already."""
        if request.finish_reason is not None:
            return False
        if request.id in self.running:
            self._stop_running(request)
        elif request.id in self.reading:
            self._stop_reading(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.cancel()
        if self.is_empty:
            self._forget()
            self.runner.collect(everything=True)
        return True

    def fail(self, cause: BaseException) -> None:
        """End every request with `cause` and empty every slot, so that the engine is usable again."""
        for request in list(self.unfinished):
            request.fail(cause)
        self.running.clear()  # before the runner is asked: one that fails here must not leave requests in the book
        self.waiting.clear()
        self.reading.clear()
        self._progress.clear()
        self._is_counting = False
        self._share.forget()
        self.blocks.forget()
        self._forget()
        self.runner.abandon()

    def _forget(self) -> None:
        """Drop what is known of drafts of requests that no longer run."""
        self._proposals.forget()
        if self.depths:
            self.depths.forget()

    @property
    def _may_read(self) -> bool:
        if not self.reading and not self._may_begin:
            return False
        # Who waits before the first step is read before it, so that a batch that begins together steps together.
        return not self.running or self._n_steps == 0 or self._share.may_read

    @property
    def _may_begin(self) -> bool:
        if not self.waiting or len(self.running) + len(self.reading) == self.runner.n_slots:
            return False
        return self.blocks.has_room(self.waiting[0], self.running.values(), self._n_steps)

    def _read_prompts(self, trace: Trace, pauses: Callable[[], bool]) -> None:
        """Passes over prompts, until one of them ends."""
        if not self.running:
            self._n_steps = 0  # steps are numbered from the first request of a batch, as taps name them
            self._share.forget()
        while True:
            largest = self.runner.largest_pass(self._share.most_rows if self._n_steps else None)
            while self._may_begin and not is_full(list(self._progress.values()), largest):
                self._begin(trace)
            with trace.scope("prefill"):
                rows = self.runner.read_on(list(self._progress.values()), trace, largest)
            self.n_passes += 1
            if self._n_steps:
                self._share.read(rows)
            ended = [id_ for id_, progress in self._progress.items() if progress.is_done]
            if ended or pauses() or not self._may_read:
                break
        for id_ in ended:
            self.running[id_] = self.reading[id_]
            del self.reading[id_], self._progress[id_]
            self.blocks.runs(self.running[id_], self._n_steps)
        self._collect(trace)

    def _begin(self, trace: Trace) -> None:
        self.reading[self.waiting[0].id] = request = self.waiting[0]
        self.waiting.popleft()
        taken = {one.slot for one in self.running.values()} | {one.slot for one in self._progress.values()}
        request.slot = min(set(range(self.runner.n_slots)) - taken)
        tokens, stop = [*request.prompt, *request.token_ids], request.stop
        if trace.has_taps:
            trace.tap("prompt_ids", torch.tensor([tokens]))
        left, (blocks, n_cached) = stop.limit - len(request.token_ids), self.blocks.begin(request)
        wanted = SlotRequest(
            request.id, tokens, left, stop.end_tokens, request.sampling, logprobs=request.n_top is not None,
            blocks=blocks, n_cached=n_cached, first=request.kept_token[0] if request.kept_token else None,
            most_drafts=EVERY_DRAFT if request.most_drafts is None else request.most_drafts,
        )  # fmt: skip
        self._progress[request.id] = self.runner.begin(request.slot, wanted)

    def _decode(self, trace: Trace) -> None:
        self._make_room(trace)
        number, n_running = self._n_steps, len(self.running)
        if not n_running:
            return  # making room has read results, and all had ended
        step_log.log_active(number, [request.slot for request in self.running.values()], self.runner.n_slots)
        draws = any(request.sampling is not None for request in self.running.values())
        logprobs = any(request.n_top is not None for request in self.running.values())
        depth = self.depths.next(self.running.values()) if self.depths else None
        kind = self.runner.kind_for(depth)
        self.runner.ready(n_running, trace, draws=draws, logprobs=logprobs, depth=depth)
        self._proposals.write(self.runner, self.running)
        with trace.scope(f"step{number}"), self.promises.step(n_running):
            self.runner.enqueue(n_running, number, trace, draws=draws, logprobs=logprobs, depth=depth)
        if self.depths:
            self.depths.enqueued(number, kind)
        self._n_steps += 1
        self._share.stepped(self.runner.rows_of_step(n_running, kind))
        self._collect(trace)

    def _make_room(self, trace: Trace) -> None:
        """Blocks for all that the next step may write, for the oldest first; the youngest are put back for them."""
        number = self._n_steps
        for request in list(self.running.values()):
            while request.id in self.running and not self.blocks.grow(request, number):
                if self.runner.n_under_way:  # known lengths may be less than the longest, and some may have ended
                    self._collect(trace, everything=True)
                    with trace.span("EAGLE::KVCacheRewind"):
                        self.blocks.rewind(self.running.values(), number)
                else:
                    self._put_back(next(reversed((self.reading or self.running).values())))

    def _put_back(self, request: Request) -> None:
        """Let a request wait again, before all others; no result of its is under way."""
        self.waiting.appendleft(request)
        (self._stop_reading if request.id in self.reading else self._stop_running)(request)
        request.put_back()
        self.blocks.counts.n_put_back += 1

    def _stop_reading(self, request: Request) -> None:
        del self.reading[request.id], self._progress[request.id]  # its slot does not run
        self.blocks.release(request)

    def _stop_running(self, request: Request, *, is_stopped: bool = False) -> None:
        """Empty the request's slot; `is_stopped`: the device has stopped it by itself."""
        del self.running[request.id]
        if not is_stopped:
            self.runner.release(request.slot)
        self.blocks.release(request)

    def _collect(self, trace: Trace, *, everything: bool = False) -> None:
        """Read the outcomes that are known, or wait for all of them, row by row, and retire who is finished."""
        for outcome in self.runner.collect(everything=everything):
            asked = step_log.asked_families() if outcome.step is not None else frozenset[str]()
            if self.depths:
                self.depths.saw(outcome)
            for row in outcome.rows:
                request = self.running.get(row.request_id)
                if request is None:
                    continue  # made before the host knew: text that does not exist
                if outcome.step is None:
                    request.take(row.tokens, row.logprobs)
                    if trace.has_taps:
                        trace.tap("first_token", torch.tensor([row.tokens]))
                else:
                    self._read(request, row, outcome, asked)
                if row.is_broken:
                    request.break_off()
                    log.error("[EAGLE] slot %d: %s", row.slot, request.error)
                self._retire(request, row)

    def _read(self, request: Request, row: RowOutcome, outcome: Outcome, asked: frozenset[str]) -> None:
        number, start = outcome.step or 0, len(request.token_ids)
        if row.fault:
            report_fault(row, number)
        elif not row.is_broken:
            self.promises.row(row)
        n_committed = request.take(row.tokens, row.logprobs)
        self.blocks.committed(request, number, n_committed, is_sound=not row.fault, reads=outcome.reads)
        drafts = self._proposals.made_of(row.drafts, request.most_drafts)
        spec = self.config.speculative_config if self.runner.n_drafts else None
        step = record_of(row, start, n_committed, drafts, spec, outcome.n_drafts if self.depths else None)
        if spec is not None:
            request.steps += [step] if self.config.enable_metrics else []
            self._log.write(request, row, number, step, drafts)
        made = (row.slot, number, step, drafts, request.token_ids[start:])
        step_log.log_flags(spec, *made)
        step_log.log_families(asked, *made, n_prompt=len(request.prompt))

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
        self._stop_running(request, is_stopped=row.is_finished)
        self.promises.answered(self.runner.target.embedding, request.prompt, request.token_ids)
