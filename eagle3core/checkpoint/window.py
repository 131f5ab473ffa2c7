"""How far back a draft's layers see, by the keys of Hugging Face's configurations.

A key j is seen by a query i where 0 <= i - j < window, in positions; of a chain or a tree by depth, as vLLM serves it.
Source: `layer_types` and `sliding_window` as transformers and vllm-project/speculators write them.
"""

from __future__ import annotations

from eagle3core.checkpoint.settings import Settings
from eagle3core.checks import MOST_WINDOW

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_window(layer: Settings) -> int:
    """Positions that every layer of a head sees back, the query's own included; 0: all.

    Without `layer_types` a `sliding_window` counts only where `use_sliding_window` is true: others keep the key unused.

    Raises:
        CheckpointError: layers of several kinds or of one that is not built, or a window without its length.
    """
    kinds = layer.values.get("layer_types")
    if kinds is None:
        slides = layer.flag("use_sliding_window") and "sliding_window" in layer
    else:
        n = layer.count("num_hidden_layers", 1)
        if not isinstance(kinds, list) or len(kinds) != n or any(kind not in (_SLIDING, _FULL) for kind in kinds):
            raise layer.bad("layer_types", kinds, f"a list of {n}, {_SLIDING!r} or {_FULL!r}")
        if any(kind != kinds[0] for kind in kinds):
            raise layer.bad("layer_types", kinds, "one kind for all layers: mixed windows are not built")
        slides = kinds[0] == _SLIDING
    if not slides:
        return 0
    window = layer.count("sliding_window")
    if window > MOST_WINDOW:
        raise layer.bad("sliding_window", window, f"at most {MOST_WINDOW}")
    return window
