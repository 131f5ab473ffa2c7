"""What shapes a pair can be planted in must have room for; the limits are derived here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle3core.checkpoint import target_shapes
from eagle3core.geometry import DraftGeometry, TargetGeometry
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
        """Weights of the target's matrices: its layers, its table and its head; of those in 4 bits two a byte."""
        matrices = [(name, math.prod(shape)) for name, shape in target_shapes(self.target) if len(shape) > 1]
        return sum(2 * n if name.endswith("_blocks") else n for name, n in matrices if not name.endswith("_scales"))

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
