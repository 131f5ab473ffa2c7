"""What a request remembers of a step, made of the row that the step gave it."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3core.metrics import StepRecord
from eagle3core.speculative import SpeculativeConfig
from eagle3core.step.outcome import RowOutcome
from eagle3core.trees import StepTree


def record_of(
    row: RowOutcome,
    start: int,
    n_committed: int,
    drafts: Sequence[int],
    spec: SpeculativeConfig | None,
    depth: int | None,
) -> StepRecord:
    """The record of a step that gave `row`.

    Args:
        start: index of its first token among the generated. n_committed: how many of its tokens count.
        drafts: that were proposed. spec: the settings of drafts.
        depth: of the step, where steps differ in it.
    """
    # Positions past a stop were drafted for text that does not exist, so they have no rank.
    ranks = None if row.ranks is None else row.ranks[:n_committed]
    cut = n_committed < row.n_accepted + 1
    tree = None
    if row.parents is not None:
        static = spec.static_tree if spec is not None else None
        accepted = row.tokens[: row.n_accepted]
        tree = StepTree.of(row.drafts, row.parents, accepted, static.ranks if static is not None else None)
    rule = spec.acceptance.label if spec is not None and spec.acceptance is not None else None
    return StepRecord(start, len(drafts), row.n_accepted, n_committed, cut, ranks, tree, rule, depth)
