"""Whose the blocks of the cache are, on the host and on the device.

`pool` is the account: who holds which block and which are free; `names` gives a full block the name of what is in it,
by which another request finds it again; `tables` tells the device. Knows no request and no step; `batching` keeps the
account, and a runner has the tables. Another rule for what is thrown away first is a change of `pool` alone.
"""

from eagle3core.cache.names import extend_names
from eagle3core.cache.pool import BlockPool
from eagle3core.cache.tables import BlockTables, Copy

__all__ = ["BlockPool", "BlockTables", "Copy", "extend_names"]
