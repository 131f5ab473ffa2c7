"""Settings of matrix products judged where they run: in the passes of a whole step, the target's or the draft's.

A product chained to itself predicts a step wrongly: launches overlap with their neighbours, and blocks of the next one
crowd processors that this one has left (docs/log.md). So a setting is put into the program of a step, and all launches
of a model's passes are timed together, over the state that an engine has left behind. A pass reads and writes the
same places each time, so it may be repeated. Regimes take turns by the bytes of their weights; each starts from what
those before it have kept. Maps of one shape have one setting in both models: the target, whose pass is the longer,
settles it, and the draft's passes settle what is the draft's alone.

Source: docs/requirements.md R-106, R-111; the rule that judges is `choose`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3core.config import GenerationConfig
from eagle3core.kernels import Launch, Variant, tuned
from eagle3core.kernels.gemm import tiling_for
from eagle3core.step import DeviceRunner, Product, Program, launches_of, products_of, step_program
from lab.errors import ExperimentError
from lab.probes.proofs.subject import Setting, Subject, tree_setting
from lab.probes.sweeps.choose import choose, fastest
from lab.probes.sweeps.confirm import entries_of, named_file
from lab.probes.sweeps.machines import Call, Machine
from lab.probes.sweeps.measure import Tell
from lab.probes.sweeps.regimes import CARDS, Regime, settings_beside
from lab.probes.sweeps.rows import DECIDE, SCREEN, SweepWriter

Model = Literal["target", "draft"]
# Stages that are timed. Each of a draft's passes begins with what the one before it chose.
STAGES: dict[Model, tuple[str, ...]] = {"target": ("target.",), "draft": ("draft.", "tree.grow")}
WARM_STEPS = 4  # of an engine before its state counts as usual
ROOM = 256  # tokens of a session beyond its prompt
UNWRITTEN = -12345.0


def step_setting(drafts: str, context: int, batch: int = 1) -> Setting:
    """The engine of a step by the name of what it drafts ("plain", "chain-3", "dynamic-16/4/4")."""
    session = context + ROOM
    return Setting(0, batch, session) if drafts == "plain" else tree_setting(drafts, batch, session)


def pass_of(program: Program, model: Model = "target") -> Program:
    """The stages that are timed: a model's.

    Raises:
        ExperimentError: the program has none of it.
    """
    found = tuple(stage for stage in program if stage.name.startswith(STAGES[model]))
    if not any(stage.name.startswith(f"{model}.") for stage in found):
        raise ExperimentError(
            f"a step without passes of the {model}", "steps that draft, for --model draft",
            "leave plain out of --steps, or take --model target",
        )  # fmt: skip
    return found


def step_regimes(
    arch: str, passes: Mapping[str, Program], settled: Container[tuned.GemmKey] = frozenset()
) -> list[Regime]:
    """The regimes of the passes' products, by the bytes of their weights, each with every setting that competes.

    Args:
        passes: by the name of its step. settled: what is settled elsewhere.
    """
    steps: dict[tuned.GemmKey, dict[str, Product]] = {}
    counts: Counter[tuned.GemmKey] = Counter()
    for name, program in passes.items():
        for product in (one for one in products_of(program) if one.key not in settled):
            steps.setdefault(product.key, {})[name] = product
            counts[product.key] += 1

    def weight(key: tuned.GemmKey) -> int:
        return counts[key] * key.weight_rows * key.k

    found = []
    for key in sorted(steps, key=lambda one: (-weight(one), one)):
        products = steps[key]
        most = max(products.values(), key=lambda one: one.m)
        default = asdict(tiling_for(arch, most.m, key))
        settings = settings_beside(default, CARDS["gemm"].sweep(arch, most.case))
        cases = tuple({**one.case, "step": name} for name, one in products.items())
        tags = tuple(sorted({one.tag for one in products.values()}))
        found.append(Regime("gemm", key, cases, settings, tags, counts[key]))
    return found


def step_with(runner: DeviceRunner, arch: str, gpu: str, chosen: Mapping[tuned.GemmKey, tuned.Setting]) -> Program:
    """The program of a step of all slots, with these settings in place of those of their keys."""
    kept = [one for one in entries_of("gemm", gpu) if tuned.GemmKey(**one["key"]) not in chosen]
    made = [
        {"key": key._asdict(), "setting": dict(setting), "rows": "under sweep", "baked_us": 0, "best_us": 0,
         "default_us": 0}
        for key, setting in chosen.items()
    ]  # fmt: skip
    content = {
        "schema": tuned.SCHEMA, "gpu": gpu, "arch": arch, "gemm": [*kept, *made],
        "attention": entries_of("attention", gpu),
    }  # fmt: skip
    with named_file(content):
        return program_of(runner)


def program_of(runner: DeviceRunner) -> Program:
    """The program of a step of all slots."""
    return step_program(runner.emit, runner.target, runner.draft, runner.state, runner.state.sizes.n_slots)


def competing_variants(
    runners: Mapping[str, DeviceRunner], arch: str, regimes: Sequence[Regime], gpu: str, model: Model = "target"
) -> Iterator[Variant]:
    """The kernels of every setting in its step: a neighbour's setting says in which order a kernel leaves rows.

    Args:
        runners: by the name of the step.
    """
    for regime in regimes:
        assert isinstance(regime.key, tuned.GemmKey), "regimes of products"
        for name in sorted({case["step"] for case in regime.cases}):
            for setting in regime.settings:
                program = step_with(runners[name], arch, gpu, {regime.key: setting})
                yield from (launch.variant for launch in launches_of(pass_of(program, model)))


class StepUnderSweep:
    """A step whose passes are built anew for every choice of settings.

    Args:
        subject: the pair. name: of what the step drafts.
        prompts: of one length, a sequence each; read, and followed for a few steps, so that a pass finds the state of
            a usual one.
        gpu: as tuned files name it. model: whose passes.
    """

    def __init__(
        self, subject: Subject, name: str, prompts: Sequence[Sequence[int]], gpu: str, model: Model = "target"
    ) -> None:
        self.name, self.context, self.batch = name, len(prompts[0]), len(prompts)
        self.gpu, self.arch, self.model = gpu, subject.arch, model
        engine = subject.engine(step_setting(name, self.context, self.batch))
        for prompt in prompts:
            engine.add_request(prompt, GenerationConfig(ROOM // 2, ignore_eos=True))
        self.engine, self.runner = engine, engine.runner
        self._follow()
        self._programs: list[Program] = []  # what launches point to, for as long as any may run

    def _follow(self) -> None:
        """Steps until every sequence has made a few."""
        book = self.engine.book
        while book.waiting or book.reading:
            self.engine.step()
        for _ in range(WARM_STEPS):
            self.engine.step()
        if len(book.running) < self.batch:
            raise ExperimentError(
                f"{self.batch} prompts of {self.context} tokens: {len(book.running)} still run once all are read",
                f"prompts that are read before the first has its {ROOM // 2} tokens", "shorten --context or --batch",
            )  # fmt: skip

    def launches(self, chosen: Mapping[tuned.GemmKey, tuned.Setting]) -> list[Launch]:
        """Launches of the model's passes, with these settings in place of those of their keys."""
        program = step_with(self.runner, self.arch, self.gpu, chosen)
        self._programs.append(program)
        return list(launches_of(pass_of(program, self.model)))

    def logits_of(self, call: Call) -> Tensor:
        """What the last of the passes computes, of scratch that holds nothing of a pass before; places that it does
        not write hold the same in all."""
        state, own = self.runner.state, self.runner.state.draft if self.model == "draft" else None
        act, logits = (state.act, state.head.logits) if own is None else (own.act, own.head.logits)
        scratch, sums = [act.stream, act.middle, act.scaled, act.q, act.mixed, act.act, act.heads, logits], [act.sums]
        if own is not None:
            scratch += [own.hidden, own.x, own.out, own.feedback, own.next_feedback, own.scaled]
            sums.append(own.sums)
        for each in scratch:
            each.fill_(UNWRITTEN)
        for each in sums:  # are read to their full width, of which a model writes a part
            each.zero_()
        call()
        return logits.clone()


@dataclass
class StepSweep:
    """A sweep of steps under way; rows as `measure.Sweep` writes them, each regime after those that weigh more.

    Attributes:
        steps: by name. deadline: no regime begins after it, of `time.monotonic`.
    """

    machine: Machine
    writer: SweepWriter
    steps: Mapping[str, StepUnderSweep]
    tell: Tell = print
    deadline: float = float("inf")

    def run(self, regimes: Sequence[Regime]) -> bool:
        """Measures what is not there yet; whether everything is there now."""
        chosen: dict[tuned.GemmKey, tuned.Setting] = {}
        for number, regime in enumerate(regimes, start=1):
            begun = time.monotonic()
            if begun > self.deadline:
                self.tell(f"time is over: {len(regimes) - number + 1} of {len(regimes)} regimes are left")
                return False
            assert isinstance(regime.key, tuned.GemmKey), "regimes of products"
            for case in regime.cases:
                self._screen(regime, case, chosen)
            self._decide(regime, chosen)
            kept = choose(self._own(regime))
            chosen[regime.key] = kept.setting
            spent = time.monotonic() - begun
            self.tell(f"{number} of {len(regimes)} {regime.name}: {kept.reason}, {spent:.1f} s")
        return True

    def _screen(self, regime: Regime, case: Mapping[str, Any], chosen: Mapping[tuned.GemmKey, tuned.Setting]) -> None:
        cells = [self._cell(regime, SCREEN, case, setting) for setting in regime.settings]
        if not self.writer.missing(cells):
            return
        step, calls, bits = self.steps[case["step"]], [], []
        for setting in regime.settings:
            calls.append(self._call(step, regime, setting, chosen))
            bits.append(step.logits_of(calls[-1]))
        timings = self.machine.screen([[call] for call in calls])
        for setting, cell, timing, logits in zip(regime.settings, cells, timings, bits, strict=True):
            if self.writer.has(cell):
                continue
            self.writer.write(
                cell, is_default=setting == regime.default, **timing.values(),
                over_default=timing.median_us / timings[0].median_us, bits_equal=torch.equal(logits, bits[0]),
                tags=list(regime.tags), n_launches=regime.count, clocks=self.machine.clocks(),
            )  # fmt: skip

    def _decide(self, regime: Regime, chosen: Mapping[tuned.GemmKey, tuned.Setting]) -> None:
        best = fastest([row for row in self._own(regime) if row["phase"] == SCREEN])
        if best == regime.default:
            return
        for case in regime.cases:
            cell = self._cell(regime, DECIDE, case, best)
            if self.writer.has(cell):
                continue
            step = self.steps[case["step"]]
            pair = [[self._call(step, regime, one, chosen)] for one in (regime.default, best)]
            rounds = self.machine.decide(pair, self.machine.rounds)
            default, ours = ([one[i] for one in rounds] for i in (0, 1))
            self.writer.write(
                cell, is_default=False, time_us=median(ours), default_us=median(default), default=dict(regime.default),
                ratios=[b / a for a, b in rounds], clocks=self.machine.clocks(),
            )  # fmt: skip

    def _call(
        self,
        step: StepUnderSweep,
        regime: Regime,
        setting: tuned.Setting,
        chosen: Mapping[tuned.GemmKey, tuned.Setting],
    ) -> Call:
        assert isinstance(regime.key, tuned.GemmKey), "regimes of products"
        return self.machine.call(step.launches({**chosen, regime.key: setting}))

    def _cell(self, regime: Regime, phase: str, case: Mapping[str, Any], setting: tuned.Setting) -> dict[str, Any]:
        step = self.steps[case["step"]]
        shape = {**case, "context": step.context}
        shape |= {"batch": step.batch} if step.batch > 1 else {}
        return {
            "op": "gemm", "phase": phase, "regime": regime.name, "key": regime.key._asdict(), "shape": shape,
            "setting": dict(setting),
        }  # fmt: skip

    def _own(self, regime: Regime) -> list[dict[str, Any]]:
        return [row for row in self.writer.cells if row["regime"] == regime.name]


def regimes_of(runners: Mapping[str, DeviceRunner], arch: str, model: Model = "target") -> list[Regime]:
    """What is swept of steps, by their programs alone: no weights are read.

    Args:
        runners: by the name of the step.
    """
    programs = {name: program_of(runner) for name, runner in runners.items()}
    settled = set() if model == "target" else {
        product.key for one in programs.values() for product in products_of(pass_of(one))
    }  # fmt: skip
    return step_regimes(arch, {name: pass_of(one, model) for name, one in programs.items()}, settled)
