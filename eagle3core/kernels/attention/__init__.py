"""Attention over a paged cache with a tree mask over the newest keys.

Read `launcher` first, then `layout` (how work is cut up), `plan`, `variant`, and one kernel: `streams` (up to 32 query
rows a key head), `rows` (more) or `warpgroup` (64 and more, on sm_90a); `combine` joins what they leave.
"""

from eagle3core.kernels.attention.card import CARD, attention_cost
from eagle3core.kernels.attention.layout import EARLIER_BITS, Shape, shape_over
from eagle3core.kernels.attention.plan import choose_plan, order_of, plan_key

__all__ = [
    "CARD",
    "EARLIER_BITS",
    "Shape",
    "attention_cost",
    "choose_plan",
    "order_of",
    "plan_key",
    "shape_over",
]
