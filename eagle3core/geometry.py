"""Shapes of a target and of a draft, as read from a checkpoint and used by the models.

Filled by `eagle3core.checkpoint`; nothing here touches the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

RopeKind = Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn"]
FusionNorm = Literal["none", "all", "each"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ExpertGate = Literal["silu", "clamped"]


@dataclass(frozen=True)
class RopeGeometry:
    """Rotary position embedding parameters (RoFormer, arXiv 2104.09864; scalings as the HF config keys name them).

    Attributes:
        theta: base of the frequencies.
        kind: how the frequencies are stretched.
        factor: stretch (linear, dynamic, llama3, yarn).
        low_freq_factor, high_freq_factor: band limits (llama3).
        original_max_position: trained context, tokens (dynamic, llama3, longrope, yarn).
        beta_fast, beta_slow: ramp limits in rotations (yarn).
        attention_factor: multiplier of cos and sin (yarn, longrope); None means 0.1 * ln(factor) + 1 (yarn).
        truncate: floor and ceil the ramp limits (yarn).
        short_factors, long_factors: divisors of the frequencies in sessions up to the trained context, and in longer
            ones, a value a rotated pair (longrope).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ExpertsGeometry:
    """Feed-forwards of one layer, of which a router chooses some for every row.

    Attributes:
        n: experts of a layer. n_chosen: of these, for each row.
        intermediate_size: F of each.
        is_normalised: a row's shares are a softmax over its chosen experts alone, else over all experts.
        gate: "silu" for silu(gate) * up; "clamped" for gpt-oss's, whose gate and up rows alternate, and whose router
            and maps have biases.
        is_mxfp4: both maps are stored, and kept, in 4 bits: `kernels.experts.mxfp4`.
    """

    n: int
    n_chosen: int
    intermediate_size: int
    is_normalised: bool = True
    gate: ExpertGate = "silu"
    is_mxfp4: bool = False

    def n_read(self, rows: int, *, batch: int = 1, repeated: float = 0.0) -> float:
        """Distinct experts that `rows` rows of each of `batch` sequences choose on average: what a pass has to read.

        `repeated`: chance that a row takes the experts of the row before it in its sequence; else, and at first, any
        experts are alike likely.
        """
        share = self.n_chosen / self.n
        missed = (1.0 - share) * (1.0 - share * (1.0 - repeated)) ** (rows - 1)
        return self.n * (1.0 - missed**batch)


@dataclass(frozen=True)
class BlockGeometry:
    """Widths of one decoder layer: E hidden, F feed-forward, H and K heads, D head size.

    Attributes:
        has_qk_norm: every head of q and k is normed over D before it is rotated, as in Qwen3.
        experts: in the place of one feed-forward; None: there is that one.
        has_sinks: every head has a learned logit that takes part in the denominator of its attention alone.
    """

    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeGeometry
    has_qk_norm: bool = False
    experts: ExpertsGeometry | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class TargetGeometry:
    """A target: Llama's architecture, or what differs from it by the flags here and of its block.

    Attributes:
        attention_bias: q, k, v and the output map have biases. qkv_bias: q, k and v alone, as in Qwen2.
        dense_layers: layers that have one feed-forward where the others have experts.
        windows: of each layer, the positions back that it sees, the query's own included, 0 for all; empty: all see
            all.
    """

    block: BlockGeometry
    n_layers: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dense_layers: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()

    def block_of(self, layer: int) -> BlockGeometry:
        """The widths of one layer: those of all, without experts where it has none."""
        return replace(self.block, experts=None) if layer in self.dense_layers else self.block

    def window_of(self, layer: int) -> int:
        """Positions back that a layer sees, the query's own included; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def n_expert_layers(self) -> int:
        """Layers with experts."""
        return self.n_layers - len(self.dense_layers) if self.block.experts is not None else 0

    @property
    def default_taps(self) -> tuple[int, int, int]:
        """The three layer inputs every EAGLE-3 code base reads by default (arXiv 2503.01840, section 3)."""
        return (2, self.n_layers // 2, self.n_layers - 3)


@dataclass(frozen=True)
class HeadVariant:
    """Where a head's forward pass departs from plain EAGLE-3; the defaults are the plain one (docs/checkpoints.md).

    Attributes:
        fusion_norm: of the taps before `fc`: none, one norm over all of them side by side, or one for each.
        normed_residual: the layer's residual is the normed input, not the input itself.
        feeds_normed: the next level is fed the output after the final norm, not before.
        reads_last: no taps and no `fc`: the input is the target's last state after the target's final norm.
        has_hidden_norm: False only beside `reads_last`: attention reads that state without a norm of its own.
        qkv_bias, output_bias, mlp_bias, fc_bias: which maps have biases.
        activation: of the feed-forward.
        logit_scale: factor of the logits.
        tied_head: the head is the head's own embedding.
    """

    fusion_norm: FusionNorm = "none"
    normed_residual: bool = False
    feeds_normed: bool = False
    reads_last: bool = False
    has_hidden_norm: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    activation: Activation = "silu"
    logit_scale: float = 1.0
    tied_head: bool = False


@dataclass(frozen=True)
class Decision:
    """What a checkpoint was read as where its files leave room, with the evidence.

    Attributes:
        about: the question, e.g. "taps".
        answer: the reading taken. evidence: why.
        other: the reading not taken, where nothing in the files rules it out; empty where something does.
    """

    about: str
    answer: str
    evidence: str
    other: str = ""

    @property
    def line(self) -> str:
        """The decision for people."""
        rest = f"; nothing rules out {self.other}" if self.other else ""
        return f"{self.about}: {self.answer}, since {self.evidence}{rest}"


PLAIN = HeadVariant()


@dataclass(frozen=True)
class DraftGeometry:
    """An EAGLE-3 draft head.

    Attributes:
        block: its one decoder layer; q, k and v read 2 * hidden_size.
        target_hidden_size: width of one tap.
        vocab_size: the target's vocabulary, which embeddings are indexed by.
        draft_vocab_size: width of the draft's own logits.
        taps: ids of the target layers whose **input** residual stream is read, ascending; id n is the output of the
            last layer, before the final norm.
        has_embedding: the checkpoint brings its own token table; else the target's is shared.
        has_head: the checkpoint brings its own output head; else the target's is shared.
        window: positions back that its layer sees, the query's own included; 0: all.
        variant: where its forward pass departs from plain EAGLE-3.
        decisions: how its files were read where they leave room; no part of what makes two heads equal.
    """

    block: BlockGeometry
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    window: int = 0
    variant: HeadVariant = PLAIN
    decisions: tuple[Decision, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class EagleGeometry(DraftGeometry):
    """An EAGLE-1 or EAGLE-2 head: `fc` joins a token's embedding with the state before it for q, k and v.

    Its one tap is n, which the target's final norm turns into the state that is read; `draft_vocab_size` and the head
    are the target's, and it has no variants. Source: EAGLE, arXiv 2401.15077, section 3.

    Attributes:
        fc_bias, qkv_bias: biases that the checkpoint brings.
    """

    fc_bias: bool = False
    qkv_bias: bool = False


class CacheScales(NamedTuple):
    """What a layer's keys and values are divided by in a cache of FP8."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = CacheScales()  # of checkpoints that bring none
DrafterGeometry = DraftGeometry | TargetGeometry  # of a head, or of a small model that drafts
