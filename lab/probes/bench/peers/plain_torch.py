"""Peer: a decode step of plain torch in one CUDA graph, as strong as plain torch gets.

Fused q/k/v and gate/up matrices through F.linear, rms_norm, the fastest SDPA form at the shape, everything static. With
k > 0 the whole speculative step: k chained draft passes, one verify of k + 1 rows, greedy acceptance, the next step's
inputs, all in the graph. Positions stand still from step to step, so every replay does the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.geometry import BlockGeometry, DraftGeometry, TargetGeometry
from eagle3core.kernels.layer import rope_tables
from eagle3core.weights import rope_frequencies
from lab.probes.bench.peers.fused import FusedDraft, FusedLayer, FusedTarget
from lab.probes.bench.peers.regions import Place, Regions
from lab.probes.bench.peers.sdpa import Choice, captured, fastest
from lab.probes.bench.peers.step_loop import PeerRound, StepLoop

# Milliseconds of this step on an H200 in bf16, (plain, spec-3), Llama-3.1-8B shapes; measured with torch 2.11 on a
# machine that read at the rate of `lab.probes.ceilings`. A row far from them says that the peer, not the engine, has
# changed; a row of another GPU is not held against them.
KNOWN_GPU = "H200"
KNOWN_MS = {(512, 1): (5.69, 6.97), (32768, 1): (6.65, 8.27), (16384, 4): (7.73, 9.48)}


@dataclass
class _Rows:
    """Where the rows of a pass sit: T rows from position `start` on, with cos and signed sin `[T, 1, D]`."""

    start: int
    n_rows: int
    cos: Tensor
    sin: Tensor


class _Stack:
    """Layers of one width with their caches, at one fixed length."""

    def __init__(
        self, layers: list[FusedLayer], block: BlockGeometry, *, batch: int, context: int, room: int, like: Tensor
    ) -> None:
        self.layers, self.block, self.context = layers, block, context
        shape = (len(layers), batch, block.n_kv_heads, context + room, block.head_dim)
        self.k = torch.empty(shape, dtype=like.dtype, device=like.device).normal_()
        self.v = torch.empty(shape, dtype=like.dtype, device=like.device).normal_()
        frequencies, self.rope_scale = rope_frequencies(block.rope, block.head_dim)
        self.frequencies = frequencies.to(like.device)
        self.choices: dict[int, Choice] = {}

    def rows(self, offset: int, n_rows: int) -> _Rows:
        """Rows from position context + offset on; chooses the attention for that many."""
        start, device = self.context + offset, self.k.device
        positions = torch.arange(start, start + n_rows, device=device)[None]
        cos, sin = rope_tables(self.frequencies, self.rope_scale, positions, self.k.dtype)
        cos, sin = (table.reshape(n_rows, 1, -1) for table in (cos, sin))
        if n_rows not in self.choices:
            shape = (self.k.shape[1], n_rows, self.block.n_heads, self.block.head_dim)
            q = torch.empty(shape, dtype=self.k.dtype, device=device).normal_()
            self.choices[n_rows] = fastest(q, self.k[0][:, :, : start + n_rows], self.v[0][:, :, : start + n_rows])
        return _Rows(start, n_rows, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def place(self, i: int, at: _Rows) -> Place:
        """Where those rows go in layer `i`."""
        stop = at.start + at.n_rows
        return Place(at.cos, at.sin, self.k[i][:, :, at.start : stop], self.v[i][:, :, at.start : stop])

    def attend(self, i: int, q: Tensor, at: _Rows) -> Tensor:
        """`[B, T, H, D]` of every key up to the rows' own, none hidden."""
        stop = at.start + at.n_rows
        return self.choices[at.n_rows].attend(q, self.k[i][:, :, :stop], self.v[i][:, :, :stop])


class PlainTorch:
    """The peer at one point.

    Args:
        target, draft: row-major weights; the draft is needed with k > 0.
        geometry, draft_geometry: shapes.
        k: drafts a step, 0 for plain decoding.
        context: cached tokens of every sequence.
        first: `[B]` int64 tokens that decoding goes on from.
        successor: planted successors on the CPU, if known.
        n_steps: steps of a round.
    """

    name = "plain-torch"

    def __init__(
        self,
        target: FusedTarget,
        draft: FusedDraft | None,
        geometry: TargetGeometry,
        draft_geometry: DraftGeometry,
        *,
        k: int,
        context: int,
        first: Tensor,
        successor: Tensor | None,
        n_steps: int,
    ) -> None:
        self.k, self.context, self.weights, self.draft = k, context, target, draft
        self.taps = draft_geometry.taps if k else ()
        self.first = first.to(target.table.device)
        self.regions = self._regions()
        batch, like = len(first), target.table
        # A verify's rows lie behind the context; the draft's entries of a step start one earlier, for what is pending.
        self.stack = _Stack(target.layers, geometry.block, batch=batch, context=context, room=k + 1, like=like)
        self.tokens, self.counts = self.first.clone(), torch.zeros_like(self.first)
        self.verify_rows = self.stack.rows(0, k + 1)
        if k:
            assert draft is not None, "a speculative step has a draft"
            self.head = _Stack([draft.layer], draft_geometry.block, batch=batch, context=context, room=2 * k, like=like)
            self.extend_rows = self.head.rows(0, k + 1)
            self.chain_rows = [self.head.rows(k + 1 + level, 1) for level in range(k - 1)]
            width = len(self.taps) * geometry.block.hidden_size
            self.pending_taps = torch.empty(batch, k + 1, width, dtype=like.dtype, device=like.device).normal_()
            self.pending_tokens = self.first[:, None].repeat(1, k + 1)
            self.last = torch.zeros_like(self.first)
        step = self._speculate if k else self._decode
        with torch.no_grad():
            call = self._ready(step)
        self.is_captured = like.is_cuda
        self.loop = StepLoop(call, self.tokens, self.counts if k else None, successor, n_steps, self._reset)

    def run(self) -> PeerRound:
        """A round of steps."""
        with torch.no_grad():
            return self.loop.run(self.first)

    def facts(self) -> dict[str, Any]:
        """The attention chosen, and how its forms compared."""
        choice = self.stack.choices[self.k + 1]
        return {
            "attention": choice.name,
            "attention_forms_us": [f"{name}: {us:.1f}" for name, us in choice.times_us.items()],
            "attention_refused": [f"{name}: {why}" for name, why in choice.refused.items()],
            "captured": self.is_captured,
            "mask": "none: a bound above one row" if self.k else "none needed",
        }

    def _regions(self) -> Regions:
        """The step's functions."""
        return Regions()

    def _ready(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as it is called."""
        return captured(step) if self.first.is_cuda else step

    def _reset(self) -> None:
        if self.k:
            self.pending_tokens.copy_(self.first[:, None].expand_as(self.pending_tokens))
            self.last.zero_()

    def _forward(self, tokens: Tensor, at: _Rows) -> tuple[Tensor, list[Tensor]]:
        """Greedy choices `[B, T]` for `tokens: [B, T]`, and the captured streams."""
        stack, weights, block, captured_streams = self.stack, self.weights, self.stack.block, []
        layers = stack.layers
        hidden, q = self.regions.opening(tokens, weights.table, layers[0], stack.place(0, at), block)
        for i, layer in enumerate(layers):
            if i in self.taps:
                captured_streams.append(hidden)
            mixed = stack.attend(i, q, at)
            if i + 1 < len(layers):
                following = stack.place(i + 1, at)
                hidden, q = self.regions.between(hidden, mixed, layer, layers[i + 1], following, block)
        hidden, choices = self.regions.closing(hidden, mixed, layers[-1], weights.final_norm, weights.head, block)
        if len(layers) in self.taps:
            captured_streams.append(hidden)
        return choices, captured_streams

    def _decode(self) -> None:
        choices, _ = self._forward(self.tokens[:, None], self.verify_rows)
        self.tokens.copy_(choices[:, 0])

    def _draft_pass(self, hidden: Tensor, tokens: Tensor, at: _Rows, pick: Tensor | None) -> tuple[Tensor, Tensor]:
        """Feedback and proposed target ids `[B]` of the picked (or only) row."""
        assert self.draft is not None, "a draft pass has a draft"
        stack, draft, at_0 = self.head, self.draft, self.head.place(0, at)
        q = self.regions.draft_opening(hidden, tokens, self.weights.table, draft, at_0, stack.block)
        return self.regions.draft_closing(hidden, stack.attend(0, q, at), draft, pick, stack.block)

    def _speculate(self) -> None:
        assert self.draft is not None, "a speculative step has a draft"
        fused = F.linear(self.pending_taps, self.draft.fc)
        hidden, drafted = self._draft_pass(fused, self.pending_tokens, self.extend_rows, self.last)
        nodes = [self.tokens, drafted]
        for at in self.chain_rows:
            hidden, drafted = self._draft_pass(hidden, nodes[-1][:, None], at, None)
            nodes.append(drafted)
        tree = torch.stack(nodes, dim=1)
        choices, streams = self._forward(tree, self.verify_rows)
        n_accepted, token = self.regions.accepting(tree, choices)
        self.counts.add_(n_accepted + 1)
        self.tokens.copy_(token)
        self.pending_taps.copy_(torch.cat(streams, -1))
        self.pending_tokens.copy_(choices)
        self.last.copy_(n_accepted)
