"""The gates' configuration: one TOML with every context, length and threshold (docs/requirements.md R-132 to R-134)."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lab.errors import ExperimentError
from lab.options.values import USUAL_PEERS
from lab.probes.bench.invariants import INVARIANTS
from lab.probes.bench.rounds import WARM_STEPS
from lab.probes.bench.scenario import MOST_DRAFTS, Point
from lab.rows.configuration import packaged, read_configuration
from lab.rows.gates import Threshold

CONFIG = "gates.toml"
MICRO_STEPS_VARIABLE = "EAGLE3_MICRO_STEPS"  # in place of every mode's own (docs/requirements.md R-116)
RunKind = Literal["micro", "full"]
LEAST_STEPS = 4  # of a run
SLACK = 1.02  # tokens beyond the expected: a walk may commit a little more a step than the dial says


class Length(BaseModel):
    """How long a run is.

    Attributes:
        steps: decode steps with every slot in use that the speculative engine must make in each round.
        rounds, warmup: measured rounds, and rounds before them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(ge=LEAST_STEPS)
    rounds: int = Field(ge=1)
    warmup: int = Field(ge=0)


class Gate(BaseModel):
    """One threshold on a value of the speculative engine's row, or of the baseline's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    of: Literal["spec", "baseline"]
    value: str
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _has_a_bound(self) -> Gate:
        if self.at_least is None and self.at_most is None:
            raise ValueError("a gate needs at_least or at_most")
        return self


class Mode(BaseModel):
    """One point of the gates, such as "single32k".

    Attributes:
        acceptance_length: tokens a step that the pair is dialled to; a trained pair's expected one.
        micro, full: lengths of the two kinds of run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    context: int = Field(ge=2)
    batch: int = Field(ge=1)
    spec: int = Field(ge=1, le=MOST_DRAFTS)
    acceptance_length: float = Field(ge=1.0)
    peers: tuple[str, ...] = USUAL_PEERS
    micro: Length
    full: Length
    gate: tuple[Gate, ...] = Field(min_length=1)

    @property
    def point(self) -> Point:
        """As the bench names it."""
        return Point(self.context, self.batch)

    def length(self, kind: RunKind) -> Length:
        """The length of that kind of run."""
        return self.micro if kind == "micro" else self.full

    def tokens(self, kind: RunKind, *, is_planted: bool) -> int:
        """Tokens a request, enough for the steps asked for.

        A planted pair commits what it is dialled to; a trained one may commit every draft of every step.
        """
        a_step = self.acceptance_length * SLACK if is_planted else self.spec + 1
        return max(16, math.ceil((self.length(kind).steps + WARM_STEPS + 2) * a_step))

    def thresholds(self, kind: RunKind, invariants: tuple[str, ...]) -> list[tuple[Gate, Threshold]]:
        """Every gate of a run, those on its length, its tokens and its invariants included."""
        steps = Gate(name="steps decoded", of="spec", value="n_steps", at_least=self.length(kind).steps)
        return [(gate, self._threshold(gate)) for gate in (*self.gate, steps, *_always(invariants))]

    def _threshold(self, gate: Gate) -> Threshold:
        row = self.point.name(self.spec if gate.of == "spec" else 0)
        return Threshold(
            name=f"{self.name} {gate.of}: {gate.name}", kind="bench", row=row, value=gate.value,
            at_least=gate.at_least, at_most=gate.at_most,
        )  # fmt: skip


class GatesConfig(BaseModel):
    """The whole file; unknown keys are refused.

    Attributes:
        device: "cuda" or "cpu": what the thresholds are of.
        green_in_a_row: micro runs that a full one waits for.
        invariants: those of performance mode that must hold (`lab.probes.bench.invariants`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    geometry: str
    pair: Literal["planted", "shipped"] = "planted"
    device: Literal["cuda", "cpu"]
    dtype: str = "bfloat16"
    seed: int = 0
    green_in_a_row: int = Field(default=3, ge=1)
    invariants: tuple[str, ...]
    mode: tuple[Mode, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_right(self) -> GatesConfig:
        unknown = [name for name in self.invariants if name not in INVARIANTS]
        if unknown:
            raise ValueError(f"no invariant {unknown[0]!r} among {', '.join(INVARIANTS)}")
        names = [mode.name for mode in self.mode]
        if len(set(names)) < len(names):
            raise ValueError(f"two modes of one name among {names}")
        return self

    @property
    def hash(self) -> str:
        """Twelve hex digits over every setting; comments and order of keys do not count, the geometry stands apart."""
        values = self.model_dump(mode="json", exclude={"geometry"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def find(self, name: str) -> Mode:
        """The mode of that name.

        Raises:
            ExperimentError: there is none.
        """
        for mode in self.mode:
            if mode.name == name:
                return mode
        raise ExperimentError(f"no mode {name!r}", ", ".join(mode.name for mode in self.mode), "name one of these")


def _always(invariants: tuple[str, ...]) -> list[Gate]:
    """What no threshold of speed can buy: the planted tokens, the baseline's tokens, the invariants."""
    values = {"n_wrong_requests": "requests with wrong tokens"}
    values |= {f"invariants.{name}": name.replace("_", " ") for name in invariants}
    always = [Gate(name="requests unlike the baseline's", of="spec", value="n_divergent", at_most=0)]
    always += [Gate(name=name, of="spec", value=value, at_most=0) for value, name in values.items()]
    values.pop("invariants.single_token_steps", None)  # a baseline's every step is one
    return always + [Gate(name=name, of="baseline", value=value, at_most=0) for value, name in values.items()]


def packaged_gates(geometry: str | None = None) -> Path:
    """The configuration that is used when none is named: a geometry's own, where it has one."""
    own = packaged(f"gates-{geometry}.toml")
    return own if geometry is not None and own.is_file() else packaged(CONFIG)


def load_gates(path: Path, geometry: str | None = None) -> GatesConfig:
    """The configuration in a TOML file, for its own geometry or another; micro runs as long as the environment says.

    Raises:
        ExperimentError: the file is absent, is not TOML, or holds an unknown key or a value of the wrong type; or
            the environment gives no number of steps.
    """
    instead = {"geometry": geometry} if geometry else {}
    config = read_configuration(path, GatesConfig, {"mode": Mode, "mode.gate": Gate}, like=CONFIG, **instead)
    steps = os.environ.get(MICRO_STEPS_VARIABLE)
    return _with_micro_steps(config, steps) if steps else config


def _with_micro_steps(config: GatesConfig, text: str) -> GatesConfig:
    """Another configuration, whose green runs are counted apart, since its hash is another."""
    if not text.isdigit() or int(text) < LEAST_STEPS:
        raise ExperimentError(
            f"{MICRO_STEPS_VARIABLE}={text!r}", f"a number of steps, at least {LEAST_STEPS}",
            f"unset {MICRO_STEPS_VARIABLE}, or correct it",
        )  # fmt: skip
    modes = [
        mode.model_copy(update={"micro": mode.micro.model_copy(update={"steps": int(text)})}) for mode in config.mode
    ]
    return config.model_copy(update={"mode": tuple(modes)})
