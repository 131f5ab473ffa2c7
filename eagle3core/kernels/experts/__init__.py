"""Experts of a layer: the router that chooses some for every row, their two maps, and the weighted sum.

What they compute is here, in plain torch for any device and dtype; kernels are not built, and a launcher says so. A
row's experts stand, and are added up, in ascending order, so its bits do not depend on what is computed beside it.
Imports `isa`, `layer` and the kernels' door.
"""

from eagle3core.kernels.experts.matrices import Fp8Matrices, Matrices, Mxfp4Matrices, PlainMatrices
from eagle3core.kernels.experts.route import chosen_of

__all__ = ["Fp8Matrices", "Matrices", "Mxfp4Matrices", "PlainMatrices", "chosen_of"]
