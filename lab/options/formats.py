"""Options of what a pair's weights and caches are kept in: one set for whatever times, plans or compiles for it."""

from __future__ import annotations

from typing import TypedDict

from lab.options.fields import Options, option
from lab.options.values import CacheName, WeightsName


class Formats(TypedDict, total=False):
    """Formats by the names that floors, plans and pairs take them by; what is not named is as stored, or computed."""

    target_weights: WeightsName
    draft_weights: WeightsName
    cache_dtype: CacheName
    draft_cache_dtype: CacheName


class FormatOptions(Options):
    """Formats of a pair."""

    draft_weights: WeightsName = option("as_stored", "of the draft's maps; fp8 drafts faster, and a little otherwise")
    target_weights: WeightsName = option("as_stored", "of the target's maps; fp8 halves their bytes")
    cache_dtype: CacheName = option("as_computed", "of the target's keys and values; fp8 takes half the bytes")
    draft_cache_dtype: CacheName = option("as_computed", "of the draft's keys and values")

    @property
    def formats(self) -> Formats:
        """All of them."""
        return {
            "target_weights": self.target_weights, "draft_weights": self.draft_weights,
            "cache_dtype": self.cache_dtype, "draft_cache_dtype": self.draft_cache_dtype,
        }  # fmt: skip
