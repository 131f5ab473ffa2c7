"""What performance mode promises of a run (docs/requirements.md R-113), counted: 0 is kept, None is not known.

Names and words are the engine's own (`eagle3core.performance.invariants`), which ends a run where one breaks. Counted
here are those that an engine's row can tell; the rest is `n_divergent` and `n_wrong_requests` of the bench for the
tokens, and `eagle3lab prove quiet` for copies and waits inside steps.
"""

from __future__ import annotations

from eagle3core import Engine
from eagle3core.performance import INVARIANTS as PROMISES
from eagle3core.performance import debug_settings, debug_variables
from lab.probes.bench.record import is_perf_mode
from lab.probes.bench.rounds import Work
from lab.rows.store import Value, block

COUNTED = ("gemm_fallbacks", "untuned_products", "single_token_steps", "faults", "guessed_layouts", "debug_switches")
INVARIANTS = {name: PROMISES[name].broken for name in COUNTED}


def invariants_block(work: Work, k: int) -> dict[str, Value]:
    """Counts of broken invariants over the last pass of an engine that drafts `k` tokens a step."""
    engine = work.engine
    steps = [step for response in work.responses for step in response.req_metrics.steps]
    n_steps = len(steps) if k else sum(len(tokens) - 1 for tokens in work.tokens)
    counts: dict[str, int | None] = {
        "gemm_fallbacks": 0 if engine.runner.has_kernels else n_steps,
        "untuned_products": n_untuned(engine),
        # In performance mode these end the run, so a run that came this far had none.
        "faults": 0 if is_perf_mode() else None,
        "guessed_layouts": 0 if is_perf_mode() else None,
        "debug_switches": n_debug_switches(engine),
    }
    if k:
        counts["single_token_steps"] = (
            sum(step.n_draft < k for step in steps) if engine.speculation.enabled else n_steps
        )
    return block("invariants", dict(counts))


def n_debug_switches(engine: Engine) -> int:
    """Switches that are on, those included that a variable asks for."""
    return len(debug_settings(engine.config)) + len(debug_variables())


def n_untuned(engine: Engine) -> int | None:
    """Launches of products that the tuned file of this kind of GPU does not know; None where there is no such file."""
    audit = engine.runner.gemms
    return audit.total - audit.hits if audit.is_required else None
