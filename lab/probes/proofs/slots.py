"""Finished slots cost nothing: with every slot that ends, fewer sequences are drafted for and attended, and steps fall.

Source: docs/requirements.md R-86, R-87.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch

from eagle3core.config import GenerationConfig
from eagle3core.step import Program, Replayer
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.subject import Setting, Subject, WatchedEngine
from lab.probes.proofs.timed import Timed, TimedReplayer

PART = "slots"


@dataclass(frozen=True)
class SlotsPlan:
    """What is measured: slots, drafts a step, prompt tokens, and steps at least in every state."""

    slots: int = 4
    k: int = 3
    context: int = 8192
    n_steps: int = 24

    def limits(self) -> list[int]:
        """Tokens of each request, so that one ends after the other."""
        return [(i + 1) * self.n_steps * (self.k + 1) for i in range(self.slots)]

    def setting(self) -> Setting:
        """The engine's."""
        return Setting(self.k, self.slots, self.context + max(self.limits()) + 8)


@dataclass(frozen=True)
class Occupied:
    """Steps while `n_running` slots ran.

    Attributes:
        live: sequences the device itself counted as running.
        drafted: rows of the draft's q, k, v maps, all passes together, padding of the batch included.
        attended: sequences that attention reads keys for: those of the draft's passes and of one target layer.
        launched: rows of the largest matrix product, padding included.
        step_us: median.
    """

    n_running: int
    live: int
    drafted: int
    attended: int
    launched: int
    step_us: float
    n_steps: int


class FinishedSlots:
    """Checks of one pair in one engine whose slots finish one after the other."""

    def __init__(self, subject: Subject, prompts: Sequence[Sequence[int]], plan: SlotsPlan) -> None:
        self.subject, self.prompts, self.plan = subject, [list(prompt) for prompt in prompts], plan

    def checks(self) -> list[Check]:
        """For each number of finished slots, its rows and its time."""
        shared = {"pair": self.subject.name, "spec_k": self.plan.k, "slots": self.plan.slots,
                  "context": self.plan.context}  # fmt: skip
        return [
            Check(PART, f"{self.subject.name} {n} of {self.plan.slots} finished: {what}", {**shared, "finished": n},
                  partial(judge, n))
            for n in range(1, self.plan.slots)
            for what, judge in (("rows", self._rows), ("time", self._time))
        ]  # fmt: skip

    @cached_property
    def states(self) -> dict[int, Occupied]:
        """Steps by how many slots ran."""
        plan = self.plan
        timers: list[TimedReplayer] = []

        def through(inner: Replayer) -> Replayer:
            timers.append(TimedReplayer(inner, self.subject.on_gpu))
            return timers[0]

        engine = self.subject.engine(plan.setting(), through=through)
        seen: dict[int, list[tuple[dict[str, int], Timed]]] = defaultdict(list)

        @contextmanager
        def watch(watched: WatchedEngine) -> Iterator[None]:
            n_before = len(timers[0].times)
            yield
            steps = watched.runner.programs.values()
            for one in timers[0].times[n_before:]:
                if any(one.program is program for program in steps):
                    counted = rows_of_step(watched, one.program)
                    seen[counted["live"]].append((counted, one))

        engine.watch = watch
        settings = [GenerationConfig(limit, ignore_eos=True) for limit in plan.limits()]
        engine.generate(self.prompts, settings)
        if self.subject.on_gpu:
            torch.cuda.synchronize()
        found = {}
        for n, steps in seen.items():
            if n:
                # The host knows a step late who has ended: a state's first steps may still have the batch before.
                usual = steps[-1][0]
                times = [one.took_us() for counted, one in steps if counted == usual]
                found[n] = Occupied(n, **usual, step_us=median(times), n_steps=len(times))
        return found

    def _rows(self, n_finished: int) -> Verdict:
        return judge_rows(self.states, self.plan.slots, n_finished)

    def _time(self, n_finished: int) -> Verdict:
        return judge_time(self.states, self.plan.slots, n_finished)


def rows_of_step(engine: WatchedEngine, program: Program) -> dict[str, int]:
    """What a step worked on, read from its launches and the operands they leave behind; waits for the device."""
    live = int(engine.runner.state.step.count.item())
    drafted = attended = launched = 0
    for stage in program:
        for found in (launch.operands for launch in stage.launches):
            if "tiles" in found:
                launched = max(launched, int(found["rows"]))
            if stage.name == "draft.qkv" and "tiles" in found:
                drafted += int(found["rows"])
            if stage.name in ("draft.attn", "target.0.attn") and {"prefix", "masks"} <= found.keys():
                attended += int((found["prefix"] >= 0).sum())
    return {"live": live, "drafted": drafted, "attended": attended, "launched": launched}


def judge_rows(states: dict[int, Occupied], slots: int, n_finished: int) -> Verdict:
    """Whether the rows of draft and attention are those of the running slots alone, in proportion to all of them."""
    full, now = states.get(slots), states.get(slots - n_finished)
    if full is None or now is None:
        return Verdict(None, f"no step ran with {slots if full is None else slots - n_finished} of {slots} slots")
    share = now.n_running / slots
    values: dict[str, Any] = {"share": share, "launched_rows": now.launched, "full_launched_rows": full.launched}
    held = True
    for name in ("drafted", "attended"):
        value, most = getattr(now, name), getattr(full, name)
        values |= {f"{name}_rows": value, f"full_{name}_rows": most}
        held &= value <= share * most + 1e-9
    detail = (
        f"{now.n_running} of {slots} run: {now.drafted} of {full.drafted} drafted rows, {now.attended} of "
        f"{full.attended} sequences attended; matrices {now.launched} of {full.launched} rows"
    )
    return Verdict(held, detail, values)


def judge_time(states: dict[int, Occupied], slots: int, n_finished: int) -> Verdict:
    """Whether a step is faster than with one slot more running."""
    before, now, full = states.get(slots - n_finished + 1), states.get(slots - n_finished), states.get(slots)
    if before is None or now is None or full is None:
        return Verdict(None, f"no step ran with {slots - n_finished} or {slots - n_finished + 1} of {slots} slots")
    values = {"step_us": now.step_us, "step_us_before": before.step_us, "step_us_full": full.step_us,
              "n_steps": now.n_steps}  # fmt: skip
    detail = (
        f"{now.step_us:.0f} us a step with {now.n_running} running, {before.step_us:.0f} us with {before.n_running}, "
        f"{full.step_us:.0f} us with {full.n_running}"
    )
    return Verdict(now.step_us < before.step_us, detail, values)
