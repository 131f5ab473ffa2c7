"""Drafts without a model: what followed the newest tokens when they stood earlier in the same text.

Imports nothing of the engine. A further way to look up goes into a file of its own, with the two calls of `Lookup`,
and into `LOOKUPS`.
"""

from collections.abc import Callable, Mapping

from eagle3core.lookup.ngram import NgramLookup
from eagle3core.lookup.suffix import SuffixLookup
from eagle3core.lookup.text import Lookup

LOOKUPS: Mapping[str, Callable[[], Lookup]] = {"ngram": NgramLookup, "suffix": SuffixLookup}  # by method

__all__ = ["LOOKUPS", "Lookup", "NgramLookup", "SuffixLookup"]
