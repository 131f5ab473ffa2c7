"""The engine: requests in, responses out; admit, step, retire.

The face of the work: `generate` takes a closed batch; `add_request`, `stream`, `step` and `cancel` take requests one
by one, at any time. All of them make rounds of the one book (`batching.book`), which holds who is running, by request
id. The runner does the work.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from eagle3core.arguments import check_type
from eagle3core.backend import Backend
from eagle3core.batching import Book, TokenStream, Turn
from eagle3core.batching.closing import Closing
from eagle3core.config import EngineConfig, GenerationConfig
from eagle3core.errors import ConfigError
from eagle3core.fit import check_fit
from eagle3core.loading import (
    Reading,
    SpeculationState,
    backend_of,
    new_runner,
    read_models,
    speculation_from,
)
from eagle3core.memory import MemoryPlan, plan_loaded, plan_reading
from eagle3core.performance import mode as performance_mode
from eagle3core.performance.refusals import check_asked
from eagle3core.request import Request, RequestHandle, Response, Tokenizer, new_request, settings_for
from eagle3core.step.run import DeviceRunner
from eagle3core.trace import Trace
from eagle3core.weights.packed import Drafter, PackedDraft, PackedTarget

log = logging.getLogger("eagle3core")

_MOST_IDS = 1 << 31  # ids travel as int32


class Engine(Closing):
    """Decoding of many requests, with or without drafts.

    Args:
        target: the model whose output is reproduced.
        draft: the head that proposes, or a small model; left alone when the configuration asks for none.
        config: sizes and modes; nothing else changes the mode (docs/requirements.md R-03).
        trace: receives spans and taps; may be replaced between calls.
        tokenizer: for texts and stop words.
        backend: of the target's device; by default as the weights are packed, which is what the memory plan follows.
        speculation: what `from_pretrained` found out about the draft.

    Every call may come from any thread: it waits until the round of another is over, and `generate` also until another
    thread's `generate` is.

    Raises:
        ConfigError: a configuration that asks for a draft that was not given, a target that captures other layers
            than the draft reads, weights packed for another block size, or a session the target or the memory cannot
            hold.
    """

    def __init__(
        self,
        target: PackedTarget,
        draft: Drafter | None,
        config: EngineConfig,
        *,
        trace: Trace | None = None,
        tokenizer: Tokenizer | None = None,
        backend: Backend | None = None,
        speculation: SpeculationState | None = None,
        memory_plan: MemoryPlan | None = None,
        runner: DeviceRunner | None = None,
    ) -> None:
        spec = config.speculative_config
        draft = draft if spec is not None and not spec.is_lookup else None
        self.target, self.config = target, config
        self.draft = draft if isinstance(draft, PackedDraft) else None
        self.trace = trace or Trace()
        self.tokenizer = tokenizer
        self.backend = backend or backend_of(target, runner)
        self.speculation = speculation or speculation_from(config, draft)
        check_fit(target, draft, config)
        self.memory_plan = memory_plan or plan_loaded(target, draft, config, self.backend)
        only_tuned = performance_mode.is_on()
        self.runner = runner or new_runner(
            target, draft, config, self.memory_plan.n_blocks, self.trace, only_tuned=only_tuned
        )
        self.promises = performance_mode.Watch(config, self.backend, self.runner, self.speculation)
        self.book = Book(self.runner, self.promises, config)
        self.is_closed = False
        self._ids = count()
        self._turn, self._batch = Turn(), Turn()  # of a round of the book; of a call of `generate`
        self._left: deque[Request] = deque()  # whose readers went away while it was another thread's turn
        log.info("[EAGLE] %s; %s", self.speculation.reason, self.memory_plan)
        if self.backend.device.type == "cuda":
            log.info("[EAGLE] %s on %s: %s", self.backend.path, self.backend.reason, self.backend.path_reason)
        if config.speculative_config is not None:
            log.info("[EAGLE] speculative settings %s, mode %s", config.speculative_config, config.mode)

    @classmethod
    def from_pretrained(
        cls,
        target_dir: str | Path,
        config: EngineConfig,
        *,
        trace: Trace | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Engine:
        """An engine over checkpoints on disk.

        Raises:
            CheckpointError: the target, or with on_draft_failure="raise" the draft, cannot be loaded.
            BackendUnavailable: the configured device is not there.
            ConfigError: the device has too little memory for the models, or for the caches.
        """
        return cls._from_reading(read_models(target_dir, config), config, trace=trace, tokenizer=tokenizer)

    @classmethod
    def _from_reading(cls, reading: Reading, config: EngineConfig, **others: Any) -> Engine:
        plan, trace = plan_reading(reading, config), others.pop("trace", None) or Trace()
        with reading.compiling() as under_way:  # beside the weights, which take other parts of the machine
            with trace.span("start.weights"):
                target, draft = reading.build()
            with trace.span("start.compile"):
                under_way.wait()
        return cls(
            target, draft, config, trace=trace, backend=reading.backend, speculation=reading.speculation,
            memory_plan=plan, **others,
        )  # fmt: skip

    def generate(
        self, prompts: Sequence[Sequence[int]], generation: GenerationConfig | Sequence[GenerationConfig]
    ) -> list[Response]:
        """Responses to `prompts` (token ids), in their order; slots are filled and emptied as requests end.

        Requests that were added before, or are meanwhile, go on beside these.

        Raises:
            ConfigError: an empty prompt, one longer than the session, a request that all cache blocks do not hold, a
                token outside the vocabulary, stop words without a tokenizer, a call from within a call, or an engine
                that is closed. Nothing has been decoded then.
            InvariantViolated: in performance mode, a promise of it that does not hold (docs/runbook.md).
        """
        settings = settings_for(prompts, generation)
        requests = [self._request(i, *each) for i, each in enumerate(zip(prompts, settings, strict=True))]
        self._turn.check("generate")
        with self._batch.taken("generate"):
            try:
                self._add(requests, "generate")
                while any(request.finish_reason is None for request in requests):
                    self.step()
            except BaseException:
                self._left.extend(requests)  # if a round failed they have ended already, as all others have
                self._cancel_left()
                raise
        if any(request.finish_reason == "cancelled" for request in requests):
            self._check_open("generate")  # closed by another thread, half-way
        return [request.response(self.tokenizer, self.runner.depth) for request in requests]

    def add_request(self, prompt: Sequence[int], generation: GenerationConfig | None = None) -> RequestHandle:
        """Let a request wait for a slot; calls of `step` then decode it, and others with it.

        Raises:
            ConfigError: as `generate`.
            InvariantViolated: as `generate`.
        """
        [limits] = settings_for([prompt], GenerationConfig() if generation is None else generation)
        request = self._request(0, prompt, limits)
        self._add([request], "add_request")
        return RequestHandle(request, self.tokenizer, self.runner.depth)

    def check_request(self, prompt: Sequence[int], generation: GenerationConfig) -> None:
        """Refuse what `add_request` would refuse of a prompt and its settings; nothing is added, no turn waited for.

        Raises:
            ConfigError: as `generate`.
        """
        [limits] = settings_for([prompt], generation)
        self._request(0, prompt, limits)

    def stream(self, prompt: Sequence[int], generation: GenerationConfig | None = None) -> TokenStream:
        """Tokens of a request as they come. Whoever iterates makes the rounds; other requests go on in them.

        Raises:
            ConfigError: as `generate`.
            InvariantViolated: as `generate`.
        """
        return TokenStream(self, self.add_request(prompt, generation))

    def step(self) -> bool:
        """One round: make the passes over prompts that are due, decode one step, retire what is finished.

        Returns:
            whether requests are left.

        Raises:
            ConfigError: a call from within a call, or an engine that is closed.
            Exception: whatever a round broke off with; every unfinished request has ended with "error" then.
        """
        while not self.advance():
            pass
        return not self.book.is_empty

    def advance(self, unless: Callable[[], bool] | None = None, pauses: Callable[[], bool] | None = None) -> bool:
        """The least that `step` is made of: passes until a prompt ends, or a decode step; whether that ends a round.

        Args:
            unless: asked once it is this thread's turn; if it holds, nothing is done and the round counts as over.
            pauses: asked between passes: whether to return before the next. So it does where another thread waits.

        Raises:
            ConfigError, Exception: as `step`.
        """
        with self._taken("step"):
            if unless is not None and unless():
                return True
            try:
                return self.book.advance(
                    self.trace, lambda: self._turn.is_wanted or bool(self._left) or (pauses is not None and pauses())
                )
            except BaseException as error:
                self.book.fail(error)
                raise

    def cancel(self, request_id: int) -> bool:
        """End a request with the tokens it has, be it waiting, read or running; False if it has ended already.

        Raises:
            ConfigError: what is no id, a call from within a call, or an engine that is closed.
        """
        check_type("request_id", request_id, int)
        with self._taken("cancel"):
            request = next((each for each in self.book.unfinished if each.id == request_id), None)
            return request is not None and self.book.cancel(request)

    def cancel_soon(self, request: RequestHandle) -> None:
        """As `cancel`, but at once or as soon as the round of another thread is over; never waits and never refuses."""
        self._left.append(request.request)
        self._cancel_left()

    def close(self) -> None:
        """End every request as cancelled; every later call but this one is refused.

        Memory of the device is given back when the engine is no longer referred to.

        Raises:
            ConfigError: a call from within a call.
        """
        with self._turn.taken("close"):
            self.is_closed = True
            for request in list(self.book.unfinished):
                self.book.cancel(request)

    def _request(self, index: int, prompt: Sequence[int], generation: GenerationConfig) -> Request:
        geometry, length = self.target.geometry, self.config.session_len
        rule = self.runner.sizes.acceptance
        check_asked(generation, rule)
        request = new_request(
            index, list(prompt), generation, next(self._ids) % _MOST_IDS, target=geometry, session_len=length,
            tokenizer=self.tokenizer, rule=rule,
        )  # fmt: skip
        self.book.blocks.check_fits(index, request)
        return request

    def _add(self, requests: Sequence[Request], call: str) -> None:
        with self._taken(call):
            self.book.add(requests, self.trace)

    @contextmanager
    def _taken(self, call: str) -> Iterator[None]:
        """This thread's turn on an open engine, and afterwards the end of requests that nobody reads any more."""
        try:
            with self._turn.taken(call):
                self._check_open(call)
                yield
        finally:
            self._cancel_left()

    def _cancel_left(self) -> None:
        # Who finds the turn taken leaves it to that thread, which looks here after its own round.
        while self._left:
            with self._turn.taken_at_once() as is_mine:
                if not is_mine:
                    return
                while self._left:
                    self.book.cancel(self._left.popleft())

    def _check_open(self, call: str) -> None:
        if self.is_closed:
            raise ConfigError(f"{call} was called on an engine that is closed", "an open engine", "make a new one")
