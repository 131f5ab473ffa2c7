"""The kernels' numbers as rows of the lab: measured ones with their machine, missing ones with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from eagle3core.kernels import Card
from lab.night.experiment import Experiment
from lab.probes.kernels.cards import NO_ROWS, compiled_state, gpu_state
from lab.probes.kernels.on_cpu import CompiledVariant, EmulatedError, emulated_error
from lab.probes.kernels.roofline import Check, case_text, peer_ratio
from lab.probes.kernels.rows import KERNEL, PROOF, Bench

TWIN, CODE = "kernel_error", "kernel_code"


def write_measured(exp: Experiment, cards: Sequence[Card], bench: Bench | None) -> None:
    """Rows of every proof and timed shape of `cards`; a card without them gets a missing row."""
    for card in cards:
        proof = bench.proof(card.name) if bench else None
        if bench is None or proof is None:
            exp.missing(PROOF, card.name, _why(bench, PROOF, card.name, "no proof row in the benchmark's file"))
        else:
            values = {"passed": proof.passed, "n_cases": proof.n_cases, "detail": proof.reason}
            exp.write(PROOF, card.name, values, gpu=bench.gpu)
        cells = bench.of(card.name) if bench else []
        if bench is None or not cells:
            exp.missing(KERNEL, card.name, _why(bench, KERNEL, card.name, "no timed shape in the benchmark's file"))
            continue
        for cell in cells:
            best = cell.best_peer
            values = {
                "time_us": cell.us, "time_us_p10": cell.us_p10, "time_us_p90": cell.us_p90, "floor_us": cell.floor_us,
                "share_of_floor": cell.share, "n_bytes": cell.bytes, "n_flops": cell.flops,
                "dependent_passes": cell.dependent_passes, "library": best, "is_complete": cell.is_complete,
                "library_us": cell.peers[best] if best else None, "time_over_library": peer_ratio(cell),
                "source": bench.name, "commits": bench.commits,
            }  # fmt: skip
            exp.write(KERNEL, card.name, values, timer=cell.timer, shape=case_text(cell.shape), gpu=bench.gpu)


def _why(bench: Bench | None, kind: str, op: str, otherwise: str) -> str:
    return bench.missing.get((kind, op), otherwise) if bench else NO_ROWS


def write_errors(exp: Experiment, cards: Sequence[Card], n_cases: int) -> list[EmulatedError]:
    """Runs the first `n_cases` tiny cases of every card on the CPU twin and writes its error beside what is allowed."""
    found = []
    for card in cards:
        if n_cases < 1:
            exp.not_asked(TWIN, card.name, "emulated_cases is 0")
        for case in card.cases[:n_cases] if n_cases > 0 else ():
            one = emulated_error(card, case)
            values = {"error": one.error, "allowed": one.allowed, "output": one.output, "faults": list(one.faults)}
            exp.write(TWIN, card.name, values, case=case_text(case))
            found.append(one)
    return found


def write_compiled(exp: Experiment, cards: Sequence[Card], found: Sequence[CompiledVariant]) -> None:
    """Rows of every compiled variant, missing ones with their reason; a card of which none was asked for says so."""
    for one in found:
        if one.missing:
            exp.missing(CODE, one.op, one.missing, variant=one.variant, arch=one.arch)
            continue
        held = one.occupancy
        values = {
            "registers": one.registers, "spilled": one.spill_bytes, "shared": one.shared_bytes, "threads": one.threads,
            "blocks_a_processor": held.blocks if held else None, "occupancy": held.share if held else None,
            "limited_by": held.limit if held else None, "faults": list(one.faults),
        }  # fmt: skip
        exp.write(CODE, one.op, values, variant=one.variant, arch=one.arch)
    for name in [card.name for card in cards if card.name not in {one.op for one in found}]:
        exp.not_asked(CODE, name, "no architecture was asked for")


def write_aim(exp: Experiment, check: Check) -> None:
    """A threshold that is hoped for: written down, and no gate."""
    if check.holds is None:
        exp.missing("aim", check.name, check.detail)
        return
    values = {"holds": check.holds, "value": check.value, "threshold": check.bound(), "detail": check.detail}
    exp.write("aim", check.name, values)


def states(cards: Sequence[Card], bench: Bench | None, errors: Sequence[EmulatedError]) -> pd.DataFrame:
    """One row a card: its largest error on the twin, the tests it has, and what a GPU showed."""
    rows = []
    n_errors = Counter(error.op for error in errors)
    for card in cards:
        own = [error for error in errors if error.op == card.name]
        worst = max(own, key=lambda e: e.error / e.allowed if e.allowed else e.error, default=None)
        faults = [fault for error in own for fault in error.faults]
        rows.append(
            {
                "card": card.name,
                "twin": "; ".join(faults) or (f"{n_errors[card.name]} cases hold" if own else "missing: not run"),
                "error": worst.error if worst else None, "allowed": worst.allowed if worst else None,
                "compiled ring": compiled_state(card), "GPU": gpu_state(card, bench),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)
