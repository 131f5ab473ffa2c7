"""One prompt through the real engine with every stage kept: what the rest of the parity package judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3core.config import EngineConfig, GenerationConfig, SpeculativeConfig
from eagle3core.engine import Engine
from eagle3core.trace import RecordingTrace
from lab.errors import ExperimentError
from lab.parity.derived import TappingReplayer, with_derived
from lab.parity.names import step_of

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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
    """

    target: Path
    draft: Path
    dtype: str = "float32"
    device: str = "auto"
    capture_layers: tuple[int, ...] | None = None
    capture_convention: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ExperimentError(f"dtype is {self.dtype!r}", f"one of {tuple(DTYPES)}", "name the dtype to test")

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

    def engine(self, k: int, *, n_tokens: int, max_batch_size: int = 1, collect_draft_ranks: bool = False) -> Engine:
        """An engine that drafts `k` tokens a step (0: none) for sequences of at most `n_tokens`."""
        speculative = None
        if k:
            speculative = SpeculativeConfig(
                model=str(self.draft),
                num_speculative_tokens=k,
                capture_layers=self.capture_layers,
                capture_convention=self.capture_convention,  # type: ignore[arg-type]
            )
        n_tokens = max(n_tokens, 2 * (k + 1) + 4)  # a session holds at least one step's tokens
        config = EngineConfig(
            dtype=self.dtype,
            device=self.device,
            session_len=n_tokens,
            max_batch_size=max_batch_size,
            speculative_config=speculative,
            collect_draft_ranks=collect_draft_ranks,
        )
        return Engine.from_pretrained(self.target, config)


def record(pair: PairUnderTest, prompts: Sequence[Sequence[int]], *, k: int, steps: int) -> list[Recording]:
    """Prefill and the first `steps` speculative steps of each prompt, one prompt at a time.

    Raises:
        ExperimentError: no prompt, or one shorter than two tokens (it has no draft prefill to compare).
    """
    check_prompts(prompts)
    longest = max(len(prompt) for prompt in prompts)
    return record_from(pair.engine(k, n_tokens=longest + _n_new(k, steps)), prompts, k=k, steps=steps)


def record_from(engine: Engine, prompts: Sequence[Sequence[int]], *, k: int, steps: int) -> list[Recording]:
    """As `record`, by an engine of one slot that drafts `k` tokens a step.

    Raises:
        ExperimentError: as `record`.
    """
    check_prompts(prompts)
    widths = {"target.head": engine.target.geometry.vocab_size}
    if engine.draft is not None:
        widths["draft.head"] = engine.draft.geometry.draft_vocab_size
    engine.runner.replay_by(TappingReplayer(engine.runner.replayer))
    recordings = []
    for prompt in prompts:
        trace = RecordingTrace()
        engine.trace = trace
        engine.generate([list(prompt)], GenerationConfig(max_new_tokens=_n_new(k, steps), ignore_eos=True))
        named = with_derived(trace.tensors, engine.target.taps, widths)
        recordings.append(
            Recording({name: tensor for name, tensor in named.items() if step_of(name) < steps}, steps, k)
        )
    return recordings


def _n_new(k: int, steps: int) -> int:
    if steps < 1:
        raise ExperimentError(f"steps is {steps}", "at least 1", "record one speculative step or more")
    # One step more than is kept, so that the last kept one is never shortened by the length limit.
    return 1 + (steps + 1) * (k + 1)


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
