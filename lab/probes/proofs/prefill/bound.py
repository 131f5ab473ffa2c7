"""What reading prompts takes at least: operations of every token, and one look at every weight. Derived here."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3core.checkpoint import target_shapes
from eagle3core.geometry import TargetGeometry
from lab.probes.bench.floors import token_bytes, weight_bytes


@dataclass(frozen=True)
class ReadingBound:
    """Of prompts that are read together; the draft's share, which needs keys and values only, is left out.

    Attributes:
        flops: products of the layers' maps over all tokens, attention over the keys a token sees, and the head for each
            prompt's last token. n_bytes: weights but the token table once, keys and values written once.
    """

    flops: int
    n_bytes: int

    def ms(self, tflop_per_s: float, gb_per_s: float) -> float:
        """The longer of both, milliseconds."""
        return max(self.flops / tflop_per_s / 1e9, self.n_bytes / gb_per_s / 1e6)


def reading_bound(target: TargetGeometry, n_prompts: int, n_tokens: int, itemsize: int) -> ReadingBound:
    """The bound of `n_prompts` prompts of `n_tokens` each, no layer with experts or a window."""
    block, maps = target.block, 0
    for name, shape in target_shapes(target):
        is_map = len(shape) == 2 and "embed_tokens" not in name and "lm_head" not in name
        maps += shape[0] * shape[1] if is_map else 0
    table = target.vocab_size * block.hidden_size
    seen = n_tokens * (n_tokens + 1) // 2
    attention = 4 * target.n_layers * block.n_heads * block.head_dim * seen
    flops = n_prompts * (2 * maps * n_tokens + attention + 2 * table)
    left_out = 0 if target.tie_word_embeddings else table * itemsize
    cached = n_prompts * n_tokens * token_bytes(block, target.n_layers, itemsize)
    return ReadingBound(flops, weight_bytes(target, itemsize) - left_out + cached)
