"""Performance mode: the seven promises of a run, and what watches that they hold.

Imports the step below it; the engine imports it. A new promise is an entry of `invariants` and a check in `mode`.
"""

from eagle3core.performance.invariants import INVARIANTS
from eagle3core.performance.mode import ALLOWED_IN_A_STEP, debug_settings, debug_variables, loud
from eagle3core.performance.mode import VARIABLE as PERF_MODE_VARIABLE

__all__ = [
    "ALLOWED_IN_A_STEP",
    "INVARIANTS",
    "PERF_MODE_VARIABLE",
    "debug_settings",
    "debug_variables",
    "loud",
]
