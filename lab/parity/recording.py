"""Prompts through the real engine with every stage kept, by request: what the rest of the parity package judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3core import Engine
from eagle3core.config import EngineConfig, GenerationConfig, TargetFormat
from eagle3core.speculative import SpeculativeConfig
from lab.errors import ExperimentError
from lab.parity import faults
from lab.parity.by_request import RequestTrace
from lab.parity.derived import TappingReplayer, with_derived

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEFAULT_CHUNK = EngineConfig().prefill_chunk
# What a recording runs with: several requests side by side, and chunks that an ordinary prompt has more than one of.
SLOTS = 3
CHUNK = 128


@dataclass(frozen=True)
class Recording:
    """What one prompt left behind.

    Attributes:
        tensors: on the CPU, by "<pass>/<stage>"; names in docs/engine.md.
        n_steps: speculative steps kept.
        k: drafts a step.
    """

    tensors: dict[str, Tensor]
    n_steps: int
    k: int


@dataclass(frozen=True)
class PairUnderTest:
    """A (target, draft) pair and how to run it.

    Attributes:
        target, draft: checkpoint directories.
        dtype: a key of `DTYPES`.
        device: "auto", "cpu" or "cuda".
        capture_layers, capture_convention: explicit tap ids, or None for the checkpoint's own.
        fault: name of a bug to plant in every engine (`lab.parity.faults`); empty plants none.
        norm_output: what that key of a flat draft config means, "feedback" or "head"; empty where it is not there.
        draft_weights: format of the draft's maps, as `SpeculativeConfig` names it.
        target_weights: of the target's, as `EngineConfig` names it; references hold what they mean.
    """

    target: Path
    draft: Path
    dtype: str = "float32"
    device: str = "auto"
    capture_layers: tuple[int, ...] | None = None
    capture_convention: str | None = None
    fault: str = ""
    norm_output: str = ""
    draft_weights: str = "as_stored"
    target_weights: TargetFormat = "as_stored"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ExperimentError(f"dtype is {self.dtype!r}", f"one of {tuple(DTYPES)}", "name the dtype to test")
        if self.fault:
            faults.named(self.fault)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype under test."""
        return DTYPES[self.dtype]

    @property
    def truth_dtype(self) -> torch.dtype:
        """One precision up: fp64 for fp32 and fp64, fp32 for the 16-bit ones."""
        return torch.float64 if self.dtype in ("float64", "float32") else torch.float32

    @property
    def torch_device(self) -> torch.device:
        """Where engine and references run."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def taps(self) -> tuple[tuple[int, ...], str] | None:
        """Explicit tap ids with their convention."""
        if self.capture_layers is None or self.capture_convention is None:
            return None
        return self.capture_layers, self.capture_convention

    def engine(
        self,
        k: int,
        *,
        n_tokens: int,
        max_batch_size: int = 1,
        prefill_chunk: int = DEFAULT_CHUNK,
        collect_draft_ranks: bool = False,
        collect_last_states: bool = False,
    ) -> Engine:
        """An engine that drafts `k` tokens a step (0: none) for sequences of at most `n_tokens`."""
        speculative = None
        if k:
            speculative = SpeculativeConfig(
                model=str(self.draft),
                num_speculative_tokens=k,
                capture_layers=self.capture_layers,
                capture_convention=self.capture_convention,  # type: ignore[arg-type]
                norm_output=self.norm_output or None,  # type: ignore[arg-type]
                draft_weights=self.draft_weights,  # type: ignore[arg-type]
            )
        n_tokens = max(n_tokens, 2 * (k + 1) + 4)  # a session holds at least one step's tokens
        config = EngineConfig(
            dtype=self.dtype,
            device=self.device,
            target_weights=self.target_weights,
            session_len=n_tokens,
            max_batch_size=max_batch_size,
            prefill_chunk=prefill_chunk,
            prefill_share=1.0,  # a closed batch waits for nothing; and rows measured before prompts could wait go on
            speculative_config=speculative,
            collect_draft_ranks=collect_draft_ranks,
            collect_last_states=collect_last_states,
        )
        engine = Engine.from_pretrained(self.target, config)
        return faults.plant(engine, self.fault) if self.fault else engine


def record(
    pair: PairUnderTest,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    steps: int,
    slots: int = SLOTS,
    prefill_chunk: int = CHUNK,
    last_states: bool = False,
) -> list[Recording]:
    """Prefill and the first `steps` speculative steps of each prompt, `slots` prompts at a time.

    With more prompts than slots, a slot is filled again when its request ends. `last_states`: the target's last layer
    has every token of a prompt, and not the last one alone, as where nobody asks.

    Raises:
        ExperimentError: no prompt, or one shorter than two tokens (it has no draft prefill to compare).
    """
    check_prompts(prompts)
    longest = max(len(prompt) for prompt in prompts)
    n_tokens = longest + _n_new(k, steps) + k + 1
    engine = pair.engine(
        k, n_tokens=n_tokens, max_batch_size=min(slots, len(prompts)), prefill_chunk=prefill_chunk,
        collect_last_states=last_states,
    )  # fmt: skip
    return record_from(engine, prompts, k=k, steps=steps)


def record_from(engine: Engine, prompts: Sequence[Sequence[int]], *, k: int, steps: int) -> list[Recording]:
    """As `record`, by an engine that drafts `k` tokens a step.

    Raises:
        ExperimentError: as `record`.
    """
    check_prompts(prompts)
    widths = {"target.head": engine.target.geometry.vocab_size}
    if engine.draft is not None:
        widths["draft.head"] = engine.draft.geometry.draft_vocab_size
    trace = RequestTrace(steps)
    settings = GenerationConfig(max_new_tokens=_n_new(k, steps), ignore_eos=True)
    with traced(engine, trace):
        engine.generate([list(prompt) for prompt in prompts], settings)
    return [Recording(with_derived(tensors, engine.runner.target.taps, widths), steps, k) for tensors in trace.requests]


@contextmanager
def traced(engine: Engine, trace: RequestTrace) -> Iterator[None]:
    """Hands every stage that `engine` runs to `trace`, and leaves the engine as it was."""
    runner, before = engine.runner, (engine.trace, engine.runner.replayer)
    engine.trace = trace
    runner.replay_by(TappingReplayer(runner.replayer, runner.state))
    try:
        yield
    finally:
        engine.trace = before[0]
        runner.replay_by(before[1])


def _n_new(k: int, steps: int) -> int:
    """Tokens after which even a request whose every draft was accepted has begun `steps` steps.

    The limit cuts what a step commits, not what it accepts, so the last step may be one that the limit cuts.
    """
    if steps < 1:
        raise ExperimentError(f"steps is {steps}", "at least 1", "record one speculative step or more")
    return 2 + (steps - 1) * (k + 1)


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Refuse an empty list and prompts of fewer than two tokens.

    Raises:
        ExperimentError: with the position of the prompt.
    """
    if not prompts:
        raise ExperimentError("no prompts", "at least one", "give a prompt file with one prompt or more")
    for i, prompt in enumerate(prompts):
        if len(prompt) < 2:
            raise ExperimentError(
                f"prompt {i} has {len(prompt)} token(s)", "at least 2", "drop that prompt or make it longer"
            )
