"""What a step may log, all off by default: the draft settings' two flags, and families of lines by variable.

The variables are read once a step, whatever the batch, so that a running engine can be asked. Lines are made on the
host of results that were read anyway. Source: docs/requirements.md R-88, R-114, R-154.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from eagle3core.cache import BlockPool
from eagle3core.metrics import StepRecord
from eagle3core.speculative import SpeculativeConfig

log = logging.getLogger("eagle3core")

ACTIVE_DEBUG_VARIABLE = "EAGLE3_ACTIVE_DEBUG"  # the slots that take part in a step
ALIGN_DEBUG_VARIABLE = "EAGLE3_ALIGN_DEBUG"  # drafts beside what the target chose in their places
ACCEPT_DEBUG_VARIABLE = "EAGLE3_ACCEPT_DEBUG"  # how many drafts were accepted, and what of that was committed
SPAN_DEBUG_VARIABLE = "EAGLE3_SPAN_DEBUG"  # positions that a step's tokens take
KV_DEBUG_VARIABLE = "EAGLE3_KV_DEBUG"  # blocks of the cache that requests take and give back
FAMILIES = (ALIGN_DEBUG_VARIABLE, ACCEPT_DEBUG_VARIABLE, SPAN_DEBUG_VARIABLE)


def log_active(step: int, active: Sequence[int], n_slots: int) -> None:
    """The slots of a step that is about to run, if asked for."""
    if os.environ.get(ACTIVE_DEBUG_VARIABLE):
        log.info("[EAGLE][Active] step %d: %d of %d slots, %s", step, len(active), n_slots, sorted(active))


def log_blocks(what: str, request_id: int, slot: int, blocks: Sequence[int], pool: BlockPool) -> None:
    """Blocks that a request takes or gives back, if asked for."""
    if blocks and os.environ.get(KV_DEBUG_VARIABLE):
        log.info("[EAGLE][KV] request %d slot %d %s %d blocks %s; %d of %d held, %d kept", request_id, slot, what,
                 len(blocks), list(blocks), pool.n_held, pool.n_blocks, pool.n_kept)  # fmt: skip


def log_flags(
    spec: SpeculativeConfig | None,
    slot: int,
    number: int,
    step: StepRecord,
    drafts: Sequence[int],
    committed: Sequence[int],
) -> None:
    """The lines that the flags of the draft settings ask for; None: no drafts, so no lines."""
    if spec is None:
        return
    if spec.eagle_debug:
        log.info("[EAGLE] slot %d step %d drafted %s committed %s", slot, number, list(drafts), list(committed))
    if spec.eagle_metrics_debug:
        counts = (step.n_draft, step.n_accepted, step.n_committed)
        log.info("[EAGLE][Metrics] slot %d drafted %d accepted %d committed %d%s", slot, *counts, _rule_of(step))


def asked_families() -> frozenset[str]:
    """The variables of families of lines that are set at this moment."""
    return frozenset(name for name in FAMILIES if os.environ.get(name))


def log_families(
    asked: frozenset[str],
    slot: int,
    number: int,
    step: StepRecord,
    drafts: Sequence[int],
    committed: Sequence[int],
    n_prompt: int,
) -> None:
    """The lines of the families asked for.

    Args:
        number: of the step. n_prompt: tokens of the request's prompt, the first of which has position 0.
    """
    if not asked:
        return
    where = f"slot {slot} step {number}"
    if step.n_draft and ALIGN_DEBUG_VARIABLE in asked:
        log.info("[EAGLE][Align] %s drafted %s target %s agree %d", where, list(drafts), list(committed),
                 step.n_accepted)  # fmt: skip
    if step.n_draft and ACCEPT_DEBUG_VARIABLE in asked:
        cut = ", cut at the end" if step.cut else ""
        log.info("[EAGLE][Accept] %s accepted %d of %d, committed %d%s%s", where, step.n_accepted, step.n_draft,
                 step.n_committed, cut, _rule_of(step))  # fmt: skip
    if SPAN_DEBUG_VARIABLE in asked:
        first = n_prompt + step.start
        log.info("[EAGLE][Span] %s positions %d..%d", where, first, first + step.n_committed - 1)


def _rule_of(step: StepRecord) -> str:
    """The end of a line: the rule by which drafts were accepted, where it is not the usual one."""
    return f", acceptance {step.acceptance}" if step.acceptance is not None else ""
