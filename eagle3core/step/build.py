"""The decode step as a program: open, draft, verify, accept, commit; for one batch size.

The step's stages in order; none of them reads on the host. The draft proposes a chain (`propose`) or a tree (`grow`);
plain decoding is the same program with the root alone.
Source: EAGLE-3, arXiv 2503.01840, section 3; docs/requirements.md R-53, R-81..R-92.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from eagle3core.kernels.card import Call
from eagle3core.kernels.layer.gather_rows import GATHER_ROWS
from eagle3core.kernels.slots.active_slots import ACTIVE_SLOTS
from eagle3core.kernels.slots.commit import COMMIT, Committed, Decided
from eagle3core.kernels.slots.compact_kv import COMPACT_KV
from eagle3core.kernels.slots.keep_states import KEEP_STATES
from eagle3core.kernels.slots.open_step import OPEN_STEP, OpenRows, OpenSlots
from eagle3core.kernels.slots.slot_state import LENGTH, LIMIT, ROOT, RUNNING
from eagle3core.kernels.tree.accept import ACCEPT, Commit
from eagle3core.step.acceptance import Verified, rejected, rewrite_choices
from eagle3core.step.buffers import rows_of
from eagle3core.step.depths.kinds import StepKind, usual_kind
from eagle3core.step.draw import draw
from eagle3core.step.grow import propose_tree
from eagle3core.step.outcome import KeptLogprobs, keep_logprobs
from eagle3core.step.passes import TREE, Emitter, Rows, TargetPass, target_stages
from eagle3core.step.program import Program, Stage, Tap, after_all
from eagle3core.step.propose import ModelProposal, Proposal, propose_chain
from eagle3core.step.ranks import count_ranks, inverse_map
from eagle3core.step.state import DeviceState, tree_words
from eagle3core.step.tree import FlatTree
from eagle3core.weights.packed import Drafter, PackedDraft, PackedTarget

T = TypeVar("T")


class Nodes(NamedTuple):
    """The nodes of a step's trees, int32.

    Attributes:
        known_depths: `[N]`, and known_words: `[N, W]` what is known as the step opens; zeros of a grown tree.
        drafted: tokens in the order of `OpenRows.token_rows`; of a grown tree `[B, N]`, -1 for those left out.
        parents, depths, positions: `[B, N]`. masks: `[B, N, W]` ancestor-or-self words.
    """

    known_depths: Tensor
    known_words: Tensor
    drafted: Tensor
    parents: Tensor
    depths: Tensor
    positions: Tensor
    masks: Tensor


class StepBuilder:
    """Makes the step's program for `batch` rows.

    Args:
        emit: for which architecture.
        target, draft: weights; without a draft only the root is verified, unless the tree has more nodes: then their
            tokens are what the caller wrote to `state.step.drafted` (`[N, B]`, row 0 is overwritten by the roots).
        kind: of the step, of those that the state is made for.
        draws: some rows may draw their tokens; greedy ones choose as without.
        logprobs: where log-probabilities of the committed tokens are kept; None: nowhere.
    """

    def __init__(
        self,
        emit: Emitter,
        target: PackedTarget,
        draft: Drafter | None,
        state: DeviceState,
        batch: int,
        kind: StepKind,
        draws: bool,
        logprobs: KeptLogprobs | None,
    ) -> None:
        # A smaller tree uses the first elements of the same tensors.
        state = replace(state, sizes=replace(state.sizes, tree=kind.tree))
        self.kind = kind
        self.emit, self.target, self.draft, self.state, self.batch = emit, target, draft, state, batch
        self.sizes, self.step, self.draws, self.logprobs = state.sizes, state.step, draws, logprobs
        nodes, path = self.sizes.nodes, self.sizes.path_len
        self.opened = self._opened()
        self.drafted = rows_of(self.step.drafted, nodes, batch)
        self.tokens = rows_of(self.step.node_tokens, batch, nodes)
        self.choices = rows_of(self.step.choices, batch, nodes)
        self.shape = self._shape()
        if self.sizes.grown is not None:
            self.tokens = self.shape.drafted  # chosen in the order of rows already
        self.verified = Rows(
            self.shape.positions.view(-1), self.opened.slots.view(-1), self.opened.lengths, self.opened.tables,
            self.shape.masks, path_len=0 if self.sizes.is_chain else path,
        )  # fmt: skip
        self.accepted = Commit(
            *(rows_of(self.step.accepted[name], batch, *((path,) if name in ("path", "tokens") else ()))
              for name in Commit._fields)
        )  # fmt: skip

    def _shape(self) -> Nodes:
        """What is known of the nodes as the step opens, and where the rest will be."""
        sizes, opened, device, n = self.sizes, self.opened, self.target.device, self.batch
        if isinstance(sizes.tree, FlatTree):
            depths, words = sizes.tree.depths.int().to(device), tree_words(sizes.tree, device)
            parents = torch.tensor(sizes.tree.parents, dtype=torch.int32, device=device).expand(n, -1).contiguous()
            rows = depths.expand(n, -1).contiguous()
            return Nodes(depths, words, self.drafted, parents, rows, opened.positions, opened.masks)
        tree = _present(self.state.tree).for_batch(n)
        nothing = torch.zeros(sizes.nodes, -(-sizes.nodes // 32), dtype=torch.int32, device=device)
        tokens, parents = tree.selection.tokens, tree.selection.parents
        return Nodes(nothing[:, 0].contiguous(), nothing, tokens, parents, tree.masks.depths, tree.masks.positions,
                     tree.masks.mask)  # fmt: skip

    def program(self) -> Program:
        """All stages."""
        stages = [self._open()]
        drafts = self.draft is not None and self.sizes.nodes > 1
        if self.draft is not None and self.kind.entries:
            stages += self._propose(self.draft) if drafts else self._read(self.draft)
        stages += self._verify(first_waits=not drafts)
        return (*stages, *self._accept())

    def _propose(self, draft: Drafter) -> list[Stage]:
        """The drafts of a head or of a small model."""
        if isinstance(draft, PackedTarget):
            return ModelProposal(self.emit, draft, self.state, self.opened, self.batch).stages()
        work = (self.emit, self.target.geometry, draft, self.state, self.opened, self.batch)
        return propose_tree(*work) if self.sizes.grown else propose_chain(*work, draws=self._draws_drafts)

    @property
    def _draws_drafts(self) -> bool:
        return self.draws and self.sizes.draws_drafts

    def _by_rule(self) -> list[Call]:
        """What stands between the target's choices and the walk: a rule that rewrites them, or nothing."""
        rule, state, shape = self.sizes.acceptance, self.state, self.shape
        if rule is None or self.sizes.nodes == 1 or (self.sizes.draws_drafts and not self.draws):
            return []
        logits = rows_of(state.head.logits, self.choices.numel(), state.head.logits.shape[1])
        slots = rows_of(self.step.active, self.batch)
        at = Verified(logits, self.tokens, shape.parents, shape.depths, shape.positions, slots, state.state,
                      state.draws, self.choices)  # fmt: skip
        if not self.sizes.draws_drafts:
            return [rewrite_choices(rule, at)]
        assert isinstance(self.draft, PackedDraft), "only a head's chain draws its drafts"
        kept = _present(_present(state.draft).level_logits)
        return [rejected(at, kept, self.draft.draft_to_target)]

    def _read(self, draft: Drafter) -> list[Stage]:
        """What a draft that proposes nothing reads, so that it can go on later."""
        if isinstance(draft, PackedTarget):
            return ModelProposal(self.emit, draft, self.state, self.opened, self.batch).reading(self.kind.entries)[0]
        work = Proposal(self.emit, self.target.geometry, draft, self.state, self.opened, self.batch)
        return work.keys_alone(self.kind.entries)

    def _opened(self) -> OpenRows:
        sizes, batch = self.sizes, self.batch
        pending = self.kind.entries
        levels, words = sizes.chain_levels if self.draft else 0, -(-sizes.nodes // 32)
        shapes = {
            "tables": (batch, sizes.entries),
            **dict.fromkeys(("token_rows", "positions", "slots"), (batch, sizes.nodes)),
            "masks": (batch, sizes.nodes, words),
            **{f"entry_{name}": (batch, pending) for name in ("rows", "tokens", "positions", "slots")},
            "chain_lengths": (levels, batch),
            **{f"chain_{name}": (levels, batch, sizes.beam) for name in ("positions", "slots")},
        }  # fmt: skip
        tensors = {**self.step.opened, "roots": self.step.drafted}
        return OpenRows(**{name: rows_of(tensors[name], *shapes.get(name, (batch,))) for name in OpenRows._fields})

    def _open(self) -> Stage:
        state, step = self.state, self.step
        table = state.state
        known = (self.shape.known_depths, self.shape.known_words)
        read = OpenSlots(step.active, table, state.pending_tokens, state.pending_rows, state.tables, *known)
        find = ACTIVE_SLOTS.call(
            self.emit.arch, table[RUNNING], table[LENGTH], table[LIMIT], table[ROOT], step.no_ends, step.active,
            step.inverse, step.count, state.turn,
        )  # fmt: skip
        place = OPEN_STEP.call(self.emit.arch, read, self.opened, self.sizes.block)
        return Stage("tree.masks", tuple(after_all([find, place])), TREE)

    def _ranks(self, draft: PackedDraft, ranks: Tensor) -> Call:
        """The draft's rank of the target's token at every level."""
        kept, map_, sizes = _present(self.state.draft).level_logits, draft.draft_to_target, draft.geometry
        assert kept is not None, "a state that keeps ranks keeps the logits they come from"
        inverse = None if map_ is None else inverse_map(map_, sizes.draft_vocab_size, sizes.vocab_size)
        return count_ranks(kept, self.choices, inverse, self.state.turn, ranks)

    def _verify(self, *, first_waits: bool) -> list[Stage]:
        state, rows = self.state, self.verified
        stages: list[Stage] = []
        tokens = self.shape.drafted.view(-1)
        if self.sizes.grown is not None:
            # Masks and positions are as new as the tokens, and the pass's later kernels read them early.
            first_waits = True
            stages.append(Stage("tree.grow", (), TREE, {"tree.tokens": Tap(tokens)}))
        elif self.sizes.nodes > 1:
            index, found = self.opened.token_rows.view(-1), self.tokens.view(-1, 1)
            gather = [GATHER_ROWS.call(self.emit.arch, tokens[:, None], index, found, fill=-1)]
            gather = after_all(gather) if first_waits else gather
            first_waits, tokens = False, self.tokens.view(-1)
            stages.append(Stage("tree.grow", tuple(gather), TREE, {"tree.tokens": Tap(tokens)}))
        over = TargetPass(
            self.target, state.act, tokens, rows_of(self.step.ids, rows.n), state.k, state.v, state.captured
        )
        stages += target_stages(self.emit, over, rows, "verify", first_waits=first_waits)
        act, block = state.act, self.target.geometry.block
        scaled, sums = (rows_of(t, rows.n, t.shape[1]) for t in (act.scaled, act.sums))
        left = self.emit.left_for(self.target.head, self.target.layers[-1], rows.n)
        head = self.emit.head(self.target.head, scaled, sums, state.head, block, ordered=left)
        logits = rows_of(state.head.logits, rows.n, state.head.logits.shape[1])
        taps = {"target.head": Tap(logits, rows.slots, "verify")}
        return [*stages, Stage("target.head", tuple(head), ("BASE_DECODE_STEP",), taps)]

    def _accept(self) -> list[Stage]:
        state, batch, arch, got = self.state, self.batch, self.emit.arch, self.accepted
        nodes = self.sizes.nodes
        tokens = self.tokens if nodes > 1 else self.drafted.view(batch, 1)
        chosen = self.choices.view(-1)
        calls = self.emit.choose(state.head, len(chosen), chosen)
        if self.draws:
            logits = rows_of(state.head.logits, len(chosen), state.head.logits.shape[1])
            slots = rows_of(self.step.active, batch)
            calls.append(draw(logits, self.shape.positions.view(-1), slots, state.draws, chosen, ahead=1))
        calls += self._by_rule()
        calls.append(ACCEPT.call(
            arch, tokens, self.choices, self.shape.parents, self.shape.depths, self.shape.masks, self.step.no_ends, got
        ))  # fmt: skip
        stages = [Stage("accept", tuple(calls), ("EAGLE_ACCEPT",), {"accept.tokens": Tap(got.tokens.view(-1))})]
        kept = rows_of(self.step.kept, batch)
        decided = Decided(
            self.step.active, got.n_accepted, got.path, got.tokens, self.choices, tokens, self.opened.slots, state.ends
        )
        committed = Committed(state.state, state.pending_tokens, state.pending_rows, kept, state.turn, state.results)
        if isinstance(self.draft, PackedDraft) and state.ranks is not None and not self.sizes.grown:
            stages.append(Stage("accept.ranks", (self._ranks(self.draft, state.ranks),), ("EAGLE_ACCEPT",)))
        if self.logprobs is not None:
            logits = rows_of(state.head.logits, len(chosen), state.head.logits.shape[1])
            kept_of_path = keep_logprobs(logits, self.choices, got.path, state.turn, self.logprobs)
            stages.append(Stage("accept.logprobs", (kept_of_path,), ("EAGLE_ACCEPT",)))
        commit: list[Call] = []
        if self.kind.keeps.n:
            kept_of = (self.step.active, self.opened.lengths, state.captured)
            commit.append(KEEP_STATES.call(arch, *kept_of, self.kind.keeps))
        commit.append(COMMIT.call(arch, decided, committed, self.kind.keeps))
        stages.append(Stage("commit", tuple(commit), ("EAGLE_TAIL_COMMIT",)))
        moves: list[Call] = []
        if not self.sizes.is_chain:  # a chain's path lies where it belongs: taking back its rest is a shorter length
            kept_rows = (self.opened.tables, self.opened.lengths, got.path, kept)
            moves.append(COMPACT_KV.call(arch, state.k, state.v, *kept_rows))
        rewind = ("EAGLE_TAIL_COMMIT", "EAGLE::KVCacheRewind")
        return [*stages, Stage("rewind", tuple(moves), rewind)]


def step_program(
    emit: Emitter,
    target: PackedTarget,
    draft: Drafter | None,
    state: DeviceState,
    batch: int,
    *,
    kind: StepKind | None = None,
    draws: bool = False,
    logprobs: KeptLogprobs | None = None,
) -> Program:
    """The step for `batch` rows; `kind`: None for that of the state's tree; `draws`: some of them may draw their
    tokens, `logprobs`: where those are kept."""
    kind = kind or usual_kind(state.sizes, draft)
    return StepBuilder(emit, target, draft, state, batch, kind, draws, logprobs).program()


def _present(tensors: T | None) -> T:
    assert tensors is not None, "a state made with a draft has its tensors"
    return tensors
