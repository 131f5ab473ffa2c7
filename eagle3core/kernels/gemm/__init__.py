"""The linear maps of a step: y = epilogue(x W^T).

Read `launcher` first, then `reference`, `tiling`, and one kernel: `ring` (few rows), `tile` or `group` (more).
`epilogue` says what becomes of the sums; a new epilogue is a kind there, a formula in `values`, and a branch of
`finish` and of `fragments.kinds`, the two arrangements in which kernels finish.
"""

from eagle3core.kernels.gemm.card import CARD
from eagle3core.kernels.gemm.fp8.tiling import tiling_for
from eagle3core.kernels.gemm.launcher import gemm, gemm_cost
from eagle3core.kernels.gemm.order.weight import pack_weight, unpack_weight
from eagle3core.kernels.gemm.reference import epilogue_of, n_columns, n_weight_rows, packed_inputs, scales_shape
from eagle3core.kernels.gemm.scratch import workspace, workspace_bytes
from eagle3core.kernels.gemm.tiling import Tiling, choose_tiling

__all__ = [
    "CARD",
    "Tiling",
    "choose_tiling",
    "epilogue_of",
    "gemm",
    "gemm_cost",
    "n_columns",
    "n_weight_rows",
    "pack_weight",
    "packed_inputs",
    "scales_shape",
    "tiling_for",
    "unpack_weight",
    "workspace",
    "workspace_bytes",
]
