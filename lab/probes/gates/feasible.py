"""What the bytes of a step allow: the most speed-up at every acceptance length, and whether a gate can hold at all.

No GPU is needed: shapes, a read rate and a routing say the least bytes of a plain and of a speculative step. A step of
either kind is taken at the same share of that rate, so a speed-up is at most length * plain bytes / step bytes, and a
plain step's tokens a second are at most those of its floor. Derived here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lab.options.formats import Formats
from lab.pairs.planted import PlantedGeometry, share_for_length
from lab.probes.bench.floors import UNIFORM, Floor, Routing, step_floor
from lab.probes.bench.scenario import Point
from lab.probes.ceilings import ReadRate
from lab.probes.gates.config import Gate, Mode

ITEMSIZE = 2  # of values that have no format of their own, in weights and cache: bf16
LENGTH_STEP = 0.5  # between acceptance lengths that are told
BOUNDS, GATE = "feasible_bounds", "feasible_gate"  # kinds of rows
Word = Literal["allowed", "beyond", "not of bytes"]


@dataclass(frozen=True)
class Steps:
    """The least that a plain step and one of `k` drafts read at a point, under one routing.

    Attributes:
        length: acceptance length that gates are judged at.
        routing: of the text; a draft that is wrong takes experts of its own, so fewer rows repeat where fewer are
            accepted. What a run had holds at every length.
        rate: of reads from memory.
        formats: of what is read, by the name that `step_floor` has for it; what is not named is as stored, in bf16.
    """

    geometry: PlantedGeometry
    point: Point
    k: int
    length: float
    rate: ReadRate
    routing: Routing = UNIFORM
    formats: Formats = field(default_factory=Formats)

    @property
    def plain(self) -> Floor:
        """The floor of a plain step."""
        return self._floor(0, self.routing)

    def at(self, length: float) -> Floor:
        """The floor of a step with drafts that commits `length` tokens on average."""
        return self._floor(self.k, self._routing_at(length))

    def speedup(self, length: float) -> float:
        """The most there can be."""
        return self.at(length).largest_speedup(length)

    @property
    def lengths(self) -> list[float]:
        """Acceptance lengths that the drafts can reach, 1.0 first."""
        return [1.0 + LENGTH_STEP * i for i in range(round(self.k / LENGTH_STEP) + 1)]

    @property
    def tokens_per_s(self) -> float:
        """The most of plain decoding, over the batch."""
        return 1e3 * self.point.batch / self.plain.ms(self.rate.gb_per_s)

    def needed_length(self, speedup: float) -> float | None:
        """The least of `lengths` at which bytes allow a speed-up; None where they do at none."""
        return next((length for length in self.lengths if self.speedup(length) >= speedup), None)

    def experts_read(self, rows: int) -> float | None:
        """Distinct experts a layer and pass of `rows` rows a sequence; None without experts."""
        experts = self.geometry.target.block.experts
        return None if experts is None else self._routing_at(self.length).n_read(experts, rows, self.point.batch)

    def _routing_at(self, length: float) -> Routing:
        return replace(self.routing, repeated=self.routing.repeated * share_for_length(length, self.k))

    def _floor(self, drafts: int, routing: Routing) -> Floor:
        geometry = self.geometry
        return step_floor(
            geometry.target, geometry.draft, k=drafts, batch=self.point.batch, cached=self.point.context,
            itemsize=ITEMSIZE, routing=routing, **self.formats,
        )  # fmt: skip

    @property
    def how(self) -> str:
        """The routing in words; empty without experts."""
        if self.geometry.target.block.experts is None:
            return ""
        if self.routing.measured:
            return "experts as a run chose them"
        repeated = self.routing.repeated
        return f"{repeated:.0%} of tokens repeat their experts" if repeated else "any experts alike likely"

    @property
    def parameters(self) -> dict[str, Any]:
        """Where its rows stand."""
        return {
            "geometry": self.geometry.name, "gpu": self.rate.gpu, "context": self.point.context,
            "batch": self.point.batch, "spec_k": self.k, "routing": self.how, **self.formats,
        }  # fmt: skip

    def values(self) -> dict[str, Any]:
        """What its row says."""
        rate, experts, spec = self.rate.gb_per_s, self.geometry.target.block.experts, self.at(self.length)
        distinct = {} if experts is None else {
            "experts_read_plain": self.experts_read(1), "experts_read": self.experts_read(self.k + 1),
            "experts_in_a_layer": experts.n,
        }  # fmt: skip
        return {
            "acceptance_length": self.length, "step_over_base_bound": spec.step_over_base,
            "plain_floor_ms": self.plain.ms(rate), "floor_ms": spec.ms(rate),
            "decode_tokens_per_s_bound": self.tokens_per_s, "acceptance_lengths": self.lengths,
            "speedup_bounds": [self.speedup(length) for length in self.lengths], "ceiling_gb_per_s": rate,
            "ceiling_is_measured": self.rate.is_measured, **distinct,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people."""
        experts, rate, spec = self.geometry.target.block.experts, self.rate.gb_per_s, self.at(self.length)
        title = f"{self.point} spec-{self.k}"
        if experts is not None:
            read = f"{self.experts_read(1):.1f} of {experts.n} a layer in a plain step"
            title += f", {self.how}: {read}, {self.experts_read(self.k + 1):.1f} in a verify step"
        floors = f"{self.plain.ms(rate):.3f} ms plain ({self.tokens_per_s:.0f} tokens a second), {spec.ms(rate):.3f} ms"
        bounds = [f"{self.speedup(length):.2f}x at {length:.1f}" for length in self.lengths]
        return [
            title,
            f"  floors: {floors} with drafts, step/base {spec.step_over_base:.3f} at {self.length:.1f} tokens a step",
            f"  most speed-up: {', '.join(bounds)}",
        ]


@dataclass(frozen=True)
class Possible:
    """A gate against what bytes allow.

    Attributes:
        word: whether the hardware allows the threshold; "not of bytes" where bytes do not decide.
        best: what is possible: the most of a value that must be large, the least of one that must be small.
        detail: why, in words.
        measured: the value that stored rows have, if any do.
    """

    mode: str
    gate: Gate
    steps: Steps
    word: Word
    best: float | None
    detail: str
    measured: float | None = None

    @property
    def name(self) -> str:
        """As `eagle3lab gates` names it."""
        return f"{self.mode} {self.gate.of}: {self.gate.name}"

    @property
    def line(self) -> str:
        """For people."""
        verdict = {"allowed": "the hardware allows it", "beyond": "the hardware does not allow it"}.get(self.word)
        told = self.detail if verdict is None else f"{verdict}: {self.detail}"
        measured = "" if self.measured is None else f"; measured {self.measured:.4g}"
        return f"{self.word:12s} {self.name} ({self.threshold}): {told}{measured}"

    @property
    def threshold(self) -> str:
        """The bound that the gate sets, in words."""
        low, high = self.gate.at_least, self.gate.at_most
        return f"at least {low:g}" if low is not None else f"at most {high:g}"

    def values(self) -> dict[str, Any]:
        """What its row says."""
        is_allowed = None if self.word == "not of bytes" else self.word == "allowed"
        return {
            "allowed": is_allowed, "best": self.best, "at_least": self.gate.at_least, "at_most": self.gate.at_most,
            "value": self.gate.value, "measured": self.measured, "detail": self.detail,
        }  # fmt: skip


def judged(mode: Mode, gate: Gate, steps: Steps, measured: float | None = None) -> Possible:
    """A gate of a mode against the least steps of its point."""
    best, detail = _best(mode, gate, steps)
    word: Word = "not of bytes"
    if best is not None:
        reached = gate.at_least is None or best >= gate.at_least
        word = "allowed" if reached and (gate.at_most is None or best <= gate.at_most) else "beyond"
    return Possible(mode.name, gate, steps, word, best, detail, measured)


def _best(mode: Mode, gate: Gate, steps: Steps) -> tuple[float | None, str]:
    """The best possible value, and what it comes from; None where bytes do not decide."""
    if gate.value in ("speedup", "speedup_at_dial"):
        best, wanted = steps.speedup(mode.acceptance_length), gate.at_least or 0.0
        told = f"bound {best:.2f}x at {mode.acceptance_length:.1f} tokens a step"
        if best < wanted:
            needed = steps.needed_length(wanted)
            none = f"not even {steps.k + 1} tokens a step would do"
            told += f"; {none if needed is None else f'{needed:.1f} would do'}"
        return best, told
    if gate.value == "step_over_base":
        over = steps.at(mode.acceptance_length).step_over_base
        return over, f"a step reads {over:.3f} times a plain step's bytes"
    if gate.value == "decode_tokens_per_s" and gate.of == "baseline":
        best, n_bytes = steps.tokens_per_s, steps.plain.base_bytes
        return best, f"bound {best:.1f} tokens a second, {n_bytes / 1e9:.2f} GB a step"
    if gate.value == "acceptance_length":
        most = steps.k + 1.0
        return most, f"{steps.k} drafts commit at most {most:.0f} tokens a step; the draft decides"
    return None, f"{gate.value} is not a matter of bytes"
