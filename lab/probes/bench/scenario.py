"""What is measured: a geometry, a context, a batch, depths of speculation, a pair.

Names after docs/requirements.md R-127, e.g. `Speculative_Single_Context32K_3tokens`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lab.errors import ExperimentError

MOST_DRAFTS = 7
CACHE_SHARE = 0.95  # of the free memory, for both KV caches, unless a scenario is about just that
PAIRS = ("planted", "shipped")
PEERS = ("plain-torch", "hf-static")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Point:
    """Requests decoded together, each after a prompt of `context` tokens."""

    context: int
    batch: int

    def __str__(self) -> str:
        return f"{self.context}x{self.batch}"

    def name(self, k: int) -> str:
        """The scenario's name at `k` drafts a step."""
        width = "Single" if self.batch == 1 else f"Batch{self.batch}"
        thousands = self.context % 1024 == 0
        context = f"Context{self.context // 1024}K" if thousands else f"Context{self.context}"
        return f"Speculative_{width}_{context}_{k}tokens" if k else f"Baseline_{width}_{context}"


@dataclass(frozen=True)
class Scenario:
    """One call of the bench.

    Attributes:
        geometry: name of known shapes; "shipped" with the shipped pair.
        pair: "planted", or "shipped" for the trained one.
        points: contexts and batches.
        ks: depths, 0 (plain decoding) first.
        share: dial of a planted pair.
        tokens: generated a request and round.
        rounds, warmup: measured rounds, and rounds before them.
        dtype, device: of weights, caches and arithmetic.
        peers: what is timed beside the engine.
        seed: of a planted pair's weights and of prompts.
        cache_share: of the free memory, for both KV caches.
    """

    geometry: str
    pair: str
    points: tuple[Point, ...]
    ks: tuple[int, ...]
    share: float
    tokens: int = 256
    rounds: int = 5
    warmup: int = 1
    dtype: str = "bfloat16"
    device: str = "cpu"
    peers: tuple[str, ...] = PEERS
    seed: int = 0
    cache_share: float = CACHE_SHARE

    def __post_init__(self) -> None:
        if self.pair not in PAIRS:
            raise ExperimentError(f"pair is {self.pair!r}", f"one of {PAIRS}", "choose one of these")
        if self.pair == "shipped" and self.geometry != "shipped":
            raise ExperimentError(
                f"the shipped pair at geometry {self.geometry!r}", "geometry 'shipped'", "use --pair planted for others"
            )
        if self.dtype not in DTYPES:
            raise ExperimentError(f"dtype is {self.dtype!r}", f"one of {DTYPES}", "choose one of these")
        unknown = [peer for peer in self.peers if peer not in PEERS]
        if unknown:
            raise ExperimentError(f"no peer {unknown[0]!r}", ", ".join(PEERS), "name one of these, or none")
        if not self.ks or self.ks[0] != 0 or list(self.ks) != sorted(set(self.ks)) or self.ks[-1] > MOST_DRAFTS:
            raise ExperimentError(
                f"depths {list(self.ks)}",
                f"ascending depths of 0 to {MOST_DRAFTS}, 0 (the baseline) among them",
                "a speed-up needs its own baseline: write --spec 0,3",
            )
        if self.tokens < 16 or self.rounds < 1 or self.warmup < 0:
            raise ExperimentError(
                f"{self.tokens} tokens, {self.rounds} rounds, {self.warmup} warm-up rounds",
                "at least 16 tokens, one round and no negative warm-up",
                "raise them",
            )


def read_points(text: str) -> tuple[Point, ...]:
    """Points written as `512x1,16384x4`: context x batch.

    Raises:
        ExperimentError: another form, or a count below 2 and 1.
    """
    points = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)x(\d+)\s*", part)
        if not found or int(found[1]) < 2 or int(found[2]) < 1:
            raise ExperimentError(
                f"point {part!r}", "CONTEXTxBATCH of at least 2x1, e.g. 32768x1", "separate several points by commas"
            )
        points.append(Point(int(found[1]), int(found[2])))
    return tuple(points)


def read_depths(text: str) -> tuple[int, ...]:
    """Depths written as `0,3`.

    Raises:
        ExperimentError: something that is no number.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ExperimentError(f"depths {text!r}", f"numbers of 0 to {MOST_DRAFTS}, e.g. 0,3", "correct --spec")
    return tuple(sorted({int(part) for part in parts}))
