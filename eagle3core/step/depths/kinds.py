"""The kinds of steps that an engine runs over one state, by number: so many drafts, or none in one of two ways.

A step without drafts has its draft read what it has not read yet, or leaves its own states beside those that wait, so
that the draft reads them together: a reading costs the draft's weights once, however many entries it has.
Source: docs/requirements.md R-03; derived here.
"""

from __future__ import annotations

from typing import NamedTuple

from eagle3core.kernels.slots.keep_states import NOT_KEPT, Kept
from eagle3core.step.sizes import DeviceSizes
from eagle3core.step.tree import FlatTree, GrownTree, chain_tree
from eagle3core.weights.packed import Drafter, PackedDraft

READS, KEEPS = 0, -1  # kinds without drafts: the draft reads what waits for it, or that and the step's own states wait


class StepKind(NamedTuple):
    """What a kind of step does.

    Attributes:
        tree: that is verified. entries: most entries of a sequence that the draft reads as the step begins.
        keeps: where the step leaves its states, if they are to outlast the next step.
    """

    tree: FlatTree | GrownTree
    entries: int
    keeps: Kept = NOT_KEPT

    @property
    def depth(self) -> int:
        """Drafts on the longest path."""
        return self.tree.max_depth


def usual_kind(sizes: DeviceSizes, draft: Drafter | None) -> StepKind:
    """The step of the state's own tree."""
    return StepKind(sizes.tree, sizes.path_len if draft is not None else 0)


def kinds_of(sizes: DeviceSizes, draft: Drafter | None) -> dict[int, StepKind]:
    """Every kind by its number, which is the depth where it drafts: of a chain each depth, of a tree the whole one."""
    usual = usual_kind(sizes, draft)
    if not sizes.n_kept:
        return {usual.depth: usual}
    shorter = range(1, usual.depth) if sizes.is_chain else ()
    found = {depth: StepKind(chain_tree(depth), depth + 1 if draft is not None else 0) for depth in shorter}
    found[usual.depth] = usual
    if draft is None:  # nothing reads, so nothing waits
        return {**found, READS: StepKind(chain_tree(0), 0)}
    n = sizes.n_kept if isinstance(draft, PackedDraft) else 0  # a small model reads tokens alone
    found[READS] = StepKind(chain_tree(0), sizes.pending, Kept(n, sizes.kept_row, False))
    found[KEEPS] = StepKind(chain_tree(0), 0, Kept(n, sizes.kept_row, True))
    return found
