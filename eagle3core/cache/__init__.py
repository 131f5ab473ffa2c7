"""Whose the blocks of the cache are: an account on the host, of numbers alone.

`pool` says who holds which block and which are free; `names` gives a full block the name of what is in it, by which
another request finds it again. Knows no tensor, no request and no device; `batching` keeps the account and `step`
writes the tables. Another rule for what is thrown away first is a change of `pool` alone.
"""

from eagle3core.cache.names import extend_names
from eagle3core.cache.pool import BlockPool

__all__ = ["BlockPool", "extend_names"]
