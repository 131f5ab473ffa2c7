"""What the host reads back: blocks of result rows, and what lies beside them on the device, as outcomes.

The last station of a step and of an admission: `results` brings their blocks in order; here numbers get their meaning,
by the kind of step that wrote them. Source: docs/requirements.md R-76, R-90, R-91.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from eagle3core.kernels.slots.slot_state import GOES_ON, N_RESULT, NO_CHOICE_LEFT, NOT_FINITE
from eagle3core.step.depths import KEEPS, StepKind
from eagle3core.step.depths.programs import StepPrograms
from eagle3core.step.outcome import Outcome, RowOutcome
from eagle3core.step.results import ResultQueue, Sent
from eagle3core.step.sizes import DeviceSizes
from eagle3core.step.state import DeviceState


class OutcomeReader:
    """Reads the results of a runner, oldest first.

    Args:
        results: blocks under way. state: what programs write, the draft's ranks beside the blocks included.
        kinds: of steps, by number. steps: their programs, for the log-probabilities that some keep.
    """

    def __init__(
        self,
        results: ResultQueue,
        state: DeviceState,
        sizes: DeviceSizes,
        kinds: Mapping[int, StepKind],
        steps: StepPrograms,
    ) -> None:
        self._results, self._state, self._sizes, self._kinds, self._steps = results, state, sizes, kinds, steps

    def receive(self) -> Outcome:
        """Wait for the oldest result under way: what it gave each sequence that took part."""
        sent, block = self._results.receive()
        kind = self._kinds[self._sizes.path_len - 1 if sent.kind is None else sent.kind]
        live = [b for b, numbers in enumerate(block) if numbers[0] >= 0]
        kept = self._kept_beside(sent)
        rows = [self._row(kind, block[b], None if kept is None else tuple(kept[b])) for b in live]
        if sent.logprobs and self._steps.logprobs is not None:
            tokens = {b: row.tokens for b, row in zip(live, rows, strict=True)}
            found = self._steps.logprobs.of(sent.turn, [tokens.get(b, []) for b in range(len(block))])
            rows = [replace(row, logprobs=found[b]) for b, row in zip(live, rows, strict=True)]
        n_drafts = 0 if sent.step is None else kind.depth
        return Outcome(sent.step, rows, n_drafts, sent.kind != KEEPS, self._results.took_us(sent))

    def _kept_beside(self, sent: Sent) -> list[list[int]] | None:
        """By row of a step's block, the draft's ranks or a grown tree's parents, where they are kept."""
        if self._state.ranks is None or sent.step is None:
            return None
        kept: list[list[int]] = self._state.ranks[sent.turn].tolist()
        return kept

    def _row(self, kind: StepKind, numbers: list[int], kept: tuple[int, ...] | None) -> RowOutcome:
        (slot, n_accepted, n_committed, finish, fault, request_id), tokens = numbers[:N_RESULT], numbers[N_RESULT:]
        at = kind.depth + 1  # a smaller step's row is shorter than the block's
        drafts, has_ended = tokens[at : at + kind.tree.n_nodes - 1], finish != GOES_ON
        is_broken = finish == NO_CHOICE_LEFT
        # Where the target chose nothing there is no bonus; else the host cuts: it knows stops that the device does not.
        n_made = n_committed if is_broken or fault & NOT_FINITE else n_accepted + 1
        ranks, parents = (None, kept) if self._sizes.grown else (kept, None)
        return RowOutcome(
            request_id, slot, tokens[:n_made], drafts, n_accepted, has_ended, is_broken, fault, ranks, parents
        )
