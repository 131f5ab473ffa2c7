"""Planted pairs: real geometries whose next token and whose acceptance are known beforehand.

Nothing in the engine knows of them: weights are ordinary tensors, drafting and verification are the real ones.
Records of such a pair always call it planted.
"""

from lab.pairs.planted.geometries import PlantedGeometry
from lab.pairs.planted.pair import PlantedPair
from lab.pairs.planted.published import GEOMETRIES, find_geometry
from lab.pairs.planted.shapes import empty_models
from lab.pairs.planted.tokens import TokenMap, share_for_length

__all__ = [
    "GEOMETRIES",
    "PlantedGeometry",
    "PlantedPair",
    "TokenMap",
    "empty_models",
    "find_geometry",
    "share_for_length",
]
