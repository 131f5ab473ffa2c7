"""The text that drafts are held against: the target's own greedy answers, with all that a head could read of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from lab.acceptance.loops import looped_tokens
from lab.pairs.prompts import Prompt
from lab.parity.hf_target import TargetReference

BLOCK = 16  # neighbouring roots that say much the same


@dataclass(frozen=True, eq=False)
class Text:
    """Finished texts, one after the other: row r is a token of one of them, N rows in all.

    Attributes:
        prompts: what was continued. answers: the target's greedy continuation of each.
        starts: first row of each text, and N at the end.
        tokens: `[N]` int64.
        boundaries: `[n_layers + 1, N, H]` fp32: id i is what layer i reads, id n what the final norm reads.
        normed: `[N, H]` fp32 what leaves the final norm.
        choices: `[N]` int64 the target's greedy choice after each row.
        embedding, head: `[V, H]` fp32, the target's.
        n_target_layers: of the target.
    """

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    tokens: Tensor
    boundaries: Tensor
    normed: Tensor
    choices: Tensor
    embedding: Tensor
    head: Tensor

    @property
    def n_texts(self) -> int:
        """How many texts there are."""
        return len(self.prompts)

    def first(self, n: int) -> Text:
        """The first `n` texts alone."""
        end = self.starts[n]
        return replace(
            self, prompts=self.prompts[:n], answers=self.answers[:n], starts=self.starts[: n + 1],
            tokens=self.tokens[:end], boundaries=self.boundaries[:, :end], normed=self.normed[:end],
            choices=self.choices[:end],
        )  # fmt: skip

    def spans(self) -> list[tuple[int, int, int]]:
        """Of each text its first row, its first row of the answer, and the row behind its last."""
        ends = self.starts[1:]
        return [(a, a + len(p), b) for a, b, p in zip(self.starts, ends, self.prompts, strict=False)]

    def ends(self) -> Tensor:
        """`[M]` int64 row behind the text of each root."""
        return torch.cat([torch.full((max(end - 1 - answer, 0),), end) for _, answer, end in self.spans()])

    def roots(self) -> Tensor:
        """`[M]` int64 rows of answers that a step may begin from: those that a token of the answer follows."""
        return torch.cat([torch.arange(first, end - 1) for _, first, end in self.spans()])

    def groups(self) -> Tensor:
        """`[M]` int64 by root: a number, from 0, for each piece of evidence that stands for itself.

        Neighbours are no independent places, so a group is a block of them. A loop says the same wherever it runs: all
        its blocks, of every text that ends in it, are one group.
        """
        names, n_fresh = list[Hashable](), 0
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            follows = answer[1:]  # the token behind each root
            for is_loop, run in groupby(
                zip(looped_tokens(prompt, answer)[1:], follows, strict=True), key=itemgetter(0)
            ):
                tokens = [token for _, token in run]
                if is_loop:
                    names += _loop_names(tokens)
                else:
                    names += [(n_fresh + i) // BLOCK for i in range(len(tokens))]
                    n_fresh += len(tokens)
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return torch.tensor([numbers[name] for name in names], dtype=torch.int64)

    def only(self, texts: Sequence[int]) -> Text:
        """Some of the texts, in the order given."""
        spans = [self.spans()[i] for i in texts]
        rows = torch.cat([torch.arange(begin, end) for begin, _, end in spans]).to(self.tokens.device)
        starts = (0, *accumulate(end - begin for begin, _, end in spans))
        return replace(
            self, prompts=tuple(self.prompts[i] for i in texts), answers=tuple(self.answers[i] for i in texts),
            starts=starts, tokens=self.tokens[rows], boundaries=self.boundaries[:, rows], normed=self.normed[rows],
            choices=self.choices[rows],
        )  # fmt: skip


def _loop_names(tokens: Sequence[int]) -> list[Hashable]:
    """A name for each token of a loop: that of its block, which is what tokens are in it."""
    n_blocks = max(1, len(tokens) // BLOCK)
    borders = [i * len(tokens) // n_blocks for i in range(n_blocks + 1)]
    return [frozenset(tokens[low:high]) for low, high in pairwise(borders) for _ in range(low, high)]


@torch.no_grad()
def read_text(target: Path, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], device: torch.device) -> Text:
    """One pass of the target, as Hugging Face computes it in fp32, over prompts with their answers.

    Rows of a text depend on that text alone.
    """
    reference = TargetReference(
        target, dtype=torch.float32, compute_dtype=torch.float32, device=device, attention="sdpa"
    )
    boundaries, normed, choices, starts = list[Tensor](), list[Tensor](), list[Tensor](), [0]
    sequences = [[*prompt.ids, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    for sequence in sequences:
        stages = reference.run(sequence)
        n = reference.n_layers
        boundaries.append(torch.stack([reference.taps(stages, [i]) for i in range(n + 1)]))
        normed.append(stages["norm"])
        choices.append(stages["head"].argmax(dim=-1))
        starts.append(starts[-1] + len(sequence))
    model = reference.model
    return Text(
        prompts=tuple(prompt.ids for prompt in prompts),
        answers=tuple(tuple(answer) for answer in answers),
        starts=tuple(starts),
        tokens=torch.tensor([token for sequence in sequences for token in sequence], device=device),
        boundaries=torch.cat(boundaries, dim=1),
        normed=torch.cat(normed),
        choices=torch.cat(choices),
        embedding=model.model.embed_tokens.weight.detach(),
        head=model.lm_head.weight.detach(),
    )
