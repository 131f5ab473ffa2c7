"""A head in plain torch, over finished texts: what it would draft at every place, read in any way.

The first pass goes over all rows of all texts at once. Each chained pass goes over all places at once too: the query
of a place sees the first pass's keys up to it and its own chained ones, as an engine's would.
Formulas: docs/checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from eagle3core.geometry import EagleGeometry
from eagle3core.weights import rope_frequencies
from lab.doctor.draft.reading import Reading
from lab.doctor.draft.text import Text

QUERY_ROWS = 512  # queries whose scores are in memory together
LOGIT_ROWS = 2048
TEMPERATURES = (0.7, 1.0, 1.4, 2.0, 2.8)
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu, "relu": functional.relu, "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip


@torch.no_grad()
def propose(reading: Reading, text: Text, k: int) -> Tensor:
    """`[M, k]` int64 target ids drafted at each root of `text` (`Text.roots`), greedily."""
    head = _Head(reading, text)
    roots = text.roots().to(text.tokens.device)
    y, drafted = head.first_pass_at(roots - 1), list[Tensor]()
    for level in range(1, k + 1):
        feedback, normed = head.outputs(y)
        drafted.append(head.choices(normed))
        if level < k:
            y = head.chained_pass(level, drafted[-1], feedback)
    return torch.stack(drafted, dim=1)


@torch.no_grad()
def likelihoods(reading: Reading, text: Text, k: int) -> Tensor:
    """`[M, k]` log-probability of the text's own tokens at every root, the chain being fed those tokens.

    NaN past the text's end and for tokens outside the draft vocabulary. Each level reads the head's own state of the
    level before, as a chain does; only the tokens are the text's, so readings can be compared place by place. All at
    the temperature of `TEMPERATURES` that makes the text likeliest: a misread head is often too sure of itself, and a
    reading that only makes it less sure is no better one.
    """
    head, device = _Head(reading, text), text.tokens.device
    roots = text.roots().to(device)
    y, levels = head.first_pass_at(roots - 1), list[Tensor]()
    for level in range(1, k + 1):
        feedback, normed = head.outputs(y)
        following = text.tokens[(roots + level).clamp(max=len(text.tokens) - 1)]
        levels.append(head.likelihood(normed, following))
        if level < k:
            y = head.chained_pass(level, following, feedback)
    made = torch.stack(levels, dim=2).cpu()  # [temperatures, M, k]
    is_inside = text.roots()[:, None] + torch.arange(1, k + 1) < text.ends()[:, None]
    made = made.where(is_inside, torch.nan)
    return made[int(made.double().flatten(1).nanmean(dim=1).nan_to_num(float("-inf")).argmax())]


@torch.no_grad()
def all_logits(reading: Reading, text: Text, rows: Tensor) -> Tensor:
    """`[R, Vd]` fp32 logits of the first pass at any rows `[R]` but the last of a text, prompts' too.

    Row r has read the token of row r + 1, so it speaks of the token of row r + 2.
    """
    head = _Head(reading, text)
    return head.logits(head.outputs(head.first_pass()[rows])[1])


@torch.no_grad()
def all_choices(reading: Reading, text: Text) -> tuple[Tensor, Tensor]:
    """`[N]` int64 each: the target id that the first pass drafts at every row, as in `all_logits`, and its position."""
    head = _Head(reading, text)
    return head.choices(head.outputs(head.first_pass())[1]), head.positions


@torch.no_grad()
def first_logits(reading: Reading, text: Text, rows: Tensor | None = None) -> Tensor:
    """`[R, Vd]` fp32 logits of the first level for steps that begin from `rows: [R]`; None: from every root."""
    at = text.roots() if rows is None else rows
    return all_logits(reading, text, at.to(text.tokens.device) - 1)


def taught_logits(reading: Reading, text: Text, k: int) -> list[Tensor]:
    """By level, `[M, Vd]` fp32 logits at every root with the text's own tokens fed in the place of drafts.

    Gradients reach the reading's weights. A row whose text has ended before its level means nothing.
    """
    head = _Head(reading, text)
    roots = text.roots().to(text.tokens.device)
    y, logits = head.first_pass()[roots - 1], list[Tensor]()
    for level in range(1, k + 1):
        feedback, normed = head.outputs(y)
        logits.append(head.logits(normed))
        if level < k:
            fed = text.tokens[(roots + level).clamp(max=len(text.tokens) - 1)]
            y = head.chained_pass(level, fed, feedback)
    return logits


@dataclass(eq=False)
class _Head:
    """One reading over one text; keys and values `[K, rows, D]` of the passes so far."""

    reading: Reading
    text: Text

    def __post_init__(self) -> None:
        geometry = self.reading.geometry
        self.block, self.variant, self.weights = geometry.block, geometry.variant, self.reading.weights
        starts = torch.tensor(self.text.starts[:-1]).repeat_interleave(torch.tensor(self.text.starts).diff())
        self.positions = (torch.arange(len(starts)) - starts).to(self.text.tokens.device)  # [N]
        frequencies, scale = rope_frequencies(self.reading.rope, self.block.head_dim, self.reading.session)
        self.frequencies, self.scale = frequencies.to(self.text.tokens.device), scale
        embedding = self.weights.get("embed_tokens.weight") if geometry.has_embedding else None
        self.embedding = self.text.embedding if embedding is None else embedding
        head = self.weights.get("lm_head.weight") if geometry.has_head else None
        tied = self.embedding if self.variant.tied_head else self.text.head
        self.head = tied if head is None else head
        self.score_scale: float = self.block.head_dim**-0.5
        self.chained: list[tuple[Tensor, Tensor]] = []  # keys and values [K, M, D] of each chained pass

    def first_pass(self) -> Tensor:
        """`[N, Hd]` what the layer gives at every row; row r has its own state and the next token.

        The last row of a text has no next token: its output means nothing, and nobody sees its key.
        """
        following = self.text.tokens.roll(-1)
        h, x = self._entered(self._fused(), following, is_first=True)
        q, k, v = self._projected(x, self.positions)
        self.keys, self.values = k, v
        return self._left(h, self._attended(q, self.text.starts))

    def first_pass_at(self, entries: Tensor) -> Tensor:
        """`[M, Hd]` of the first pass, the rows in front of the roots alone; keys and values are those of all rows."""
        h, x = self._entered(self._fused(), self.text.tokens.roll(-1), is_first=True)
        self.keys = self._turned_heads(x, "k", self.positions)
        self.values = self._heads(x, "v")
        q = self._turned_heads(x[entries], "q", self.positions[entries])
        return self._left(h[entries], self._attended_chained(q, entries, self.positions[entries]))

    def chained_pass(self, level: int, tokens: Tensor, fed: Tensor) -> Tensor:
        """`[M, Hd]` the layer's output for a draft each, `level` places behind the root's entry."""
        entries = self.text.roots().to(tokens.device) - 1
        h, x = self._entered(fed, tokens, is_first=False)
        positions = self.positions[entries] + level
        q, k, v = self._projected(x, positions)
        self.chained.append((k, v))
        return self._left(h, self._attended_chained(q, entries, positions))

    def outputs(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What is fed back and what the head reads, each `[M, Hd]`."""
        if self.reading.is_eagle1:
            return y, y
        normed = self._norm(y, "norm.weight")
        return (normed if self.variant.feeds_normed else y), normed

    def logits(self, normed: Tensor) -> Tensor:
        """`[M, Vd]`."""
        return self.variant.logit_scale * (normed @ self.head[: self.reading.geometry.draft_vocab_size].T)

    def choices(self, normed: Tensor) -> Tensor:
        """`[M]` target ids of the largest logits."""
        rows = torch.cat([self.logits(part).argmax(dim=-1) for part in torch.split(normed, LOGIT_ROWS)])
        ids = self.reading.draft_to_target
        return rows if ids is None else ids.to(rows.device)[rows]

    def likelihood(self, normed: Tensor, following: Tensor) -> Tensor:
        """`[temperatures, M]` log-probability of target ids `following: [M]`; NaN for ids outside its vocabulary."""
        rows, n = following, self.reading.geometry.draft_vocab_size
        if self.reading.draft_to_target is not None:
            ids = self.reading.draft_to_target.to(following.device)
            row_of = torch.full((max(self.reading.geometry.vocab_size, int(ids.max()) + 1),), -1, device=ids.device)
            row_of[ids] = torch.arange(len(ids), device=ids.device)
            rows = row_of[following]
        parts = zip(torch.split(normed, LOGIT_ROWS), torch.split(rows, LOGIT_ROWS), strict=True)
        made = torch.cat([self._log_shares(part, at.clamp(0, n - 1)) for part, at in parts], dim=1)
        return made.where((rows >= 0) & (rows < n), torch.nan)

    def _log_shares(self, normed: Tensor, rows: Tensor) -> Tensor:
        """`[temperatures, M]` log-probability of the logits `rows: [M]`."""
        logits = self.logits(normed)
        chosen = logits.gather(1, rows[:, None])[:, 0]
        return torch.stack([chosen / t - (logits / t).logsumexp(dim=-1) for t in TEMPERATURES])

    def _fused(self) -> Tensor:
        """`[N, Hd]` the target's states as they enter the layer."""
        text, taps = self.text, self.reading.geometry.taps
        n = len(text.boundaries) - 1
        if self.reading.is_eagle1 or self.variant.reads_last:
            return text.normed if not self.reading.normed_last else text.boundaries[n]
        read = [text.normed if i == n and self.reading.normed_last else text.boundaries[i] for i in taps]
        if self.variant.fusion_norm == "each":
            read = [self._norm(tap, f"fc_norm.{i}.weight") for i, tap in enumerate(read)]
        fused = torch.cat(read, dim=-1)
        return self._linear(
            self._norm(fused, "input_norm.weight") if self.variant.fusion_norm == "all" else fused, "fc"
        )

    def _entered(self, hidden: Tensor, tokens: Tensor, *, is_first: bool) -> tuple[Tensor, Tensor]:
        """The residual stream `[R, Hd]` and what q, k and v read, for a state and a token each."""
        e = self.embedding[tokens]
        if isinstance(self.reading.geometry, EagleGeometry):
            h = self._linear(torch.cat([e, hidden], dim=-1), "fc")
            return h, h
        normed = self._norm(hidden, "midlayer.hidden_norm.weight") if self.variant.has_hidden_norm else hidden
        x = torch.cat([self._norm(e, "midlayer.input_layernorm.weight"), normed], dim=-1)
        return (normed if self.variant.normed_residual else hidden), x

    def _projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `[H, R, D]`, k and v `[K, R, D]`, q and k rotated."""
        q, k = (self._turned_heads(x, name, positions) for name in "qk")
        return q, k, self._heads(x, "v")

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """`[heads, R, D]` of the map to q, k or v; with a norm of each head where the file has one."""
        made = self._linear(x, f"midlayer.self_attn.{name}_proj").view(len(x), -1, self.block.head_dim).transpose(0, 1)
        norm = f"midlayer.self_attn.{name}_norm.weight"
        return self._norm(made, norm) if norm in self.weights else made

    def _turned_heads(self, x: Tensor, name: str, positions: Tensor) -> Tensor:
        """The heads of q or k, rotated."""
        most = self.reading.most_positions
        at = positions.clamp(max=most - 1) if most else positions
        angles = at[:, None].float() * self.frequencies
        return _turned(self._heads(x, name), self.scale * angles.cos(), self.scale * angles.sin())

    def _attended(self, q: Tensor, starts: tuple[int, ...]) -> Tensor:
        """`[N, H * D]` of the first pass, a text and some queries at a time."""
        out = torch.empty_like(q)
        for first, end in pairwise(starts):
            for low in range(first, end, QUERY_ROWS):
                high = min(low + QUERY_ROWS, end)
                scores = self._scores(q[:, low:high], self.keys[:, first:high])
                gap = torch.arange(low, high)[:, None] - torch.arange(first, high)[None]
                seen = (gap >= 0) & (gap < (self.reading.geometry.window or high))
                scores.masked_fill_(~seen.to(scores.device), float("-inf"))
                out[:, low:high] = self._mixed(scores.softmax(dim=-1), self.values[:, first:high])
        return out.transpose(0, 1).flatten(1)

    def _attended_chained(self, q: Tensor, entries: Tensor, positions: Tensor) -> Tensor:
        """`[M, H * D]`: the first pass's keys up to each entry, then the place's own chained ones."""
        out, begin, window = torch.empty_like(q), 0, self.reading.geometry.window
        groups = q.shape[0] // self.keys.shape[0]
        own = [self._own_scores(q, k, groups) for k, _ in self.chained]  # each [H, M]
        for first, answer, end in self.text.spans():
            n = max(end - 1 - answer, 0)
            for low in range(begin, begin + n, QUERY_ROWS):
                rows = slice(low, min(low + QUERY_ROWS, begin + n))
                last = int(entries[rows][-1]) + 1
                scores = self._scores(q[:, rows], self.keys[:, first:last])
                keys_at = torch.arange(first, last, device=q.device)
                seen = keys_at[None] <= entries[rows][:, None]
                if window:
                    seen &= positions[rows][:, None] - self.positions[first:last][None] < window
                scores = scores.masked_fill(~seen, float("-inf"))
                chained = [part[:, rows, None] for part in own]  # each [H, m, 1]
                for level in range(len(own) - window if window else 0):
                    chained[level] = torch.full_like(chained[level], float("-inf"))
                shares = torch.cat([scores, *chained], dim=-1).softmax(dim=-1)
                mixed = self._mixed(shares[..., : last - first], self.values[:, first:last])
                for level, (_, v) in enumerate(self.chained):
                    value = v[:, rows].repeat_interleave(groups, dim=0)
                    mixed = mixed + shares[..., last - first + level, None] * value
                out[:, rows] = mixed
            begin += n
        return out.transpose(0, 1).flatten(1)

    def _own_scores(self, q: Tensor, k: Tensor, groups: int) -> Tensor:
        scores: Tensor = (q * k.repeat_interleave(groups, dim=0)).sum(dim=-1)
        return scores * self.score_scale

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """`[H, R, S]` of `q: [H, R, D]` and `k: [K, S, D]`."""
        grouped = q.reshape(len(k), -1, q.shape[-1])
        scores: Tensor = (grouped @ k.transpose(1, 2)).view(len(q), q.shape[1], -1)
        return scores * self.score_scale

    def _mixed(self, shares: Tensor, v: Tensor) -> Tensor:
        """`[H, R, D]` of `shares: [H, R, S]` and `v: [K, S, D]`."""
        grouped = shares.reshape(len(v), -1, shares.shape[-1])
        mixed: Tensor = (grouped @ v).view(len(shares), shares.shape[1], -1)
        return mixed

    def _left(self, residual: Tensor, attended: Tensor) -> Tensor:
        """`[R, Hd]` what leaves the layer."""
        r = residual + self._linear(attended, "midlayer.self_attn.o_proj")
        x = self._norm(r, "midlayer.post_attention_layernorm.weight")
        gate = _ACTIVATIONS[self.variant.activation](self._linear(x, "midlayer.mlp.gate_proj"))
        return r + self._linear(gate * self._linear(x, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.block.rms_norm_eps)
        return self.weights[name] * scaled


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x: [heads, R, D]` with pairs half a head apart rotated by angles `[R, D / 2]`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
