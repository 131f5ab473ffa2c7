"""A target's own text in several formats: the loss of every next token, and whether the likeliest one stays the same.

Each place is one request of the engine, the prompt up to there and a token more, whose logits are those of its head: so
whatever a format changes on the way is in it, kernels and cache included. Blocks of the cache are kept from place to
place, so that only what is new of a prompt is read. The first format is the yardstick; others are judged by differences
at the same places, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core import Engine, EngineConfig, GenerationConfig
from eagle3core.trace import RecordingTrace
from lab.acceptance.intervals import Interval, mean_interval
from lab.pairs.prompts import Prompt

# By the name that rows and figures have, the settings of the engine; the first one is what others are compared with.
FORMATS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "FP8": {"target_weights": "fp8"},
    "FP8 with its cache": {"target_weights": "fp8", "cache_dtype": "fp8"},
}
_LEAST = 8  # tokens that a place has before it: with fewer there is hardly anything to say
_BLOCK = 16  # tokens of a cache block, and rows of a pass


@dataclass(frozen=True)
class Places:
    """What one format says at the places of one prompt.

    Attributes:
        losses: nats of the token that follows, `[n]` fp32. choices: the likeliest token, `[n]` int64.
    """

    losses: Tensor
    choices: Tensor


@dataclass(frozen=True)
class FormatQuality:
    """A format beside the first.

    Attributes:
        loss: mean nats a token. change: of the loss, nats. agreement: share of places with the first one's choice.
    """

    name: str
    loss: Interval
    change: Interval
    agreement: Interval

    def row_values(self) -> dict[str, Any]:
        """What is stored."""
        return {
            **self.loss.values("held_out_loss"), **self.change.values("loss_change"),
            **self.agreement.values("top1_agreement"),
        }  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """All formats at the same places; the first is the yardstick."""

    dtype: str
    n_places: int
    n_prompts: int
    formats: tuple[FormatQuality, ...]

    @property
    def verdict(self) -> str:
        """A sentence a format."""
        first, *others = self.formats
        said = [f"The target's loss is {first.loss.mean:.4f} nats a token in {self.dtype} over {self.n_places} places."]
        for one in others:
            said.append(
                f"In {one.name} it changes by {one.change.mean:+.4f} (95% interval {one.change.low:+.4f} to "
                f"{one.change.high:+.4f}), and {one.agreement.mean:.2%} of the likeliest tokens are the same."
            )
        return " ".join(said)


def calibrate(
    target: str | Path, prompts: Sequence[Prompt], *, n_places: int, dtype: str, device: str,
    formats: Mapping[str, Mapping[str, Any]] = FORMATS,
) -> Calibration | None:  # fmt: skip
    """Loss and agreement of a target on up to `n_places` places of every prompt; None where no prompt is long enough
    for one."""
    texts = [prompt.ids for prompt in prompts if len(prompt.ids) > _LEAST]
    if not texts or n_places < 1:
        return None
    said = {}
    for name, settings in formats.items():
        engine, trace = _engine(target, max(map(len, texts)), dtype, device, settings)
        said[name] = [_places(engine, trace, ids, n_places) for ids in texts]
    first = next(iter(said.values()))
    found = tuple(_quality(name, own, first) for name, own in said.items())
    return Calibration(dtype, sum(len(places.losses) for places in first), len(texts), found)


def _engine(
    target: str | Path, longest: int, dtype: str, device: str, settings: Mapping[str, Any]
) -> tuple[Engine, RecordingTrace]:
    """An engine of one slot in a format, and the trace that keeps its logits."""
    config = EngineConfig(
        session_len=longest + 1, max_batch_size=1, block_size=_BLOCK, prefill_chunk=_BLOCK, prefix_cache=True,
        dtype=dtype, device=device, **settings,
    )  # fmt: skip
    trace = RecordingTrace()
    return Engine.from_pretrained(target, config, trace=trace), trace


def _places(engine: Engine, trace: RecordingTrace, ids: Sequence[int], n_places: int) -> Places:
    """What the engine says at evenly spaced places of a text."""
    losses, choices = [], []
    for at in _evenly(len(ids), n_places):
        trace.tensors.clear()
        engine.generate([list(ids[:at])], GenerationConfig(max_new_tokens=1, ignore_eos=True))
        logits = trace.tensors["prefill/target.head"][-1, : engine.target.geometry.vocab_size].float()
        losses.append(-torch.log_softmax(logits, dim=-1)[ids[at]])
        choices.append(logits.argmax())
    return Places(torch.stack(losses), torch.stack(choices))


def _evenly(n: int, most: int) -> list[int]:
    """Up to `most` numbers of tokens before a place, from `_LEAST` to n - 1."""
    n_all = n - _LEAST
    kept = min(most, n_all)
    return [_LEAST + i * n_all // kept for i in range(kept)]


def _quality(name: str, own: Sequence[Places], first: Sequence[Places]) -> FormatQuality:
    pairs = list(zip(own, first, strict=True))
    return FormatQuality(
        name,
        mean_interval([(float(places.losses.sum()), len(places.losses)) for places in own]),
        mean_interval([(float((a.losses - b.losses).sum()), len(a.losses)) for a, b in pairs]),
        mean_interval([(int((a.choices == b.choices).sum()), len(a.choices)) for a, b in pairs]),
    )
