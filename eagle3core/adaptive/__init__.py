"""How many drafts a step makes where that is chosen anew: from what steps take and what recent ones accepted.

`choose` is a pure function of a curve, a history and the moment; whoever has the clock and the results feeds the two.
Imports nothing of the engine. Another policy is another `choose`; it may not look at a clock.
"""

from eagle3core.adaptive.choice import Choice, Moment, choose
from eagle3core.adaptive.curve import StepCurve
from eagle3core.adaptive.history import History

__all__ = ["Choice", "History", "Moment", "StepCurve", "choose"]
