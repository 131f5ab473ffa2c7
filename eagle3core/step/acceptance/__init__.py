"""Rules of acceptance beside the step's own, as calls that rewrite the target's choices before `accept` follows them.

A choice is the token after a node. Where a rule accepts a draft, the choice of its parent becomes the draft's token;
where it accepts none, the choice is a token that is none of the node's drafts. So the walk, the commit and what is kept
of the committed tokens are the same for every rule. Imports the kernels' cards, the settings and `step.draw`; the
step's builder and what proposes drafts import it. Another rule is a class in `eagle3core.acceptance` and a function in
`rewritten`.
"""

from eagle3core.step.acceptance.rejection import DRAFT_NUMBERS, draw_drafts, rejected
from eagle3core.step.acceptance.rewritten import Verified, rewrite_choices

__all__ = ["DRAFT_NUMBERS", "Verified", "draw_drafts", "rejected", "rewrite_choices"]
