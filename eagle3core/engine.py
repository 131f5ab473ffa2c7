"""The engine: requests in, responses out; admit, step, retire.

Follows a batch from the waiting line into slots (`admit`), through decode steps (`decode.step`), and out again
(`retire`). Everything a step needs is in `DecodeState`; this file only moves requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3core.backend import Backend, choose_backend
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.config import EngineConfig, GenerationConfig
from eagle3core.decode.prefill import prefill
from eagle3core.decode.slots import first_free_slot, release_slot
from eagle3core.decode.state import new_state
from eagle3core.decode.step import StepResult, decode_step
from eagle3core.errors import CheckpointError, ConfigError
from eagle3core.memory import plan_memory
from eagle3core.metrics import StepRecord
from eagle3core.model.draft import DraftModel
from eagle3core.model.target import TargetModel
from eagle3core.request import Request, Response, Tokenizer, new_request
from eagle3core.trace import Trace

log = logging.getLogger("eagle3core")


@dataclass(frozen=True)
class SpeculationState:
    """Whether the engine speculates, and why or why not."""

    enabled: bool
    reason: str


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
        target: TargetModel,
        draft: DraftModel | None,
        config: EngineConfig,
        *,
        trace: Trace | None = None,
        tokenizer: Tokenizer | None = None,
        backend: Backend | None = None,
        speculation: SpeculationState | None = None,
    ) -> None:
        draft = draft if config.speculative_config is not None else None
        self.target, self.draft, self.config = target, draft, config
        self.trace = trace or Trace()
        self.tokenizer = tokenizer
        self.backend = backend or Backend(target.device, "the device the target was given on")
        self.speculation = speculation or _speculation_from(config, draft)
        _check_fit(target, draft, config)
        weights = _weight_bytes(target) + (_weight_bytes(draft) if draft else 0)
        self.memory_plan = plan_memory(
            target.geometry,
            draft.geometry if draft else None,
            config,
            self.backend,
            dtype=target.dtype,
            weight_bytes=weights,
        )
        self.state = new_state(target, draft, config)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._n_steps = 0
        log.info("[EAGLE] %s; %s", self.speculation.reason, self.memory_plan)
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
        """
        backend = choose_backend(config)
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        target = TargetModel(load_target(target_dir, dtype=dtype, device=backend.device))
        draft, speculation = _load_speculation(target, config)
        return cls(target, draft, config, trace=trace, tokenizer=tokenizer, backend=backend, speculation=speculation)

    def generate(
        self, prompts: Sequence[Sequence[int]], generation: GenerationConfig | Sequence[GenerationConfig]
    ) -> list[Response]:
        """Responses to `prompts` (token ids), in their order; slots are filled and emptied as requests end.

        Raises:
            ConfigError: an empty prompt, one longer than the session, a token outside the vocabulary, or stop words
                without a tokenizer. Nothing has been decoded then.
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
        self._waiting.extend(requests)
        try:
            while self._waiting or self._running:
                self.step()
        except BaseException:
            self._abandon()
            raise
        return [request.response(self.tokenizer, self.state.tree.max_depth) for request in requests]

    def step(self) -> None:
        """Admit what fits, decode one step, retire what is finished."""
        self._admit()
        if self._running:
            with self.trace.scope(f"step{self._n_steps}"):
                result = decode_step(
                    self.target,
                    self.draft,
                    self.state,
                    self.trace,
                    collect_ranks=self.config.collect_draft_ranks,
                )
            self._read(result)
            self._n_steps += 1
        self._retire()

    def _admit(self) -> None:
        while self._waiting and (slot := first_free_slot(self.state)) is not None:
            request = self._waiting.popleft()
            if not self._running:
                self._n_steps = 0  # steps are numbered from the first request of a batch, as taps name them
            prompt = torch.tensor(request.prompt, dtype=torch.int64, device=self.target.device)
            self.trace.tap("prompt_ids", prompt[None])
            self._running[slot] = request
            first = prefill(self.target, self.draft, self.state, slot, prompt, self.config.prefill_chunk, self.trace)
            self.trace.tap("first_token", torch.tensor([[first]]))
            request.take([first])
            self._retire()

    def _read(self, result: StepResult) -> None:
        n_drafts = self.state.tree.n_nodes - 1
        rows = zip(result.slots.tolist(), result.tokens.tolist(), result.n_accepted.tolist(), strict=True)
        for row, (slot, tokens, n_accepted) in enumerate(rows):
            request = self._running[slot]
            start = len(request.token_ids)
            n_committed = request.take(tokens[: n_accepted + 1])
            # Positions past a stop were drafted for text that does not exist, so they have no rank.
            ranks = None if result.ranks is None else tuple(result.ranks[row, :n_committed].tolist())
            step = StepRecord(start, n_drafts, n_accepted, n_committed, n_committed < n_accepted + 1, ranks)
            if self.config.enable_metrics and self.draft is not None:
                request.steps.append(step)
            self._log_step(slot, step, result.drafts[row].tolist(), request.token_ids[start:])

    def _log_step(self, slot: int, step: StepRecord, drafts: list[int], committed: list[int]) -> None:
        spec = self.config.speculative_config
        if spec is None or self.draft is None:
            return
        if spec.eagle_debug:
            log.info("[EAGLE] slot %d step %d drafted %s committed %s", slot, self._n_steps, drafts, committed)
        if spec.eagle_metrics_debug:
            counts = (step.n_draft, step.n_accepted, step.n_committed)
            log.info("[EAGLE][Metrics] slot %d drafted %d accepted %d committed %d", slot, *counts)

    def _retire(self) -> None:
        for slot in [slot for slot, request in self._running.items() if request.finish_reason is not None]:
            release_slot(self.state, slot)
            del self._running[slot]

    def _abandon(self) -> None:
        """Empty every slot, so that an engine is usable again after an interrupt or an error."""
        for slot in list(self._running):
            release_slot(self.state, slot)
        self._running.clear()
        self._waiting.clear()


def _load_speculation(target: TargetModel, config: EngineConfig) -> tuple[DraftModel | None, SpeculationState | None]:
    """The draft that the configuration names, with the target set to capture what it reads.

    When it cannot be loaded and the configuration prefers the baseline, no draft and the reason.
    """
    spec = config.speculative_config
    if spec is None:
        return None, None
    try:
        checkpoint = load_draft(
            str(spec.model),
            target.geometry,
            capture_layers=spec.capture_layers,
            capture_convention=spec.capture_convention,
            dtype=target.dtype,
            device=target.device,
        )
    except CheckpointError as error:
        if config.on_draft_failure == "raise":
            raise
        log.warning("[EAGLE] decoding without the draft, which could not be loaded: %s", error)
        return None, SpeculationState(False, f"the draft could not be loaded: {error.what}")
    target.taps = checkpoint.geometry.taps
    return DraftModel(checkpoint, target), None


def _check_fit(target: TargetModel, draft: DraftModel | None, config: EngineConfig) -> None:
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


def _speculation_from(config: EngineConfig, draft: DraftModel | None) -> SpeculationState:
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


def _weight_bytes(model: TargetModel | DraftModel) -> int:
    """Bytes of the distinct tensors a model holds."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.own_tensors())
