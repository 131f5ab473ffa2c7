"""Programs of every kind of step by rows, and those made when a request first asks for more than greedy tokens.

Source: docs/requirements.md R-86; of draws and log-probabilities R-60, R-76.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from eagle3core.step.build import step_program
from eagle3core.step.depths.kinds import READS, StepKind
from eagle3core.step.outcome import KeptLogprobs, new_kept_logprobs
from eagle3core.step.passes import Emitter
from eagle3core.step.prefill import finish_program
from eagle3core.step.program import Program
from eagle3core.step.sizes import DeviceSizes
from eagle3core.step.state import DeviceState
from eagle3core.weights.packed import Drafter, PackedTarget

Models = tuple[Emitter, PackedTarget, Drafter | None, DeviceState]
Change = Callable[[Program], Program]
Key = tuple[int, int | None, bool, bool]


class StepPrograms:
    """The programs of a runner that run between prompts.

    Args:
        models: what they are made of. kinds: by number. batches: rows that programs are made for, ascending.

    Attributes:
        by_kind: greedy ones by kind and rows. logprobs: where log-probabilities are kept, once some request asked.
    """

    def __init__(
        self, models: Models, kinds: Mapping[int, StepKind], batches: Sequence[int], sizes: DeviceSizes
    ) -> None:
        self._models, self._kinds, self._sizes = models, kinds, sizes
        self.by_kind = {
            number: {batch: step_program(*models, batch, kind=kind) for batch in batches}
            for number, kind in kinds.items()
        }
        self.logprobs: KeptLogprobs | None = None
        self._asked: dict[Key, Program] = {}  # by kind; rows, None for the end of a prompt; draws; log-probabilities
        self._change: Change | None = None

    @property
    def all(self) -> tuple[Program, ...]:
        """Every greedy one."""
        return tuple(program for by_rows in self.by_kind.values() for program in by_rows.values())

    def change(self, change: Change) -> None:
        """Run `change(program)` in place of every one from now on."""
        every = self.by_kind.items()
        self.by_kind = {kind: {n: change(program) for n, program in by_rows.items()} for kind, by_rows in every}
        self._asked.clear()
        self._change = change

    def of(self, kind: int, batch: int, draws: bool, logprobs: bool) -> Program:
        """The step; one whose requests ask for more than greedy tokens is made when the first such comes."""
        if not (draws or logprobs):
            return self.by_kind[kind][batch]
        step = self._kinds[kind]
        return self._made(
            (kind, batch, draws, logprobs),
            lambda kept: step_program(*self._models, batch, kind=step, draws=draws, logprobs=kept),
        )

    def finish(self, draws: bool, logprobs: bool) -> Program:
        """The end of a prompt whose request asks for more than a greedy token."""
        return self._made(
            (READS, None, draws, logprobs),
            lambda kept: finish_program(*self._models, draws=draws, logprobs=kept),
        )

    def _made(self, key: Key, make: Callable[[KeptLogprobs | None], Program]) -> Program:
        if key not in self._asked:
            if key[3] and self.logprobs is None:
                _, target, _, state = self._models
                columns = state.head.logits.shape[1]
                self.logprobs = new_kept_logprobs(self._sizes.n_slots, self._sizes.path_len, columns, target.device)
            program = make(self.logprobs if key[3] else None)
            self._asked[key] = program if self._change is None else self._change(program)
        return self._asked[key]
