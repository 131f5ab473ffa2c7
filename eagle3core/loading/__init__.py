"""From a configuration to models on their device and what runs them.

`reading` finds models and knows their kernels before a weight is on the device; `runners` makes what runs them.
"""

from eagle3core.loading.reading import Reading, needed_kernels, read_models
from eagle3core.loading.runners import (
    Models,
    SpeculationState,
    backend_of,
    choose_path,
    device_sizes,
    launched_kernels,
    new_runner,
    packs_for,
    speculation_from,
    steps_draft,
    tree_of,
)

__all__ = [
    "Models",
    "Reading",
    "SpeculationState",
    "backend_of",
    "choose_path",
    "device_sizes",
    "launched_kernels",
    "needed_kernels",
    "new_runner",
    "packs_for",
    "read_models",
    "speculation_from",
    "steps_draft",
    "tree_of",
]
