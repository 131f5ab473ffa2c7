"""Passes of draft heads as stages of calls: the input they make of the target's states, and their layer.

May import the target's passes and the state; `propose`, `grow` and `prefill` import it. A newcomer may add a variant of
a head here: a launch of a card that exists, where the variant asks for it, and none where it does not.
"""

from eagle3core.step.heads.passes import DraftPass, draft_keys, draft_stages, fuse_taps, fused_feature

__all__ = ["DraftPass", "draft_keys", "draft_stages", "fuse_taps", "fused_feature"]
