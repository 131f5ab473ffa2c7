"""What each format can hold: the features that its own readers obey. What they do not is listed, never lost in silence.

Rows follow the readers' code: SafeAILab/EAGLE; SpecForge and SGLang; ModelOpt with TensorRT-LLM and vLLM; speculators
and vLLM; a TurboMind directory; llama.cpp (docs/checkpoints.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from eagle3core.checkpoint.containers.gguf import decimal
from eagle3core.checkpoint.plan import EMBEDDING, HEAD
from eagle3core.checkpoint.writing.head import Head
from eagle3core.errors import CheckpointError
from eagle3core.geometry import DraftGeometry, HeadVariant, RopeGeometry


@dataclass(frozen=True)
class Feature:
    """Something a head may have and a format may lack.

    Attributes:
        says: what it is. has: whether a head has it. without: the shapes of the head without it; None where none is.
        tensors: prefixes and endings of the names that go with it.
    """

    says: str
    has: Callable[[Head], bool]
    without: Callable[[DraftGeometry], DraftGeometry] | None = None
    tensors: tuple[str, ...] = ()


def _plain(**changes: object) -> Callable[[DraftGeometry], DraftGeometry]:
    return lambda geometry: replace(geometry, variant=replace(geometry.variant, **changes))  # type: ignore[arg-type]


FEATURES = {
    "tap_count": Feature("another number of taps than 3",
                         lambda h: not _variant(h).reads_last and len(h.geometry.taps) != 3),
    "last_state": Feature("the target's last state in the place of taps", lambda h: _variant(h).reads_last),
    "taps": Feature("taps that are not the usual ones", lambda h: h.taps_known and not _variant(h).reads_last),
    "norm_before_residual": Feature("a normed residual", lambda h: _variant(h).normed_residual,
                                    _plain(normed_residual=False)),
    "norm_before_fc": Feature("a norm over all taps", lambda h: _variant(h).fusion_norm == "all",
                              _plain(fusion_norm="none"), ("input_norm.",)),
    "fc_norm": Feature("a norm of each tap", lambda h: _variant(h).fusion_norm == "each",
                       _plain(fusion_norm="none"), ("fc_norm.",)),
    "norm_output": Feature("a normed feedback", lambda h: _variant(h).feeds_normed, _plain(feeds_normed=False)),
    "window": Feature("a window of attention", lambda h: h.geometry.window > 0, lambda g: replace(g, window=0)),
    "attention_bias": Feature("biases of attention", lambda h: _variant(h).qkv_bias,
                              _plain(qkv_bias=False, output_bias=False), ("midlayer.self_attn.*.bias",)),
    "mlp_bias": Feature("biases of the feed-forward", lambda h: _variant(h).mlp_bias,
                        _plain(mlp_bias=False), ("midlayer.mlp.*.bias",)),
    "fc_bias": Feature("a bias of fc", lambda h: _variant(h).fc_bias, _plain(fc_bias=False), ("fc.bias",)),
    "hidden_act": Feature("another activation than silu", lambda h: _variant(h).activation != "silu",
                          _plain(activation="silu")),
    "logit_scale": Feature("a factor of the logits", lambda h: _variant(h).logit_scale != 1.0, _plain(logit_scale=1.0)),
    "rope_scaling": Feature("a rotary scaling", lambda h: h.geometry.block.rope.kind != "default",
                            lambda g: _with_rope(g, RopeGeometry(theta=g.block.rope.theta))),
    "precision": Feature("numbers that 32 bits do not hold", lambda h: rounded(h.geometry) != h.geometry,
                         lambda g: rounded(g)),
}  # fmt: skip
_ALL = frozenset(FEATURES)


@dataclass(frozen=True)
class Form:
    """A format.

    Attributes:
        holds: features that its readers obey. ropes: rotary settings that they obey.
        tables: which of the two tables every file of it brings. names_taps: whether it has to name them.
        is_16_bit: whether its values have 16 bits, all alike.
    """

    holds: frozenset[str]
    ropes: Callable[[RopeGeometry], bool] = lambda rope: True
    tables: tuple[str, ...] = ()
    names_taps: bool = False
    is_16_bit: bool = False


FORMS = {
    "safeailab": Form(
        frozenset({"hidden_act", "precision"}), tables=(HEAD,),
        ropes=lambda rope: rope.kind == "default" or (rope.kind in ("linear", "dynamic") and rope.theta == 10000.0),
    ),
    "specforge": Form(_ALL - {
        "tap_count", "norm_before_residual", "norm_output", "window", "attention_bias", "mlp_bias", "logit_scale"}),
    "modelopt": Form(_ALL - {"mlp_bias"}),
    "speculators": Form(_ALL - {"last_state", "fc_bias"}, tables=(EMBEDDING, HEAD)),
    "turbomind": Form(
        frozenset({"taps", "tap_count", "precision"}), tables=(EMBEDDING, HEAD), names_taps=True, is_16_bit=True,
        ropes=lambda rope: rope.kind == "default",
    ),
    "gguf": Form(
        frozenset({"taps", "tap_count", "norm_before_residual", "fc_norm", "norm_output"}), names_taps=True,
        ropes=lambda rope: rope.kind in ("default", "linear", "llama3")
        or (rope.kind == "yarn" and rope.attention_factor is None and rope.truncate),
    ),
}  # fmt: skip


def losses(head: Head, form: Form, usual_taps: tuple[int, ...]) -> list[str]:
    """Names of the features of a head that a format cannot hold."""
    lost = []
    for name, feature in FEATURES.items():
        if name == "rope_scaling":
            is_lost = not form.ropes(head.geometry.block.rope)
        else:
            is_lost = name not in form.holds and feature.has(head)
        if name == "taps" and head.geometry.taps == usual_taps:
            continue
        if is_lost:
            lost.append(name)
    return lost


def without(head: Head, name: str, usual_taps: tuple[int, ...]) -> Head:
    """The head without a feature.

    Raises:
        CheckpointError: no head is left without it.
    """
    feature = FEATURES[name]
    if name == "taps":
        return replace(head, geometry=replace(head.geometry, taps=usual_taps), taps_known=False)
    if feature.without is None:
        raise CheckpointError(
            f"the head has {feature.says}", "a format that holds it: without it no head is left", "choose another --to"
        )
    kept = {n: t for n, t in head.weights.items() if not any(_matches(n, pattern) for pattern in feature.tensors)}
    return replace(head, geometry=feature.without(head.geometry), weights=kept)


def rounded(geometry: DraftGeometry) -> DraftGeometry:
    """The shapes with every number as 32 bits hold it."""
    rope, block = geometry.block.rope, geometry.block
    rope = replace(
        rope, theta=decimal(rope.theta), factor=decimal(rope.factor), low_freq_factor=decimal(rope.low_freq_factor),
        high_freq_factor=decimal(rope.high_freq_factor), beta_fast=decimal(rope.beta_fast),
        beta_slow=decimal(rope.beta_slow),
    )  # fmt: skip
    return replace(geometry, block=replace(block, rms_norm_eps=decimal(block.rms_norm_eps), rope=rope))


def _with_rope(geometry: DraftGeometry, rope: RopeGeometry) -> DraftGeometry:
    return replace(geometry, block=replace(geometry.block, rope=rope))


def _variant(head: Head) -> HeadVariant:
    return head.geometry.variant


def _matches(name: str, pattern: str) -> bool:
    start, _, end = pattern.partition("*")
    return name.startswith(start) and name.endswith(end)
