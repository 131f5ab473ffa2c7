"""Steps of several depths over one state: which there are, which may follow which, and what each takes.

Imports sizes, results and trees of the step; `build` and `run` import it. Who chooses the depth is not known here.
"""

from eagle3core.step.depths.kinds import KEEPS, READS, StepKind, kinds_of
from eagle3core.step.depths.unread import Unread

__all__ = ["KEEPS", "READS", "StepKind", "Unread", "kinds_of"]
