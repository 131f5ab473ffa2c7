"""The draft grows a tree: every level's beam gives candidates, the best of all candidates are verified.

A pass of the draft reads the beam of a level at once: `top_k` rows a sequence, which see the committed keys, their
ancestors in the beams before and themselves. The rows of beams lie behind the committed ones in the draft's cache and
are overwritten by the next step. Of a static tree the scores are fixed, everything else is the same.
Source: EAGLE-2, arXiv 2406.16858, section 4; EAGLE-3, arXiv 2503.01840; docs/requirements.md R-31, R-37..R-46.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from eagle3core.geometry import TargetGeometry
from eagle3core.kernels.layer.take_rows import TAKE_ROWS
from eagle3core.kernels.slots.open_step import OpenRows
from eagle3core.kernels.tree.grow_tree import GROW_TREE, HeadRows, Offers
from eagle3core.kernels.tree.select_tree import SELECT_TREE, Pool
from eagle3core.step.buffers import rows_of
from eagle3core.step.heads import DraftPass, draft_stages
from eagle3core.step.passes import TREE, Emitter, Rows
from eagle3core.step.program import Stage
from eagle3core.step.propose import Proposal
from eagle3core.step.ranks import keep_parents
from eagle3core.step.state import DeviceState
from eagle3core.step.tree import GrownTree
from eagle3core.step.tree_tensors import TreeTensors
from eagle3core.weights.eagle import PackedEagle
from eagle3core.weights.packed import PackedDraft


class TreeProposal(Proposal):
    """`top_k` candidates a node of the beam; the chosen nodes are left in `state.tree`."""

    def stages(self, shape: GrownTree, tree: TreeTensors) -> list[Stage]:
        """All passes, and the choice."""
        opened, k, growth = self.opened, shape.top_k, tree.growth
        self.powers = tree.powers
        stages, over = self.first_pass()
        last, scaled, sums = self.last_rows(over)
        head, logits = self.head(scaled, sums)
        stages.append(self.head_stage(last + head, logits, opened.lengths, "extend"))
        stages.append(self._grow(shape, tree, logits, 0))
        above = rows_of(self.own.feedback, self.batch, self.own.feedback.shape[1])
        for level in range(1, shape.max_depth):
            positions, slots = opened.chain_positions[level - 1].view(-1), opened.chain_slots[level - 1].view(-1)
            earlier = (level - 1) * k
            rows = Rows(positions, slots, opened.lengths, opened.tables, growth.beam_mask, earlier=earlier,
                        window=self.window)  # fmt: skip
            passed, over = self._beam_pass(above, tree, rows, f"level{level}")
            stages += passed
            head, logits = self.head(*self.normed(over))
            stages.append(self.head_stage(head, logits, slots, f"level{level}"))
            stages.append(self._grow(shape, tree, logits, level))
            above = over.out
        return [*stages, self._choose(tree)]

    def _beam_pass(self, above: Tensor, tree: TreeTensors, rows: Rows, scope: str) -> tuple[list[Stage], DraftPass]:
        """A pass over a level's beam, whose states are rows of the output `above`."""
        states, taken = rows_of(self.own.hidden, rows.n, self.own.hidden.shape[1]), tree.growth.beam_rows.view(-1)
        tokens = tree.growth.beam_tokens.view(-1)
        if isinstance(self.draft, PackedEagle):  # whose fc writes over these states, from a copy of them
            take = TAKE_ROWS.call(self.emit.arch, (above,), taken, (states,))
            passed, over = self.follow(states, tokens, rows, self.own.out, scope)
            return [Stage("tree.grow", (take,), TREE), *passed], over
        over = replace(self.over(states, tokens, rows.n, self.own.out), above=(above, taken))
        # The passes before wrote keys, and this one's rows and mask, that its attention reads early.
        return draft_stages(self.emit, over, rows, scope, first_waits=True), over

    def _grow(self, shape: GrownTree, tree: TreeTensors, logits: Tensor, level: int) -> Stage:
        """Candidates of a level, and the next beam."""
        k, n, rows = shape.top_k, len(logits), len(logits) // self.batch
        best, powers = (rows_of(t, n, t.shape[1]) for t in (self.own.head.best, tree.powers))
        log_probs, ids = (rows_of(t, self.batch, rows, k) for t in (tree.offers.log_probs, tree.offers.ids))
        fixed = shape.scores
        if fixed is not None:
            fixed = fixed[level, :rows].to(logits.device).expand(self.batch, -1, -1).contiguous()
        grow = GROW_TREE.call(
            self.emit.arch, tree.growth, HeadRows(logits, best, powers), self.draft.draft_to_target, level,
            Offers(log_probs, ids, tree.offers.arrived), fixed,
        )  # fmt: skip
        return Stage("tree.grow", (grow,), TREE)

    def _choose(self, tree: TreeTensors) -> Stage:
        """The nodes of every tree, and what verification needs of them."""
        growth, opened = tree.growth, self.opened
        choose = SELECT_TREE.call(
            self.emit.arch, Pool(growth.scores, growth.tokens, growth.parents), opened.roots, opened.token_rows,
            opened.lengths, tree.counts, tree.selection, tree.masks,
        )  # fmt: skip
        ranks = self.state.ranks
        kept = [] if ranks is None else [keep_parents(tree.selection.parents, self.state.turn, ranks)]
        return Stage("tree.masks", (choose, *kept), TREE)


def propose_tree(
    emit: Emitter, target: TargetGeometry, draft: PackedDraft, state: DeviceState, opened: OpenRows, batch: int
) -> list[Stage]:
    """The stages that draft a tree for `batch` sequences."""
    shape = state.sizes.grown
    assert shape is not None, "a program of a grown tree is made for a state of one"
    assert state.tree is not None, "a state made for a grown tree has its tensors"
    work = TreeProposal(emit, target, draft, state, opened, batch)
    return work.stages(shape, state.tree.for_batch(batch))
