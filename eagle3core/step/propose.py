"""What a draft model does in a step: a first pass over what was committed last, then a pass a level.

The first pass reads the target's true taps of the committed tokens, and leaves nothing of the drafts before in the
cache. Each level of a chain feeds the last row's output back. A small model reads tokens alone, in as many passes.
Source: EAGLE-3, arXiv 2503.01840, section 3; of the small model Leviathan et al., arXiv 2211.17192, and R-02.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle3core.geometry import TargetGeometry
from eagle3core.kernels.card import Call
from eagle3core.kernels.layer.take_rows import TAKE_ROWS
from eagle3core.kernels.slots.open_step import OpenRows
from eagle3core.kernels.tree.mask_words import pack_words
from eagle3core.step.acceptance import draw_drafts
from eagle3core.step.buffers import rows_of
from eagle3core.step.heads import DraftPass, draft_keys, draft_stages, fuse_taps, fused_feature
from eagle3core.step.passes import DRAFT, TREE, Emitter, Rows, TargetPass, target_stages
from eagle3core.step.program import Stage, Tap, after_all
from eagle3core.step.ranks import keep_logits
from eagle3core.step.state import DeviceState
from eagle3core.weights.eagle import PackedEagle
from eagle3core.weights.packed import PackedDraft, PackedTarget


def triangle(opened: OpenRows, batch: int, tokens: int) -> Tensor:
    """`[B, T, W]` triangular mask words."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=opened.lengths.device).tril()
    return pack_words(mask).expand(batch, -1, -1).contiguous()


def level_rows(opened: OpenRows, batch: int, level: int) -> Rows:
    """Where a chained pass has its one row a sequence; level 1 is the first."""
    at = level - 1
    lengths, mask = opened.chain_lengths[at], triangle(opened, batch, 1)
    positions, slots = opened.chain_positions[at].view(-1), opened.chain_slots[at].view(-1)
    return Rows(positions, slots, lengths, opened.tables, mask)


def head_stage(calls: list[Call], logits: Tensor, rows: Tensor, scope: str) -> Stage:
    """The head as a stage; `rows` is negative for padding."""
    taps = {"draft.head": Tap(logits, rows, scope)}
    return Stage("draft.head", tuple(calls), (*DRAFT, "EAGLE_DRAFT_LM_HEAD"), taps)


class Proposal:
    """A head's passes for `batch` sequences, of whatever shape the drafts are."""

    powers: Tensor | None = None  # where the head leaves them, if somebody reads them

    def __init__(
        self, emit: Emitter, target: TargetGeometry, draft: PackedDraft, state: DeviceState, opened: OpenRows,
        batch: int,
    ) -> None:  # fmt: skip
        assert state.draft is not None, "a state made with a draft has its tensors"
        self.emit, self.target, self.draft, self.state, self.opened = emit, target, draft, state, opened
        self.batch, self.own, self.sizes = batch, state.draft, state.sizes
        self.window = min((w for w in (state.sizes.draft_window, draft.geometry.window) if w), default=0)

    def first_pass(self) -> tuple[list[Stage], DraftPass]:
        """The pass over pending entries, which begins with their fused taps."""
        own, opened, pending = self.own, self.opened, self.sizes.path_len
        n, entries = self.batch * pending, opened.entry_slots.view(-1)
        fuse, hidden = self._fused(n)
        stages = [fuse]
        rows = Rows(opened.entry_positions.view(-1), entries, opened.entry_lengths, opened.tables, self.causal(pending),
                    window=self.window)  # fmt: skip
        over = self.over(hidden, opened.entry_tokens.view(-1), n, own.out)
        stages += draft_stages(self.emit, over, rows, "extend", first_waits=False)
        return stages, over

    def keys_alone(self, entries: int) -> list[Stage]:
        """What of the first pass a later step needs: keys and values of up to `entries` pending entries a sequence.

        A head has one layer, so its keys need no attention; they are the first pass's, row by row.
        """
        own, opened, n = self.own, self.opened, self.batch * entries
        fuse, hidden = self._fused(n)
        rows = Rows(opened.entry_positions.view(-1), opened.entry_slots.view(-1), opened.entry_lengths, opened.tables,
                    self.causal(entries))  # fmt: skip
        over = self.over(hidden, opened.entry_tokens.view(-1), n, own.out)
        return [fuse, draft_keys(self.emit, over, rows, "extend", first_waits=False)]

    def _fused(self, n: int) -> tuple[Stage, Tensor]:
        """The fused taps `[n, Hd]` of the pending entries."""
        own, opened = self.own, self.opened
        taps, hidden = rows_of(own.taps, n, own.taps.shape[1]), rows_of(own.hidden, n, own.hidden.shape[1])
        index, over = opened.entry_rows.view(-1), self.over(hidden, opened.entry_tokens.view(-1), n, own.out)
        fuse = after_all(fuse_taps(self.emit, over, own, self.state.captured, index, taps))
        tap = Tap(taps, opened.entry_slots.view(-1), "extend")
        return Stage("draft.fc", tuple(fuse), DRAFT, {"draft.taps": tap}), hidden

    def follow(
        self, feature: Tensor, tokens: Tensor, rows: Rows, out: Tensor, scope: str
    ) -> tuple[list[Stage], DraftPass]:
        """A pass over states `feature: [n, Hd]` that the draft itself gave, each with a token."""
        # The passes before wrote keys, and of a tree this one's rows and mask, that its attention reads early.
        if not isinstance(self.draft, PackedEagle):
            over = self.over(feature, tokens, rows.n, out)
            return draft_stages(self.emit, over, rows, scope, first_waits=True), over
        hidden = rows_of(self.own.hidden, rows.n, self.own.hidden.shape[1])
        over = self.over(hidden, tokens, rows.n, out)
        fuse = after_all(fused_feature(self.emit, over, feature, None))
        return [
            Stage("draft.fc", tuple(fuse), DRAFT),
            *draft_stages(self.emit, over, rows, scope, first_waits=False),
        ], over

    def over(self, hidden: Tensor, tokens: Tensor, n: int, out: Tensor) -> DraftPass:
        """Operands of a pass over `n` rows."""
        own = self.own
        x, out = rows_of(own.x, n, own.x.shape[1]), rows_of(out, n, out.shape[1])
        residual = None if own.residual is None else rows_of(own.residual, n, own.residual.shape[1])
        return DraftPass(self.draft, own.act, hidden, tokens, x, out, own.k, own.v, residual)

    def last_rows(self, over: DraftPass) -> tuple[list[Call], Tensor, Tensor]:
        """What the head reads of every sequence's last pending entry; its output goes to the feedback."""
        own, scaled, sums = self.own, *self.normed(over)
        outs = [rows_of(t, self.batch, t.shape[1]) for t in (own.scaled, own.sums, own.feedback)]
        take = TAKE_ROWS.call(self.emit.arch, (scaled, sums, over.out), self.opened.last_rows, outs)
        return [take], outs[0], outs[1]

    def normed(self, over: DraftPass) -> tuple[Tensor, Tensor]:
        """What the head reads of every row of a pass: the scaled stream and its sums."""
        act, n = self.own.act, len(over.x)
        return rows_of(act.scaled, n, act.scaled.shape[1]), rows_of(act.sums, n, act.sums.shape[1])

    def head(self, scaled: Tensor, sums: Tensor) -> tuple[list[Call], Tensor]:
        """The head's calls, and its logits `[n, Vd]`."""
        out = self.own.head
        calls = self.emit.head(self.draft.head, scaled, sums, out, self.draft.geometry.block, self.powers)
        return calls, rows_of(out.logits, len(scaled), out.logits.shape[1])

    def causal(self, tokens: int) -> Tensor:
        """`[B, T, W]` triangular mask words."""
        return triangle(self.opened, self.batch, tokens)

    head_stage = staticmethod(head_stage)


class ChainProposal(Proposal):
    """One token a level, the most likely or, with `draws`, a drawn one of rows that draw; written to
    `state.step.drafted` `[N, B]` behind the roots."""

    draws = False

    def stages(self) -> list[Stage]:
        """All passes."""
        own, opened, batch = self.own, self.opened, self.batch
        drafted = rows_of(self.state.step.drafted, self.sizes.nodes, batch)
        stages, over = self.first_pass()
        take, scaled, sums = self.last_rows(over)
        stages += self._choose(take, scaled, sums, drafted, 0)
        feedback, spare = own.feedback, own.next_feedback
        for level in range(1, self.sizes.path_len - 1):
            rows = replace(level_rows(opened, batch, level), window=self.window)
            above = rows_of(feedback, batch, feedback.shape[1])
            passed, over = self.follow(above, drafted[level], rows, spare, f"chain{level}")
            stages += passed
            stages += self._choose([], *self.normed(over), drafted, level)
            feedback, spare = spare, feedback
        return stages

    def _choose(self, calls: list[Call], scaled: Tensor, sums: Tensor, drafted: Tensor, level: int) -> list[Stage]:
        """The level's token of every sequence."""
        head, logits = self.head(scaled, sums)
        calls = calls + head
        if self.own.level_logits is not None:
            calls.append(keep_logits(logits, self.own.level_logits[level]))
        to_target = self.draft.draft_to_target
        choose = self.emit.choose(self.own.head, self.batch, drafted[level + 1], to_target)
        if self.draws:
            slots = rows_of(self.state.step.active, self.batch)
            whose = (self.opened.lengths, slots, self.state.draws)
            choose.append(draw_drafts(logits, *whose, to_target, level, drafted[level + 1]))
        scope = f"chain{level}" if level else "extend"
        head_stage = self.head_stage(calls, logits, self.opened.lengths, scope)
        return [head_stage, Stage("tree.grow", tuple(choose), TREE)]


def propose_chain(
    emit: Emitter, target: TargetGeometry, draft: PackedDraft, state: DeviceState, opened: OpenRows, batch: int,
    *, draws: bool = False,
) -> list[Stage]:  # fmt: skip
    """The stages that draft a chain for `batch` sequences; `draws`: rows that draw their tokens draw drafts too."""
    chain = ChainProposal(emit, target, draft, state, opened, batch)
    chain.draws = draws
    return chain.stages()


class ModelProposal:
    """A chain of a small model's likeliest tokens; its cache holds every committed token at the token's own place."""

    def __init__(self, emit: Emitter, model: PackedTarget, state: DeviceState, opened: OpenRows, batch: int) -> None:
        assert state.small is not None, "a state made with a small model has its tensors"
        self.emit, self.model, self.own, self.opened, self.batch = emit, model, state.small, opened, batch
        self.drafted = rows_of(state.step.drafted, state.sizes.nodes, batch)
        self.pending = state.sizes.path_len

    def reading(self, entries: int) -> tuple[list[Stage], tuple[Tensor, Tensor]]:
        """A pass over up to `entries` tokens committed last, and what the head reads of its rows."""
        opened, batch = self.opened, self.batch
        rows = Rows(
            opened.entry_positions.view(-1), opened.entry_slots.view(-1), opened.entry_lengths, opened.tables,
            triangle(opened, batch, entries),
        )  # fmt: skip
        return self._read(opened.entry_tokens.view(-1), rows, "extend")

    def stages(self) -> list[Stage]:
        """A pass over the tokens committed last, the root behind them, then a pass a level."""
        own, opened, batch = self.own, self.opened, self.batch
        stages, every = self.reading(self.pending)
        last = [rows_of(t, batch, t.shape[1]) for t in (own.scaled, own.sums)]
        take = TAKE_ROWS.call(self.emit.arch, every, opened.last_rows, last)
        stages += self._choose([take], last[0], last[1], 0)
        for level in range(1, self.pending - 1):
            more, (scaled, sums) = self._read(self.drafted[level], level_rows(opened, batch, level), f"chain{level}")
            stages += [*more, *self._choose([], scaled, sums, level)]
        return stages

    def _read(self, tokens: Tensor, rows: Rows, scope: str) -> tuple[list[Stage], tuple[Tensor, Tensor]]:
        """A pass, and what the head reads of its rows."""
        own, n = self.own, rows.n
        over = TargetPass(self.model, own.act, tokens, rows_of(own.ids, n), own.k, own.v, ())
        # The rows were placed, and the keys before them written, by kernels of this very program.
        stages = target_stages(self.emit, over, rows, scope, first_waits=True, role="draft")
        return stages, (
            rows_of(own.act.scaled, n, own.act.scaled.shape[1]),
            rows_of(own.act.sums, n, own.act.sums.shape[1]),
        )

    def _choose(self, calls: list[Call], scaled: Tensor, sums: Tensor, level: int) -> list[Stage]:
        """The level's token of every sequence."""
        out, emit = self.own.head, self.emit
        calls = calls + emit.head(self.model.head, scaled, sums, out, self.model.geometry.block)
        logits, scope = rows_of(out.logits, len(scaled), out.logits.shape[1]), f"chain{level}" if level else "extend"
        choose = emit.choose(out, self.batch, self.drafted[level + 1])
        return [head_stage(calls, logits, self.opened.lengths, scope), Stage("tree.grow", tuple(choose), TREE)]
