"""What a recording should hold, computed by Hugging Face's modules along the recorded tokens.

The reference never chooses a token: it is fed the recorded ones, so one wrong stage is not mistaken for a wrong
history. Which tokens should have been chosen is then a check of its own, exact, from the recorded logits.
Source: EAGLE, arXiv 2401.15077, section 4 (draft, verify, accept); docs/requirements.md R-51..R-59, R-138.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lab.parity.derived import as_programs_have_it
from lab.parity.hf_draft import DraftReference
from lab.parity.hf_target import TargetReference
from lab.parity.recording import PairUnderTest, Recording

FUSED_ORDER = ("taps", "fc", "concat", "qkv", "rope", "attn", "mlp", "feedback", "norm", "head")
CHAIN_ORDER = ("feedback_in", *FUSED_ORDER[1:])


@dataclass
class Replay:
    """Expected tensors in execution order, on the CPU, and why they end early if they do.

    Attributes:
        tensors: what the engine should have recorded, by name.
        unrecorded: rows of the same stages that the engine has no use for (the heads of a prompt), which say more about
            the error plain torch makes there than the few recorded ones.
        stopped: why the recording could not be followed to its end.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    unrecorded: dict[str, Tensor] = field(default_factory=dict)
    stopped: str | None = None


class _Stopped(Exception):
    """The recording cannot be followed further."""


class Reference:
    """Target and draft reference at one compute dtype.

    Args:
        pair: what to load.
        compute_dtype: `pair.torch_dtype` for the reference, `pair.truth_dtype` for the truth.
        attention: "eager" or "sdpa".
    """

    def __init__(self, pair: PairUnderTest, compute_dtype: torch.dtype, attention: str = "eager") -> None:
        self.target = TargetReference(
            Path(pair.target),
            dtype=pair.torch_dtype,
            compute_dtype=compute_dtype,
            device=pair.torch_device,
            weights=pair.target_weights,
            attention=attention,
        )
        self.draft = DraftReference(
            pair.draft, self.target, dtype=pair.torch_dtype, taps=pair.taps, norm_output=pair.norm_output
        )

    def replay(self, recording: Recording, prompt: Sequence[int]) -> Replay:
        """The expected counterpart of `recording`."""
        walk = _Walk(self, recording, list(prompt))
        try:
            walk.prefill()
            for step in range(recording.n_steps):
                walk.step(step)
        except _Stopped as stop:
            walk.out.stopped = str(stop)
        walk.out.tensors = as_programs_have_it(walk.out.tensors)
        return walk.out


class _Walk:
    """The state of one replay: the committed sequence, and the target features the draft has not seen yet."""

    def __init__(self, reference: Reference, recording: Recording, prompt: list[int]) -> None:
        self.target, self.draft = reference.target, reference.draft
        self.draft.forget(self.draft.n_cached)
        self.recording, self.prompt = recording, prompt
        self.sequence = list(prompt)
        self.n_read = len(prompt)  # of the sequence, by the target
        self.features = torch.empty(0)
        self.new_tokens: list[int] = []
        self.routed = {i: torch.empty(0, router.top_k).long() for i, router in self.target.routers.items()}
        self.out = Replay()

    def prefill(self) -> None:
        """The target over the prompt, the draft over all of it but its last entry, and the first token."""
        self._expect_ids("prompt_ids", self.prompt)
        stages = self.target.run(self.prompt, chosen=self._routed("prefill"))
        taps = self._put_target("prefill", stages, slice(0, None), head=slice(-1, None))
        seen = self._draft_pass("prefill", self.prompt[1:], 0, taps[:-1], fuse=True)
        self._put_draft("prefill", seen, FUSED_ORDER[:-2])
        self._expect_ids("first_token", [_lowest_argmax(self._recorded("prefill/target.head"))[-1]])
        first = self._ids("first_token")
        self.sequence += first
        self.features, self.new_tokens = taps[-1:], first

    def step(self, step: int) -> None:
        """Draft, verify, accept, as the engine does it."""
        at = f"step{step}"
        self._draft_chain(at)
        nodes = self._ids(f"{at}/tree.tokens")
        parents = self._ids(f"{at}/tree.parents")
        if len(parents) != len(nodes):
            raise _Stopped(f"{at} has {len(nodes)} nodes and {len(parents)} parents")
        fed, routed = [*self.sequence[self.n_read : -1], *nodes], self._routed(f"{at}/verify")
        # The tokens before the nodes were nodes of the step before, and accepted.
        chosen = {i: torch.cat([self.routed[i][: len(fed) - len(nodes)], new]) for i, new in routed.items()}
        stages = self.target.run(fed, parents, after=self.n_read, chosen=chosen)
        self.n_read = len(self.sequence) - 1
        taps = self._put_target(f"{at}/verify", stages, slice(-len(nodes), None))
        choices = _lowest_argmax(self._recorded(f"{at}/verify/target.head"))
        path = walk_tree(nodes, parents, choices)
        self._expect_ids(f"{at}/accept.tokens", [*(nodes[i] for i in path[1:]), choices[path[-1]]])
        committed = self._ids(f"{at}/accept.tokens")
        # Follow what was committed, right or wrong: every token but the bonus must be a node.
        taken = walk_tree(nodes, parents, _forced_choices(nodes, parents, committed))
        if len(taken) != len(committed):
            raise _Stopped(f"{at} commits {committed}, which is no path of its tree plus one token")
        self.features, self.new_tokens = taps[taken], committed
        self.routed = {i: new[taken] for i, new in routed.items()}
        self.sequence += committed

    def _draft_chain(self, at: str) -> None:
        k = self.recording.k
        first = len(self.sequence) - 1 - len(self.new_tokens)
        seen = self._draft_pass(f"{at}/extend", self.new_tokens, first, self.features, fuse=True)
        self._put_draft(f"{at}/extend", seen, FUSED_ORDER)
        heads = [f"{at}/extend/draft.head"]
        for s in range(1, k):
            here = f"{at}/chain{s}"
            expected = self._chosen(heads[-1])
            self._expect_ids(f"{here}/draft.tokens", [expected])
            tokens = self._ids(f"{here}/draft.tokens")
            position = len(self.sequence) - 2 + s
            seen = self._draft_pass(here, tokens, position, seen["feedback"][-1:], fuse=False)
            self._put_draft(here, seen, CHAIN_ORDER)
            heads.append(f"{here}/draft.head")
        self.draft.forget(k - 1)
        self._expect_ids(f"{at}/tree.tokens", [self.sequence[-1], *(self._chosen(head) for head in heads)])
        self._expect_ids(f"{at}/tree.parents", list(range(-1, k)))

    def _draft_pass(self, at: str, tokens: list[int], first: int, fed: Tensor, *, fuse: bool) -> dict[str, Tensor]:
        positions = list(range(first, first + len(tokens)))
        if fuse:
            self._expect_ids(f"{at}/draft.tokens", tokens)
        self._expect_ids(f"{at}/draft.positions", positions)
        return self.draft.run(tokens, positions, fed, fuse=fuse)

    def _put_target(self, at: str, stages: dict[str, Tensor], rows: slice, head: slice | None = None) -> Tensor:
        """Keep the target stages of `rows` (norm and head of `head`, if given); gives the taps of `rows`."""
        parts = ("attn", "router", "experts", "mlp")
        order = ["embed", *(f"{i}.{part}" for i in range(self.target.n_layers) for part in parts)]
        taps = self.target.taps(stages, self.draft.taps)[rows]
        for stage in order:
            name = f"{at}/target.{stage}"
            if name in self.out.tensors:  # a choice, which was looked at before the pass: it has its place here
                self.out.tensors[name] = self.out.tensors.pop(name)
            elif stage in stages and self._has_ends_alone(name):
                self._put(name, stages[stage][-1:])
                self._put_unrecorded(name, stages[stage])
            elif stage in stages:
                self._put(name, stages[stage][rows])
        self._put(f"{at}/target.taps", taps)
        for stage in ("norm", "head"):
            self._put(f"{at}/target.{stage}", stages[stage][head or rows])
            self._put_unrecorded(f"{at}/target.{stage}", stages[stage])
        return taps

    def _has_ends_alone(self, name: str) -> bool:
        """Whether a stage of a prompt's last layer was recorded of its last token alone, as programs have it unless a
        draft, or whoever recorded, asks for all; a draft that should have asked finds its taps wrong."""
        is_of_last = name.startswith(f"prefill/target.{self.target.n_layers - 1}.")
        return is_of_last and len(self.recording.tensors.get(name, ())) == 1

    def _routed(self, at: str) -> dict[int, Tensor]:
        """The experts that the engine chose in a pass, by layer; what it should have chosen is told by its logits."""
        routed = {}
        for i, router in self.target.routers.items():
            name, logits = f"{at}/target.{i}.experts", self._recorded(f"{at}/target.{i}.router")
            self.out.tensors[name] = _largest(logits, router.top_k)
            routed[i] = self._recorded(name).long()
            if routed[i].shape != self.out.tensors[name].shape or not bool(_are_ids(routed[i], logits.shape[1])):
                raise _Stopped(f"{name} holds no {router.top_k} experts of {logits.shape[1]} a row")
        return routed

    def _put_draft(self, at: str, seen: dict[str, Tensor], order: Sequence[str]) -> None:
        for stage in order:
            # Only the newest entry drafts a token; the others pass neither the final norm nor the head.
            self._put(f"{at}/draft.{stage}", seen[stage][-1:] if stage in ("norm", "head") else seen[stage])
        for stage in ("norm", "head"):
            self._put_unrecorded(f"{at}/draft.{stage}", seen[stage])

    def _put_unrecorded(self, name: str, value: Tensor) -> None:
        self.out.unrecorded[name] = value.detach().to("cpu", copy=True)

    def _put(self, name: str, value: Tensor) -> None:
        self.out.tensors[name] = value.detach().to("cpu", copy=True)

    def _expect_ids(self, name: str, ids: Sequence[int]) -> None:
        self.out.tensors[name] = torch.tensor(list(ids), dtype=torch.int64)

    def _recorded(self, name: str) -> Tensor:
        if name not in self.recording.tensors:
            raise _Stopped(f"{name} was not recorded")
        return self.recording.tensors[name]

    def _ids(self, name: str) -> list[int]:
        """Recorded ids to follow; the reference stops where they are missing or no tokens."""
        ids = [int(i) for i in self._recorded(name).flatten()]
        if not name.endswith("parents") and any(not 0 <= i < self.target.vocab_size for i in ids):
            raise _Stopped(f"{name} holds {ids}, and the target has ids 0..{self.target.vocab_size - 1}")
        expected = self.out.tensors[name]
        if len(ids) != expected.numel() and not name.endswith("accept.tokens"):
            raise _Stopped(f"{name} holds {len(ids)} ids where {expected.numel()} were expected")
        return ids

    def _chosen(self, head: str) -> int:
        return self.draft.target_token(self._recorded(head).reshape(-1).double())


def _lowest_argmax(logits: Tensor) -> list[int]:
    """Largest entry of each row `[T, V]`, lowest id of equals; 0 for a row of NaN, which then fails elsewhere."""
    is_largest = logits == logits.max(dim=-1, keepdim=True).values
    return [int(row.nonzero()[0]) if bool(row.any()) else 0 for row in is_largest]


def _largest(logits: Tensor, k: int) -> Tensor:
    """`[T, k]` ids of the largest of every row of `logits: [T, X]`, the lower of equals, ascending."""
    rows = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in logits.tolist()]  # type: ignore[misc]
    return torch.tensor([sorted(row) for row in rows], dtype=torch.int64).view(len(logits), k)


def _are_ids(chosen: Tensor, n: int) -> Tensor:
    """Whether rows are ascending ids below `n`."""
    rises = (chosen.diff(dim=1) > 0).all() if chosen.shape[1] > 1 else torch.tensor(True)
    return rises & (chosen >= 0).all() & (chosen < n).all()


def walk_tree(nodes: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Node indices from the root down, each the child that holds its parent's choice, until no child does."""
    path = [0]
    while True:
        wanted = choices[path[-1]]
        children = [i for i, parent in enumerate(parents) if parent == path[-1] and nodes[i] == wanted]
        if not children:
            return path
        path.append(children[0])


def _forced_choices(nodes: Sequence[int], parents: Sequence[int], committed: Sequence[int]) -> list[int]:
    """Choices that make `walk_tree` follow `committed`, its last token (the bonus) left out."""
    choices = [-1] * len(nodes)
    node = 0
    for token in committed[:-1]:
        choices[node] = token
        node = next((i for i, parent in enumerate(parents) if parent == node and nodes[i] == token), 0)
        if node == 0:
            break
    return choices
