"""What is measured: a geometry, a context, a batch, depths of speculation, a pair.

Names after docs/requirements.md R-127, e.g. `Speculative_Single_Context32K_3tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from eagle3core import ForcedAcceptance
from lab.errors import ExperimentError
from lab.options.values import MOST_DRAFTS as MOST_DRAFTS
from lab.options.values import USUAL_PEERS, CacheName, DtypeName, PairName, PeerName, WeightsName, check_depths
from lab.options.values import Point as Point

CACHE_SHARE = 0.95  # of the free memory, for both KV caches, unless a scenario is about just that
PAIRS: tuple[str, ...] = get_args(PairName)
AS_COMPUTED: dict[str, CacheName] = {"cache_dtype": "as_computed", "draft_cache_dtype": "as_computed"}
PEERS: tuple[str, ...] = get_args(PeerName)
DTYPES: tuple[str, ...] = get_args(DtypeName)


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
        draft_weights, target_weights: format of the draft's maps, and of the target's.
        cache_dtype, draft_cache_dtype: of the target's and the draft's keys and values.
        repeated: of a planted pair with experts, share of tokens that take their predecessor's.
        sustained: steps of one more pass of each depth, without a rest; 0: no such pass.
        forced: tokens that every step of drafts is forced to commit, bonus included; None: what the target agrees with.
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
    peers: tuple[str, ...] = USUAL_PEERS
    seed: int = 0
    cache_share: float = CACHE_SHARE
    forced: float | None = None
    draft_weights: WeightsName = "as_stored"
    target_weights: WeightsName = "as_stored"
    cache_dtype: CacheName = "as_computed"
    draft_cache_dtype: CacheName = "as_computed"
    repeated: float = 0.0
    sustained: int = 0

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
        if self.forced is not None and self.peers:
            raise ExperimentError(
                f"peers {', '.join(self.peers)} beside a forced length of {self.forced:g}", "the engine alone",
                "leave the peers out: what they commit is not forced",
            )  # fmt: skip
        check_depths(self.ks)
        if self.sustained < 0:
            raise ExperimentError(f"{self.sustained} steps without a rest", "0 or more", "use --sustained 2000, or 0")
        if self.tokens < 16 or self.rounds < 1 or self.warmup < 0:
            raise ExperimentError(
                f"{self.tokens} tokens, {self.rounds} rounds, {self.warmup} warm-up rounds",
                "at least 16 tokens, one round and no negative warm-up",
                "raise them",
            )

    @property
    def caches(self) -> dict[str, CacheName]:
        """What keys and values are stored in, by the names of the engine's settings."""
        return {"cache_dtype": self.cache_dtype, "draft_cache_dtype": self.draft_cache_dtype}

    def rule(self, k: int) -> ForcedAcceptance | None:
        """How the engine accepts `k` drafts a step."""
        return ForcedAcceptance(length=self.forced) if k and self.forced is not None else None

    def name(self, point: Point, k: int) -> str:
        """The name of a row, which says where acceptance is forced."""
        rule = self.rule(k)
        return point.name(k) + (f"_{rule.label.replace(' ', '_')}" if rule is not None else "")
