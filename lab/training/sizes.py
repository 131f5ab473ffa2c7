"""The sizes a pair comes in: geometry, and how long each stage trains.

Every target has 8 layers, so that the three default taps (inputs of 2, n//2 and n-3) are distinct
(docs/requirements.md, target geometry), and heads of 64.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass

from lab.errors import ExperimentError
from lab.options.training import TrainOptions


@dataclass(frozen=True)
class StageSize:
    """How one stage trains.

    Attributes:
        steps: optimiser steps, at most (a time limit can end it sooner).
        batch: sequences a step.
        window: tokens a sequence.
        peak_lr: highest learning rate, reached after the warm-up and brought to zero by a cosine.
        weight_decay: AdamW's, on matrices only.
    """

    steps: int
    batch: int
    window: int
    peak_lr: float
    weight_decay: float


@dataclass(frozen=True)
class PairSize:
    """Geometry of a target and its draft, and the work that trains them.

    Attributes:
        vocab: entries of the byte-level BPE.
        draft_vocab: entries of the draft's own vocabulary.
        hidden, layers, heads, kv_heads, head_dim, ffn: the target; the draft shares all but its `draft_ffn`.
        max_position: longest sequence written into both configs.
        dropout: on embedding, attention output and MLP output of the target while it trains.
        ttt_steps: chained steps the draft is trained on (training-time test).
        validation_tokens: of the validation text, how many the target is validated on.
        sequences: greedy sequences the target writes for the draft, `generation_batch` at a time.
    """

    name: str
    vocab: int
    draft_vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    draft_ffn: int
    max_position: int
    dropout: float
    ttt_steps: int
    validation_tokens: int
    sequences: int
    generation_batch: int
    target: StageSize
    draft: StageSize


SIZES = {
    size.name: size
    for size in (
        # 6.5 M and 1.4 M parameters: 15.2 MiB in bf16, for one data-centre GPU and about 8 minutes.
        PairSize(
            name="shipped",
            vocab=4096,
            draft_vocab=1024,
            hidden=256,
            layers=8,
            heads=4,
            kv_heads=2,
            head_dim=64,
            ffn=640,
            draft_ffn=768,
            max_position=2048,
            dropout=0.15,
            ttt_steps=5,
            validation_tokens=65536,
            sequences=40960,
            generation_batch=4096,
            target=StageSize(steps=4000, batch=128, window=512, peak_lr=2e-3, weight_decay=0.1),
            draft=StageSize(steps=3000, batch=128, window=320, peak_lr=1.5e-3, weight_decay=0.01),
        ),
        # 0.6 M parameters and a draft of 0.2 M: both from scratch on one CPU thread in under four minutes.
        PairSize(
            name="nano",
            vocab=2048,
            draft_vocab=512,
            hidden=64,
            layers=8,
            heads=2,
            kv_heads=1,
            head_dim=64,
            ffn=192,
            draft_ffn=192,
            max_position=2048,
            dropout=0.0,
            ttt_steps=3,
            validation_tokens=8192,
            sequences=256,
            generation_batch=128,
            target=StageSize(steps=1400, batch=8, window=64, peak_lr=6e-3, weight_decay=0.1),
            draft=StageSize(steps=250, batch=8, window=96, peak_lr=4e-3, weight_decay=0.01),
        ),
        # Seconds, for tests of the machinery: what it learns says nothing.
        PairSize(
            name="tiny",
            vocab=512,
            draft_vocab=128,
            hidden=64,
            layers=8,
            heads=1,
            kv_heads=1,
            head_dim=64,
            ffn=64,
            draft_ffn=64,
            max_position=2048,
            dropout=0.05,
            ttt_steps=3,
            validation_tokens=2048,
            sequences=16,
            generation_batch=16,
            target=StageSize(steps=30, batch=8, window=64, peak_lr=4e-3, weight_decay=0.1),
            draft=StageSize(steps=20, batch=8, window=64, peak_lr=4e-3, weight_decay=0.01),
        ),
    )
}


def find_size(name: str) -> PairSize:
    """The size of that name.

    Raises:
        ExperimentError: there is none.
    """
    if name in SIZES:
        return SIZES[name]
    close = difflib.get_close_matches(name, SIZES, 1)
    raise ExperimentError(
        f"no pair size {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""),
        ", ".join(SIZES),
        "give one of these to --size",
    )


def resolved_size(options: TrainOptions) -> PairSize:
    """The size that was named, with the options' own steps and dropout.

    Raises:
        ExperimentError: no size has that name.
    """
    described = asdict(find_size(options.size))
    if options.dropout is not None:
        described["dropout"] = options.dropout
    for stage, steps in (("target", options.target_steps), ("draft", options.draft_steps)):
        described[stage] = StageSize(**{**described[stage], **({} if steps is None else {"steps": steps})})
    return PairSize(**described)
