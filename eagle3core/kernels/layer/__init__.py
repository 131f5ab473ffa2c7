"""What lies between the matrices of a layer: norms, rotation, embeddings, rows by index. One file a card.

Imports `isa` and the kernels' door alone.
"""

from eagle3core.kernels.layer.draft_input import draft_input_cost
from eagle3core.kernels.layer.embedding import embedding_cost
from eagle3core.kernels.layer.feature_input import feature_input_cost
from eagle3core.kernels.layer.gather_rows import gather_rows_cost
from eagle3core.kernels.layer.rms_norm import rms_norm_reference
from eagle3core.kernels.layer.rope import rope_reference, rope_tables
from eagle3core.kernels.layer.take_rows import take_rows_cost

__all__ = [
    "draft_input_cost",
    "embedding_cost",
    "feature_input_cost",
    "gather_rows_cost",
    "rms_norm_reference",
    "rope_reference",
    "rope_tables",
    "take_rows_cost",
]
