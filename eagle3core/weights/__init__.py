"""Weights as the step reads them, a file a format.

Imports kernels (for the order of packing) and checkpoints; a new weight format is a new file here.
"""

from eagle3core.weights.checkpoints import pack_checkpoints
from eagle3core.weights.eagle import PackedEagle, pack_eagle
from eagle3core.weights.experts import PackedExperts
from eagle3core.weights.fp8 import Fp8Matrix, quantised, stacked
from eagle3core.weights.pack import pack_draft, pack_target
from eagle3core.weights.packed import Drafter, PackedDraft, PackedLinear, PackedMlp, PackedTarget
from eagle3core.weights.packer import Source
from eagle3core.weights.rope import rope_frequencies
from eagle3core.weights.stored import bytes_on_device, kept_dtype, stored_bytes

__all__ = [
    "Drafter",
    "Fp8Matrix",
    "PackedDraft",
    "PackedEagle",
    "PackedExperts",
    "PackedLinear",
    "PackedMlp",
    "PackedTarget",
    "Source",
    "bytes_on_device",
    "kept_dtype",
    "pack_checkpoints",
    "pack_draft",
    "pack_eagle",
    "pack_target",
    "quantised",
    "rope_frequencies",
    "stacked",
    "stored_bytes",
]
