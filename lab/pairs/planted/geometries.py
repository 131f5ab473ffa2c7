"""Shapes a pair can be planted in, and what a shape must have room for.

Source: the published config.json files of the models named; the limits are derived here.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

from eagle3core.geometry import BlockGeometry, DraftGeometry, RopeGeometry, TargetGeometry
from lab.errors import ExperimentError

# Of the newest token's vote: what the best of all wrong rows may reach before a wrong row wins now and then.
MOST_CROSSTALK = 0.6
# Of the right logit: what the best of all wrong logits may reach, given what the layers add to the stream.
MOST_NOISE = 0.7
LEAST_HEAD_DIM = 32  # below it a random key of a long context can outweigh a token's own


@dataclass(frozen=True)
class PlantedGeometry:
    """A target's and a draft's shapes.

    Raises:
        ExperimentError: the shapes do not fit together, or are too narrow for their vocabulary to be told apart.
    """

    name: str
    target: TargetGeometry
    draft: DraftGeometry

    def __post_init__(self) -> None:
        target, draft = self.target, self.draft
        if target.tie_word_embeddings or draft.has_embedding or not draft.has_head:
            raise self._refused(
                "tied embeddings, an own table of the draft or no own head",
                "an untied target whose table the draft shares, and a draft with its own head",
                "set tie_word_embeddings and has_embedding to False, has_head to True",
            )
        widths = (draft.block.hidden_size, draft.target_hidden_size, draft.vocab_size)
        if widths != (target.block.hidden_size, target.block.hidden_size, target.vocab_size):
            raise self._refused(
                f"draft widths (hidden, target hidden, vocabulary) {widths}",
                f"the target's {target.block.hidden_size}, {target.block.hidden_size} and {target.vocab_size}",
                "give the draft the target's hidden size and vocabulary",
            )
        if not 2 <= draft.draft_vocab_size <= target.vocab_size:
            raise self._refused(
                f"draft_vocab_size {draft.draft_vocab_size}", f"2 to {target.vocab_size}", "change draft_vocab_size"
            )
        if not draft.taps or max(draft.taps) > target.n_layers:
            raise self._refused(f"taps {draft.taps}", f"ids of 0 to {target.n_layers}", "change the taps")
        self._check_room()

    @property
    def value_width(self) -> int:
        """K * D of the draft: the width in which a token is told from all others."""
        return self.draft.block.n_kv_heads * self.draft.block.head_dim

    @property
    def n_weights(self) -> int:
        """Weights of the target's matrices: its layers, its table and its head."""
        target, block = self.target, self.target.block
        heads = (2 * block.n_heads + 2 * block.n_kv_heads) * block.head_dim  # rows of q, k, v, and columns of o
        layer = block.hidden_size * (heads + 3 * block.intermediate_size)
        return target.n_layers * layer + 2 * target.vocab_size * block.hidden_size

    @property
    def n_preimages(self) -> int:
        """Tokens that are followed by one and the same token, at most."""
        return math.ceil(self.target.vocab_size / self.draft.draft_vocab_size)

    @property
    def crosstalk(self) -> float:
        """Expected best vote for a wrong row of the draft's head, relative to the right one's."""
        return 1.25 * math.sqrt(2 * math.log(self.draft.draft_vocab_size) / self.value_width)

    @property
    def noise(self) -> float:
        """Expected best wrong logit of the target, relative to the right one's."""
        n_rows, hidden = self.target.vocab_size, self.target.block.hidden_size
        return 1.15 * math.sqrt(self.n_preimages * 2 * math.log(n_rows) / hidden)

    def _check_room(self) -> None:
        block = self.draft.block
        if self.value_width > block.hidden_size or block.head_dim < LEAST_HEAD_DIM:
            raise self._refused(
                f"{block.n_kv_heads} key heads of {block.head_dim} in the draft",
                f"heads of at least {LEAST_HEAD_DIM}, together at most hidden_size {block.hidden_size}",
                "change the draft's heads",
            )
        if self.crosstalk > MOST_CROSSTALK:
            raise self._refused(
                f"{self.draft.draft_vocab_size} draft tokens in values of width {self.value_width}: expected "
                f"cross-talk {self.crosstalk:.2f} of the right vote",
                f"at most {MOST_CROSSTALK}",
                "use more or wider key heads in the draft, or a smaller draft vocabulary",
            )
        if self.noise > MOST_NOISE:
            raise self._refused(
                f"hidden size {self.target.block.hidden_size} with {self.n_preimages} tokens a successor: the best "
                f"wrong logit is expected at {self.noise:.2f} of the right one",
                f"at most {MOST_NOISE}",
                "use a wider target, or a draft vocabulary closer to the target's",
            )

    def _refused(self, what: str, allowed: str, remedy: str) -> ExperimentError:
        return ExperimentError(f"planted geometry {self.name!r} has {what}", allowed, remedy)


def _geometry(
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    draft_vocab: int,
    taps: tuple[int, ...],
    draft_ffn: int | None = None,
    max_position: int = 131072,
    rope: RopeGeometry | None = None,
    eps: float = 1e-5,
    qk_norm: bool = False,
) -> PlantedGeometry:
    """A target and a head of one layer as wide as the target's."""
    rope = rope or RopeGeometry()
    block = BlockGeometry(hidden, ffn, heads, kv_heads, head_dim, eps, rope, qk_norm)
    own = BlockGeometry(hidden, draft_ffn or ffn, heads, kv_heads, head_dim, eps, RopeGeometry(rope.theta))
    target = TargetGeometry(block, layers, vocab, max_position)
    return PlantedGeometry(name, target, DraftGeometry(own, hidden, vocab, draft_vocab, taps, False, True))


_LLAMA_31 = RopeGeometry(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
_LLAMA_32 = RopeGeometry(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
_QWEN3: dict[str, Any] = {
    "kv_heads": 8, "head_dim": 128, "vocab": 151936, "draft_vocab": 32000, "max_position": 40960, "eps": 1e-6,
    "rope": RopeGeometry(1e6), "qk_norm": True,
}  # fmt: skip

GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        _geometry(
            "llama-3.1-8b", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
            draft_vocab=32000, taps=(2, 16, 29), rope=_LLAMA_31,
        ),
        _geometry(
            "llama-3.1-70b", hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256,
            draft_vocab=32000, taps=(2, 40, 77), rope=_LLAMA_31,
        ),
        # But for their tied tables, as below: a step reads as many bytes either way.
        _geometry(
            "llama-3.2-1b", hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256,
            draft_vocab=32000, taps=(2, 8, 13), rope=_LLAMA_32,
        ),
        _geometry(
            "llama-3.2-3b", hidden=3072, layers=28, heads=24, kv_heads=8, head_dim=128, ffn=8192, vocab=128256,
            draft_vocab=32000, taps=(2, 14, 25), rope=_LLAMA_32,
        ),
        _geometry("qwen3-8b", hidden=4096, layers=36, heads=32, ffn=12288, taps=(2, 18, 33), **_QWEN3),
        _geometry("qwen3-4b", hidden=2560, layers=36, heads=32, ffn=9728, taps=(2, 18, 33), **_QWEN3),
        # The shapes of the pair in lab/pairs/shipped, but for its tied table: a tied one has no room for a map.
        _geometry(
            "shipped", hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, ffn=640, draft_ffn=768, vocab=4096,
            draft_vocab=1024, taps=(2, 4, 5), max_position=2048,
        ),
        # For a CPU: a cycle long enough to count acceptance on, layers few enough for thousands of steps.
        _geometry(
            "nano", hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, ffn=320, vocab=6144, draft_vocab=4096,
            taps=(0, 1, 2), max_position=16384,
        ),
    )
}  # fmt: skip


def find_geometry(name: str) -> PlantedGeometry:
    """The geometry of that name.

    Raises:
        ExperimentError: there is none.
    """
    if name in GEOMETRIES:
        return GEOMETRIES[name]
    close = difflib.get_close_matches(name, GEOMETRIES, 1)
    raise ExperimentError(
        f"no geometry {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""),
        ", ".join(GEOMETRIES),
        "name one of these",
    )
