"""Where a (target, draft) pair comes from: the one shipped with the lab, or directories on disk."""

from lab.pairs.on_disk import Pair, pair_on_disk, shipped_folder, shipped_pair

__all__ = ["Pair", "pair_on_disk", "shipped_folder", "shipped_pair"]
