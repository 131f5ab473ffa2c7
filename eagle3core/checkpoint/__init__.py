"""From a directory on disk to named, checked tensors: target and EAGLE-3 draft.

Loading is a step of its own, usable and testable without an engine (docs/requirements.md R-22). A new layout is a row
in `layouts` or `keys`, a new variant a field of `HeadVariant`, read in `variants`; other containers are in
`containers`, and `writing` has the way back.
"""

from eagle3core.checkpoint.draft import DraftCheckpoint, load_draft, read_refused_draft
from eagle3core.checkpoint.fp8 import scale_name
from eagle3core.checkpoint.pickled import load_pickled
from eagle3core.checkpoint.plan import draft_shapes
from eagle3core.checkpoint.preflight import Preflight, preflight
from eagle3core.checkpoint.target import TargetCheckpoint, load_target, target_shapes
from eagle3core.checkpoint.writing.convert import FORMATS, Conversion, convert_draft, described, fitting_format
from eagle3core.checkpoint.writing.forms import FEATURES
from eagle3core.checkpoint.writing.head import target_of

__all__ = [
    "FEATURES",
    "FORMATS",
    "Conversion",
    "DraftCheckpoint",
    "Preflight",
    "TargetCheckpoint",
    "convert_draft",
    "described",
    "draft_shapes",
    "fitting_format",
    "load_draft",
    "load_pickled",
    "load_target",
    "preflight",
    "read_refused_draft",
    "scale_name",
    "target_of",
    "target_shapes",
]
