"""The engine: requests in, responses out; admit, step, retire.

Follows a batch from the waiting line into slots (`admit`), through decode steps, and out again (`retire`). A `Runner`
does the work: plain torch, or the GPU's kernels with results a step behind. This file only moves requests, and reads
each outcome against the requests that were running when its work was enqueued.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3core import step_log
from eagle3core.backend import Backend
from eagle3core.config import EngineConfig, GenerationConfig
from eagle3core.errors import ConfigError
from eagle3core.kernels.slots.slot_state import NO_ROOM
from eagle3core.loading import Reading, TensorSource, new_runner, read_models, read_sources
from eagle3core.loading import SpeculationState as SpeculationState
from eagle3core.memory import MemoryPlan, plan_loaded, plan_reading
from eagle3core.metrics import StepRecord
from eagle3core.model.draft import DraftModel
from eagle3core.model.target import TargetModel
from eagle3core.performance import mode as performance_mode
from eagle3core.request import Request, Response, Tokenizer, new_request
from eagle3core.step.runner import Outcome, RowOutcome, Runner, SlotRequest
from eagle3core.trace import Trace
from eagle3core.weights.packed import PackedDraft, PackedTarget

log = logging.getLogger("eagle3core")

PERF_MODE_VARIABLE = performance_mode.VARIABLE


class Engine:
    """Greedy decoding of many requests, with or without an EAGLE-3 draft.

    Args:
        target: the model whose output is reproduced.
        draft: the head that proposes; left alone when the configuration asks for no speculation.
        config: sizes and modes; nothing else changes the mode (docs/requirements.md R-03).
        trace: receives spans and taps; may be replaced between calls.
        tokenizer: for texts and stop words.
        speculation: what `from_pretrained` found out about the draft.

    Raises:
        ConfigError: a configuration that asks for a draft that was not given, a target that captures other layers
            than the draft reads, or a session the target or the memory cannot hold.
    """

    def __init__(
        self,
        target: TargetModel | PackedTarget,
        draft: DraftModel | PackedDraft | None,
        config: EngineConfig,
        *,
        trace: Trace | None = None,
        tokenizer: Tokenizer | None = None,
        backend: Backend | None = None,
        speculation: SpeculationState | None = None,
        memory_plan: MemoryPlan | None = None,
        runner: Runner | None = None,
    ) -> None:
        draft = draft if config.speculative_config is not None else None
        self.target, self.draft, self.config = target, draft, config
        self.trace = trace or Trace()
        self.tokenizer = tokenizer
        self.backend = backend or Backend(target.device, "the device the target was given on")
        self.speculation = speculation or _speculation_from(config, draft)
        _check_fit(target, draft, config)
        self.memory_plan = memory_plan or plan_loaded(target, draft, config, self.backend)
        self.runner = runner or new_runner(target, draft, config)
        self.promises = performance_mode.Watch(config, self.backend, self.runner, self.speculation)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._in_flight: deque[dict[int, Request]] = deque()
        self._n_steps = self._n_read = 0
        log.info("[EAGLE] %s; %s", self.speculation.reason, self.memory_plan)
        if self.backend.device.type == "cuda":
            log.info("[EAGLE] %s on %s: %s", self.backend.path, self.backend.reason, self.backend.path_reason)
        if config.speculative_config is not None:
            log.info("[EAGLE] speculative settings %s, mode %s", config.speculative_config, config.mode)

    @property
    def state(self) -> Any:
        """The runner's state: `DecodeState` in plain torch, `DeviceState` on the kernels' path."""
        return self.runner.state

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
    def from_sources(
        cls,
        target: TensorSource,
        draft: TensorSource | None,
        config: EngineConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        trace: Trace | None = None,
    ) -> Engine:
        """An engine on the GPU's kernels over weights that are made tensor by tensor.

        Raises:
            ConfigError: as `from_pretrained`, or the kernels cannot run the models here.
        """
        return cls._from_reading(read_sources(target, draft, config, dtype), config, trace=trace)

    @classmethod
    def _from_reading(cls, reading: Reading, config: EngineConfig, **others: Any) -> Engine:
        plan = plan_reading(reading, config) if reading.backend.path == "kernels" else None
        target, draft = reading.build()
        return cls(
            target, draft, config, backend=reading.backend, speculation=reading.speculation, memory_plan=plan, **others
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], generation: GenerationConfig | Sequence[GenerationConfig]
    ) -> list[Response]:
        """Responses to `prompts` (token ids), in their order; slots are filled and emptied as requests end.

        Raises:
            ConfigError: an empty prompt, one longer than the session, a token outside the vocabulary, or stop words
                without a tokenizer. Nothing has been decoded then.
            InvariantViolated: in performance mode, a promise of it that does not hold (docs/performance_mode.md).
        """
        settings = [generation] * len(prompts) if isinstance(generation, GenerationConfig) else list(generation)
        if len(settings) != len(prompts):
            raise ConfigError(
                f"{len(settings)} generation configurations for {len(prompts)} prompts",
                "one for all, or one a prompt",
                "pass a single GenerationConfig or a list of equal length",
            )
        geometry, length = self.target.geometry, self.config.session_len
        requests = [
            new_request(i, list(prompt), limits, target=geometry, session_len=length, tokenizer=self.tokenizer)
            for i, (prompt, limits) in enumerate(zip(prompts, settings, strict=True))
        ]
        self.promises.begin(self.trace)
        self._waiting.extend(requests)
        try:
            while self._waiting or self._running:
                self.step()
            self._collect(everything=True)  # of requests that ended meanwhile
        except BaseException:
            self._abandon()
            raise
        self.promises.end(self.target.embedding, prompts, [request.token_ids for request in requests])
        return [request.response(self.tokenizer, self.runner.depth) for request in requests]

    def step(self) -> None:
        """Admit what fits, decode one step, read what is known, retire what is finished."""
        self._admit()
        if self._running:
            with self.trace.scope(f"step{self._n_steps}"), self.promises.step(len(self._running)):
                self.runner.enqueue(self.trace)
            self._in_flight.append(dict(self._running))
            step_log.log_active(self._n_steps, list(self._running), self.runner.n_slots)
            self._n_steps += 1
        self._collect(everything=False)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.runner.n_slots:
            slot = min(set(range(self.runner.n_slots)) - self._running.keys())
            request = self._waiting.popleft()
            if not self._running:
                self._n_steps = self._n_read = (
                    0  # steps are numbered from the first request of a batch, as taps name them
                )
            self.trace.tap("prompt_ids", torch.tensor([request.prompt]))
            self._running[slot] = request
            wanted = SlotRequest(request.prompt, request.stop.limit, request.stop.end_tokens)
            self.runner.admit(slot, wanted, self.trace)
            self._in_flight.append({slot: request})
            self._collect(everything=False)

    def _collect(self, *, everything: bool) -> None:
        """Read the outcomes that are known, each by the requests that took part, and retire who is finished."""
        for outcome in self.runner.collect(everything=everything):
            self._read(outcome, self._in_flight.popleft())
        self._retire()

    def _read(self, outcome: Outcome, requests: dict[int, Request]) -> None:
        families = step_log.asked_families()
        for row in outcome.rows:
            request = requests[row.slot]
            if request.finish_reason is not None:
                continue  # made before the host knew: text that does not exist
            if row.fault:
                self._report(row)
            elif not outcome.is_admission:
                self.promises.row(row)
            start = len(request.token_ids)
            n_committed = request.take(row.tokens)
            if outcome.is_admission:
                self.trace.tap("first_token", torch.tensor([row.tokens]))
                continue
            # Positions past a stop were drafted for text that does not exist, so they have no rank.
            ranks = None if row.ranks is None else row.ranks[:n_committed]
            cut = n_committed < row.n_accepted + 1
            step = StepRecord(start, self.runner.n_drafts, row.n_accepted, n_committed, cut, ranks)
            if self.config.enable_metrics and self.draft is not None:
                request.steps.append(step)
            made = (row.slot, self._n_read, step, row.drafts, request.token_ids[start:])
            if self.config.speculative_config is not None and self.draft is not None:
                step_log.log_flags(self.config.speculative_config, *made)
            if families:
                step_log.log_families(families, *made, n_prompt=len(request.prompt))
        self._n_read += not outcome.is_admission

    def _report(self, row: RowOutcome) -> None:
        """Say that an invariant broke: the slot goes on as the baseline would, or nothing can go on.

        Raises:
            InvariantViolated: in performance mode (docs/requirements.md R-62), or when the slot has no room left.
        """
        broken = performance_mode.broken_by_fault(row.slot, row.fault, self._n_steps)
        if row.fault & NO_ROOM or performance_mode.is_on():
            raise broken
        log.error("[EAGLE] slot %d goes on without its drafts: %s", row.slot, broken)

    def _retire(self) -> None:
        for slot in [slot for slot, request in self._running.items() if request.finish_reason is not None]:
            self.runner.release(slot)
            del self._running[slot]

    def _abandon(self) -> None:
        """Empty every slot, so that an engine is usable again after an interrupt or an error."""
        self.runner.abandon()
        self._in_flight.clear()
        self._running.clear()
        self._waiting.clear()


def _check_fit(
    target: TargetModel | PackedTarget, draft: DraftModel | PackedDraft | None, config: EngineConfig
) -> None:
    limit = target.geometry.max_position_embeddings
    if config.session_len > limit:
        raise ConfigError(
            f"session_len is {config.session_len}", f"at most {limit}, the target's positions", f"set it to {limit}"
        )
    if draft is not None and target.taps != draft.geometry.taps:
        raise ConfigError(
            f"the target captures the inputs of layers {target.taps}, the draft reads {draft.geometry.taps}",
            "the same layers",
            f"build the target with TargetModel(checkpoint, taps={draft.geometry.taps})",
        )


def _speculation_from(config: EngineConfig, draft: DraftModel | PackedDraft | None) -> SpeculationState:
    spec = config.speculative_config
    if spec is None:
        return SpeculationState(False, "no speculative_config was given")
    if draft is None:
        raise ConfigError(
            "speculative_config was given without a draft model",
            "both, or neither",
            "use Engine.from_pretrained, or pass draft=DraftModel(...)",
        )
    return SpeculationState(True, f"{spec.method} with {spec.num_speculative_tokens} drafted tokens a step")
