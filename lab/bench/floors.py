"""The bytes a decode step cannot avoid, and what follows from them: floors, and limits of a speed-up.

A step reads every weight but the token table once, and the whole cache; a draft pass reads the head's layer, its output
head and its cache, the first one fc as well. Activations and logits (megabytes) are left out. Derived here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Size

from eagle3core.checkpoint.draft import draft_shapes
from eagle3core.checkpoint.target import target_shapes
from eagle3core.geometry import BlockGeometry, DraftGeometry, TargetGeometry

H200_GB_PER_S = 4578.0  # best read-only reduction over 4 GiB seen on an H200 (docs/log.md): the ceiling of its floors


@dataclass(frozen=True)
class Floor:
    """Necessary bytes of one step over a batch.

    Attributes:
        base_bytes: a plain step; a verify pass reads the same.
        draft_bytes: all draft passes of a speculative step; 0 without a draft.
    """

    base_bytes: int
    draft_bytes: int

    @property
    def step_bytes(self) -> int:
        """A whole step."""
        return self.base_bytes + self.draft_bytes

    @property
    def step_over_base(self) -> float:
        """Least ratio of a step to a plain step of the same efficiency."""
        return self.step_bytes / self.base_bytes

    def ms(self, gb_per_s: float) -> float:
        """Least time of a step at a read ceiling, milliseconds."""
        return self.step_bytes / gb_per_s / 1e6

    def largest_speedup(self, length: float) -> float:
        """What `length` committed tokens a step can bring at most."""
        return length / self.step_over_base


def step_floor(
    target: TargetGeometry, draft: DraftGeometry | None, *, k: int, batch: int, cached: float, itemsize: int
) -> Floor:
    """The floor of a step with `k` draft passes (0: plain) and `cached` tokens a sequence in the cache."""
    sequences = batch * cached
    base = weight_bytes(target, itemsize) - table_bytes(target, itemsize)
    base += int(sequences * token_bytes(target.block, target.n_layers, itemsize))
    if k == 0 or draft is None:
        return Floor(base, 0)
    fusion = draft.block.hidden_size * len(draft.taps) * draft.target_hidden_size * itemsize
    later = draft_weight_bytes(draft, itemsize) - fusion + int(sequences * token_bytes(draft.block, 1, itemsize))
    if draft.has_embedding:
        later -= draft.vocab_size * draft.block.hidden_size * itemsize
    return Floor(base, fusion + k * later)


def weight_bytes(target: TargetGeometry, itemsize: int) -> int:
    """All weights of a target."""
    return sum(Size(shape).numel() for _, shape in target_shapes(target)) * itemsize


def table_bytes(target: TargetGeometry, itemsize: int) -> int:
    """The token table, of which a step reads a row a token; 0 where it is the output head as well."""
    return 0 if target.tie_word_embeddings else target.vocab_size * target.block.hidden_size * itemsize


def draft_weight_bytes(draft: DraftGeometry, itemsize: int) -> int:
    """All weights of a draft; a head shared with the target is read by it all the same."""
    own = sum(Size(shape).numel() for _, shape in draft_shapes(draft)) * itemsize
    return own if draft.has_head else own + draft.draft_vocab_size * draft.block.hidden_size * itemsize


def token_bytes(block: BlockGeometry, n_layers: int, itemsize: int) -> int:
    """Cached keys and values of one token."""
    return 2 * n_layers * block.n_kv_heads * block.head_dim * itemsize
