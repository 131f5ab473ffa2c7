"""Times regimes: every setting beside the default, then the fastest against it; rows as they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels import Case, Launch, Tensors, case_id, proof, tuned
from eagle3core.kernels.gemm import workspace, workspace_bytes
from lab.errors import NotComparable
from lab.probes.ceilings import known_gb_per_s
from lab.probes.sweeps.choose import fastest
from lab.probes.sweeps.machines import Call, Machine, launches_of, operands, same_bits
from lab.probes.sweeps.regimes import CARDS, Regime
from lab.probes.sweeps.rows import AGAINST, DECIDE, JOINT, SCREEN, TILES, SweepWriter

Tell = Callable[[str], None]
TILE_COUNTS = ("total", "span_empty", "mask_empty", "executed")  # docs/requirements.md R-109


@dataclass
class Sweep:
    """A sweep under way.

    Attributes:
        deadline: no batch begins after it, of `time.monotonic`.
        counts_tiles: whether attention's tiles are counted, by kernels of their own.
        is_ab: whether attention is held against its plain reference under the 2x rule first.
    """

    machine: Machine
    writer: SweepWriter
    tell: Tell = print
    deadline: float = float("inf")
    counts_tiles: bool = False
    is_ab: bool = False

    def __post_init__(self) -> None:
        self._scratch: tuple[Tensor, Tensor] | None = None

    def run(self, regimes: Sequence[Regime]) -> bool:
        """Measures what is not there yet; whether everything is there now.

        Raises:
            NotComparable: the file's rows stand beside another default than the one used now.
        """
        for regime in regimes:
            self._check_default(regime)
        for number, regime in enumerate(regimes, start=1):
            begun = time.monotonic()
            if begun > self.deadline:
                self.tell(f"time is over: {len(regimes) - number + 1} of {len(regimes)} regimes are left")
                return False
            for case in regime.cases if self.is_ab and regime.op == "attention" else ():
                self.hold_against(regime, case)
            for case in regime.cases:
                self._screen(regime, case)
            self._decide(regime)
            for case in regime.cases if self.counts_tiles and regime.op == "attention" else ():
                self.count_tiles(regime, case)
            spent = time.monotonic() - begun
            self.tell(f"{number} of {len(regimes)} {regime.op} {regime.name}: {self._line(regime)}, {spent:.1f} s")
        return True

    def _check_default(self, regime: Regime) -> None:
        for row in self._own(regime):
            if row["phase"] == SCREEN and row["is_default"] and row["setting"] != regime.default:
                raise NotComparable(
                    f"{self.writer.file.name} measured {regime.name} beside the default {row['setting']}",
                    f"the default of now, {dict(regime.default)}",
                    "begin a new file with --out; EAGLE3_GEMM_TUNED=none goes on beside the rule",
                )

    def _screen(self, regime: Regime, case: Case) -> None:
        """Every setting that has no row, in one batch with the default."""
        cells = [self.cell(regime, SCREEN, case, setting) for setting in regime.settings]
        missing = self.writer.missing(cells)
        if not missing:
            return
        settings = [regime.default, *(one["setting"] for one in missing if one["setting"] != regime.default)]
        rotation = self._rotation(regime.op, case)
        bits = self._bits(regime.op, case, rotation[0][0], settings)
        timings = self.machine.screen([self._calls(regime.op, case, rotation, setting) for setting in settings])
        for setting, timing, equal in zip(settings, timings, bits, strict=True):
            cell = self.cell(regime, SCREEN, case, setting)
            if self.writer.has(cell):
                continue
            cost, known = CARDS[regime.op].cost(case), known_gb_per_s(self.machine.gpu)
            self.writer.write(
                cell, is_default=setting == regime.default, **timing.values(),
                over_default=timing.median_us / timings[0].median_us, bits_equal=equal, n_bytes=cost.bytes,
                floor_us=cost.floor_us(known) if known else None, tags=list(regime.tags), n_launches=regime.count,
                clocks=self.machine.clocks(),
            )  # fmt: skip

    def _decide(self, regime: Regime) -> None:
        """The fastest setting against the default, on every shape, in rounds that take turns."""
        screened = [row for row in self._own(regime) if row["phase"] == SCREEN]
        best = fastest(screened)
        if best == regime.default:
            return
        for case in regime.cases:
            cell = self.cell(regime, DECIDE, case, best)
            if self.writer.has(cell):
                continue
            rotation = self._rotation(regime.op, case)
            pair = [self._calls(regime.op, case, rotation, one) for one in (regime.default, best)]
            rounds = self.machine.decide(pair, self.machine.rounds)
            default, ours = ([one[i] for one in rounds] for i in (0, 1))
            self.writer.write(
                cell, is_default=False, time_us=median(ours), default_us=median(default), default=dict(regime.default),
                ratios=[b / a for a, b in rounds], clocks=self.machine.clocks(),
            )  # fmt: skip

    def joint(self, regimes: Sequence[Regime], orders: Sequence[tuple[int, int]]) -> None:
        """Other orders of sums beside the present one, on every regime: such a parameter has one value for all."""
        for regime, case in ((one, case) for one in regimes for case in one.cases):
            cases = [{**case, "order": order} for order in orders]
            cells = [self.cell(regime, JOINT, case, _order(one)) for one in cases]
            if time.monotonic() > self.deadline or not self.writer.missing(cells):
                continue
            rotation = self._rotation(regime.op, case)
            alternatives = [self._calls(regime.op, one, rotation, {}) for one in (case, *cases)]
            default, *others = self.machine.screen(alternatives)
            for cell, timing in zip(cells, others, strict=True):
                if not self.writer.has(cell):
                    self.writer.write(
                        cell, is_default=False, **timing.values(), default_us=default.median_us,
                        over_default=timing.median_us / default.median_us, clocks=self.machine.clocks(),
                    )  # fmt: skip

    def hold_against(self, regime: Regime, case: Case) -> None:
        """The default's numbers beside those of plain attention, one precision up (docs/requirements.md R-112)."""
        cell = self.cell(regime, AGAINST, case, regime.default)
        if self.writer.has(cell):
            return
        inputs = operands(regime.op, case, 0, self.machine.device)
        outputs = CARDS[regime.op].outputs(case, inputs)
        self.machine.call(self._launches(regime.op, case, inputs, outputs, regime.default))()
        [found] = proof.deviations(CARDS[regime.op], case, inputs, outputs)
        self.tell(f"[EAGLE3][FMHA_AB] {regime.name} error {found.error:.3g} allowed {found.allowed:.3g}")
        self.writer.write(cell, is_default=True, error=found.error, allowed=found.allowed, passes=bool(found.passes))

    def count_tiles(self, regime: Regime, case: Case) -> None:
        """One launch of the default that counts its tiles; they are brought to the host once, after it."""
        cell = self.cell(regime, TILES, case, regime.default)
        if self.writer.has(cell):
            return
        counting = {**case, "counting": True}
        inputs = operands(regime.op, case, 0, self.machine.device)
        outputs = CARDS[regime.op].outputs(counting, inputs)
        self.machine.call(self._launches(regime.op, counting, inputs, outputs, regime.default))()
        counts = dict(zip(TILE_COUNTS, outputs["counters"].tolist(), strict=True))
        self.tell(f"[EAGLE3][FMHA_TILE_STATS] {regime.name} {case_id(counts)}")
        self.writer.write(cell, is_default=True, tiles=counts)

    def cell(self, regime: Regime, phase: str, case: Case, setting: tuned.Setting) -> dict[str, Any]:
        """What tells one measurement from another."""
        shape = {name: value for name, value in case.items() if value is not None}
        return {
            "op": regime.op, "phase": phase, "regime": regime.name, "key": regime.key._asdict(), "shape": shape,
            "setting": dict(setting),
        }  # fmt: skip

    def _own(self, regime: Regime) -> list[dict[str, Any]]:
        return [row for row in self.writer.cells if row["op"] == regime.op and row["regime"] == regime.name]

    def _line(self, regime: Regime) -> str:
        screened = [row for row in self._own(regime) if row["phase"] == SCREEN]
        best = min(row["over_default"] for row in screened)
        unequal = sum(not row["bits_equal"] for row in screened)
        bits = f", {unequal} WITH OTHER BITS" if unequal else ""
        return f"{len(regime.settings)} settings, fastest {best:.3f} of the default{bits}"

    # -- what is timed

    def _rotation(self, op: str, case: Case) -> list[tuple[Tensors, Tensors]]:
        copies = self.machine.copies(CARDS[op].cost(case).bytes)
        made = [operands(op, case, seed, self.machine.device) for seed in range(copies)]
        return [(inputs, CARDS[op].outputs(case, inputs)) for inputs in made]

    def _calls(
        self, op: str, case: Case, rotation: Sequence[tuple[Tensors, Tensors]], setting: tuned.Setting
    ) -> list[Call]:  # fmt: skip
        return [self.machine.call(self._launches(op, case, inputs, outputs, setting)) for inputs, outputs in rotation]

    def _launches(
        self, op: str, case: Case, inputs: Tensors, outputs: Tensors, setting: tuned.Setting
    ) -> list[Launch]:  # fmt: skip
        if op == "gemm":
            n_bytes = workspace_bytes(case["m"], case["k"])
            if self._scratch is None or 4 * self._scratch[0].numel() < n_bytes:
                self._scratch = workspace(self.machine.device, n_bytes)
        return launches_of(op, self.machine.arch, case, inputs, outputs, setting, self._scratch)

    def _bits(self, op: str, case: Case, inputs: Tensors, settings: Sequence[tuned.Setting]) -> list[bool]:
        """Whether every setting gives the first one's bits."""
        found: list[Mapping[str, Tensor]] = []
        for setting in settings:
            outputs = CARDS[op].outputs(case, inputs)
            self.machine.call(self._launches(op, case, inputs, outputs, setting))()
            if self.machine.device.type == "cuda":
                torch.cuda.synchronize()
            found.append(outputs)
        return [same_bits(one, found[0]) for one in found]


def _order(case: Case) -> dict[str, int]:
    splits, streams = case["order"]
    return {"splits": splits, "streams": streams}
