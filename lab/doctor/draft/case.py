"""What the lamps may look at: one pair, some prompts, and what has been measured of them, each thing once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3core import Engine
from eagle3core.checkpoint import TargetCheckpoint, load_target
from eagle3core.config import EngineConfig, GenerationConfig
from eagle3core.errors import CheckpointError
from eagle3core.request import Response, without_errors
from eagle3core.speculative import SpeculativeConfig
from lab.acceptance.counts import DepthAcceptance, count_acceptance
from lab.doctor.draft.conditions import Conditions
from lab.doctor.draft.forward import likelihoods, propose
from lab.doctor.draft.measure import Measurement, measure
from lab.doctor.draft.reading import Opened, Reading, open_draft
from lab.doctor.draft.text import Text, read_text
from lab.pairs.prompts import Prompt
from lab.parity.faults import with_fault
from lab.parity.head_files import read_draft_tensors

SOME_ROOTS = 700
# The doctor computes in fp32, for which there are no kernels: a GPU is handed some thousand calls a step, one by one.
FEW_PARAMETERS = 100_000_000


@dataclass
class Case:
    """A head under examination; everything else is made of these when it is first asked for.

    Attributes:
        target, draft: checkpoint directories.
        prompts: what the target continues; empty in the fast part, which runs nothing.
        k: drafts a step that acceptance lengths are of.
        max_new_tokens: tokens a prompt that the target continues it by.
        device: "auto", "cpu" or "cuda"; "auto" takes a GPU that is there, but for a target of few parameters.
        fault: name of a bug to plant in every engine (`lab.parity.faults`); empty plants none.
        batch: requests that the engine decodes together where a lamp does not say otherwise.
        speed_rows: rows of `eagle3lab speed` of this pair's size; None: steps are timed here, where there is a GPU.
        reference_target: the target that the head was trained with, where it lies beside the one that is served.
        claimed: an acceptance figure that somebody gave for the head, of whatever definition.
        method: "eagle3" or "eagle" as the settings have it; "auto": what the head's own config names.
        norm_output: of `SpeculativeConfig`: what a head's key of that name means.
    """

    target: Path
    draft: Path
    prompts: tuple[Prompt, ...] = ()
    k: int = 3
    max_new_tokens: int = 64
    device: str = "auto"
    fault: str = ""
    batch: int = 8
    speed_rows: Path | None = None
    reference_target: Path | None = None
    claimed: float | None = None
    method: str = "auto"
    norm_output: Literal["feedback", "head"] | None = None

    def __post_init__(self) -> None:
        self._likely: dict[int, tuple[Reading, float]] = {}
        self._measured: dict[tuple[int, int], tuple[Reading, Measurement]] = {}

    # Files.

    @cached_property
    def config(self) -> dict[str, Any]:
        """The draft's config.json."""
        return dict(json.loads((self.draft / "config.json").read_text(encoding="utf-8")))

    @cached_property
    def target_config(self) -> dict[str, Any]:
        """The target's config.json."""
        return dict(json.loads((self.target / "config.json").read_text(encoding="utf-8")))

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """The draft's tensors as they are stored, on the CPU, under SafeAILab's names; the map and its mask too."""
        return read_draft_tensors(self.draft)

    @cached_property
    def target_files(self) -> TargetCheckpoint:
        """The target's geometry and its weights as they are stored, mapped from their files."""
        return load_target(self.target, casts=False)

    @cached_property
    def opened(self) -> Opened:
        """The draft as the engine reads it, or as far as it can be read.

        Raises:
            CheckpointError: not even in part.
        """
        geometry, device = self.target_files.geometry, self.torch_device
        return open_draft(self.draft, geometry, device, self.session, norm_output=self.norm_output)

    @property
    def reading(self) -> Reading:
        """How the engine reads the head."""
        return self.opened.reading

    @property
    def refusals(self) -> tuple[CheckpointError, ...]:
        """What the engine refuses the head for; lengths "as it is" are then 1, those of plain decoding."""
        return self.opened.refusals

    @property
    def lacks_map(self) -> bool:
        """Whether nothing says which target ids the head's rows stand for: its map is refused, its rows are fewer."""
        n_rows = self.reading.geometry.draft_vocab_size
        return self.reading.draft_to_target is None and n_rows < self.target_files.geometry.vocab_size

    # Runs.

    @cached_property
    def is_small(self) -> bool:
        """Whether one core computes the target's steps sooner than a GPU is handed them."""
        return sum(tensor.numel() for tensor in self.target_files.weights.values()) < FEW_PARAMETERS

    @cached_property
    def torch_device(self) -> torch.device:
        """Where everything runs."""
        is_gpu = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available() and not self.is_small)
        return torch.device("cuda" if is_gpu else "cpu")

    @property
    def has_gpu(self) -> bool:
        """Whether steps may be timed where a pair is served, even if all else runs on a core."""
        return self.device != "cpu" and torch.cuda.is_available()

    @property
    def session(self) -> int:
        """Tokens of the longest session of this case's engines."""
        longest = max((len(prompt.ids) for prompt in self.prompts), default=1)
        return longest + self.max_new_tokens + 2 * (self.k + 1)

    def engine(self, *, k: int | None = None, planted: bool = True, **settings: Any) -> Engine:
        """A new engine, with the case's fault in it.

        Args:
            k: drafts a step; None: the case's; 0: plain decoding.
            planted: False leaves the fault out.
            settings: fields of `EngineConfig` in the place of the case's; of `speculative_config`, the whole.
        """
        depth = self.k if k is None else k
        speculative = SpeculativeConfig(
            model=str(self.draft), num_speculative_tokens=depth, method=self.opened.method,
            norm_output=self.norm_output if self.opened.method == "eagle3" else None,
        ) if depth else None  # fmt: skip
        config = EngineConfig(**{
            "dtype": "float32", "device": self.torch_device.type, "session_len": max(self.session, 2 * (depth + 1) + 4),
            "max_batch_size": min(self.batch, max(len(self.prompts), 1)), "prefill_share": 1.0,
            "speculative_config": speculative, "collect_draft_ranks": bool(depth), **settings,
        })  # fmt: skip
        return with_fault(Engine.from_pretrained(self.target, config), self.fault if planted else "")

    def answers(self, engine: Engine, prompts: Sequence[Prompt] | None = None) -> list[Response]:
        """What an engine answers to the case's prompts, or to others, greedily.

        Raises:
            RequestError: a request that failed.
        """
        asked = [list(prompt.ids) for prompt in (self.prompts if prompts is None else prompts)]
        return without_errors(engine.generate(asked, GenerationConfig(max_new_tokens=self.max_new_tokens)))

    @cached_property
    def plain(self) -> list[Response]:
        """The answers of plain decoding, without any fault."""
        return self.answers(self.engine(k=0, planted=False))

    @cached_property
    def text(self) -> Text:
        """The prompts with those answers, and what the target computes over them."""
        return read_text(self.target, self.prompts, [r.token_ids for r in self.plain], self.torch_device)

    @cached_property
    def some(self) -> Text:
        """So many of the texts, from the first on, that most of many readings can be told off by them."""
        n_roots, n = 0, 0
        while n < self.text.n_texts and n_roots < SOME_ROOTS:
            n_roots, n = n_roots + max(len(self.text.answers[n]) - 1, 0), n + 1
        return self.text.first(n)

    def measured(self, reading: Reading, k: int | None = None) -> Measurement:
        """Acceptance of a reading over `text`, computed once for each reading object."""
        depth = self.k if k is None else k
        key = (id(reading), depth)
        if key not in self._measured:  # the reading is kept beside it, so that its id is nobody else's
            drafted = propose(reading, self.text, depth), likelihoods(reading, self.text, depth)
            self._measured[key] = (reading, measure(*drafted, self.text))
        return self._measured[key][1]

    def read_as(self, reading: Reading) -> Case:
        """The same case with a head that is read so, whose engine nobody has asked."""
        other = replace(self)
        other.__dict__ |= {
            name: self.__dict__[name] for name in ("text", "plain", "target_files", "stored") if name in self.__dict__
        }
        other.__dict__ |= {"opened": replace(self.opened, reading=reading, refusals=()), "by_engine": None}
        return other

    def first_likelihood(self, reading: Reading) -> float:
        """Mean log-probability of some texts' own tokens at the first level, computed once for each reading object."""
        if id(reading) not in self._likely:
            self._likely[id(reading)] = (reading, float(likelihoods(reading, self.some, 1).double().nanmean()))
        return self._likely[id(reading)][1]

    @cached_property
    def base(self) -> Measurement:
        """Acceptance of the head as it is read, by the doctor's own forward pass; not of a refused head."""
        return self.measured(self.reading)

    @cached_property
    def conditions(self) -> Conditions:
        """The head in the engine, alone and otherwise."""
        return Conditions(self)

    @cached_property
    def by_engine(self) -> DepthAcceptance | None:
        """Acceptance as the engine counts it, with the case's fault; None for a head that it refuses."""
        if self.refusals:
            return None
        return count_acceptance(self.k, self.prompts, self.answers(self.engine()), lambda tokens: len(tokens))

    @property
    def before(self) -> float:
        """Mean acceptance length as it is: the engine's, 1 for a refused head."""
        counted = self.by_engine
        return 1.0 if counted is None or counted.length.mean is None else counted.length.mean
