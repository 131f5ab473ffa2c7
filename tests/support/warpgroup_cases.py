"""Cases and settings of attention by warpgroups, which its tests share."""

from __future__ import annotations

from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.plan import order_of
from eagle3core.kernels.card import Case

ARCH = "sm_90a"
TINY: Case = {"dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "order": (2, 2), "tree": "random"}
TREE: Case = {**TINY, "prefix": (241,), "tokens": 5, "paths": True}
ROWS = {"row_warps": 2, "groups": 2, "units": 1, "stages": 3, "run": 2, "tiles": 1, "grouped": False}
STREAMS = {"row_warps": 0, "groups": 1, "units": 2, "stages": 2, "run": 2, "tiles": 2, "grouped": False}
ONE = {"grouped": True, "row_warps": 4, "groups": 1, "units": 4, "stages": 2, "tiles": 1, "run": 2}
TWO_STREAMS = {**ONE, "groups": 2, "units": 2, "stages": 3, "run": 1}
TWO_GROUPS = {**ONE, "row_warps": 8, "stages": 3}
# Sets across streams, of which each has a unit at most.
BUNDLE, ALL_SPLITS = {**ONE, "run": 4}, {**ONE, "run": 16}
SHORT_ONE, SHORT_TWO_GROUPS = {**ONE, "short": True}, {**TWO_GROUPS, "short": True}
SHORT_BUNDLE = {**SHORT_ONE, "run": 4}
LONG: Case = {"dtype": "bf16", "dim": 128, "heads": 32, "kv_heads": 8, "prefix": (32741,), "paths": True}
SHAPE = Shape("bf16", 128, 4, *order_of(ARCH, 8, 128))
# Of three sets a stream, the last not full, and a last unit that is not full either.
CHUNK: Case = {**TINY, "heads": 8, "prefix": (597,), "tokens": 8, "tree": "chain"}
# Of two blocks of rows, which walk the same sets.
PAIR: Case = {**CHUNK, "tokens": 16}
# Bundles of four splits, in one of which no stream of the second sequence has a key.
BUNDLES: Case = {**TINY, "heads": 8, "order": (8, 2), "prefix": (300, 30), "tokens": 8, "tree": "chain"}
# Two key heads; the last stream ends with a whole set, right before the unit that its next one would begin with.
WHOLE_SETS: Case = {**TINY, "heads": 4, "kv_heads": 2, "prefix": (296,), "tokens": 8, "tree": "chain"}
# Of one unit a stream or fewer: a set whole, one that the mask ends in, one that the keys end in.
SHORT: Case = {**TINY, "heads": 8, "order": (4, 4), "prefix": (150,), "tokens": 8, "tree": "chain"}
# Four bundles, of which the sequences have keys in all, two and one; none for an empty slot.
MANY_BUNDLES: Case = {**TINY, "heads": 3, "order": (16, 2), "prefix": (600, 300, 20, -1), "tokens": 11, "tree": "chain"}
