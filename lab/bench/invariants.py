"""What performance mode promises of a run (docs/requirements.md R-113), counted: 0 is kept, None is not known.

Of its seven invariants two hold by construction (layouts of outputs are types, never guessed from a shape; see also
`eagle3lab prove quiet` for copies and waits inside steps), and tuned-only dispatch is not reported by the engine.
"""

from __future__ import annotations

import os

from eagle3core.decode.device_runner import DeviceRunner
from eagle3core.engine import ACTIVE_DEBUG_VARIABLE, Engine
from lab.bench.record import block, is_perf_mode
from lab.bench.rounds import Work
from lab.store import Value

DEBUG_VARIABLES = ("EAGLE3_KV_DEBUG", ACTIVE_DEBUG_VARIABLE)

# What each count is of, in words; (1), (3), (4) and (6) of the list. Determinism is `n_divergent`, `n_wrong_requests`.
INVARIANTS = {
    "gemm_fallbacks": "steps whose matrix products were not the engine's own kernels",
    "single_token_steps": "steps that drafted fewer tokens than were asked for",
    "faults": "faults that the device reported: acceptance outside the tree, a row without a block, no room",
    "debug_switches": "switches that make a step log, copy or wait",
}


def invariants_block(work: Work, k: int) -> dict[str, Value]:
    """Counts of broken invariants over the last pass of an engine that drafts `k` tokens a step."""
    engine = work.engine
    steps = [step for response in work.responses for step in response.req_metrics.steps]
    n_steps = len(steps) if k else sum(len(tokens) - 1 for tokens in work.tokens)
    counts: dict[str, int | None] = {
        "gemm_fallbacks": 0 if isinstance(engine.runner, DeviceRunner) else n_steps,
        # In performance mode a fault ends the run, so a run that came this far had none.
        "faults": 0 if is_perf_mode() else None,
        "debug_switches": n_debug_switches(engine),
    }
    if k:
        counts["single_token_steps"] = (
            sum(step.n_draft < k for step in steps) if engine.speculation.enabled else n_steps
        )
    return block("invariants", dict(counts))


def n_debug_switches(engine: Engine) -> int:
    """Switches that are on."""
    spec = engine.config.speculative_config
    settings = [engine.config.collect_draft_ranks, *([spec.eagle_debug, spec.eagle_metrics_debug] if spec else [])]
    return sum(settings) + sum(bool(os.environ.get(name)) for name in DEBUG_VARIABLES)
