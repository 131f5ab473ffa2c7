"""Experts of a layer: the router that chooses some for every row, their two maps, and the weighted sum.

What they compute is in `route` and `feed`, in plain torch for any device and dtype; their kernels are in `routing`,
`maps` and `total`. A row's experts stand, and are added up, in ascending order, so its bits do not depend on what is
computed beside it. Imports `isa`, `layer`, `gemm` and the kernels' door. A new format of the matrices is an order in
`maps.order` and a lane's operands in `maps.operands`.
"""

from eagle3core.kernels.experts.maps.launcher import walk_bytes
from eagle3core.kernels.experts.maps.order import VALUE_BYTES
from eagle3core.kernels.experts.matrices import Matrices, Mxfp4Matrices, OrderedMatrices, PlainMatrices
from eagle3core.kernels.experts.route import chosen_of

__all__ = ["VALUE_BYTES", "Matrices", "Mxfp4Matrices", "OrderedMatrices", "PlainMatrices", "chosen_of", "walk_bytes"]
