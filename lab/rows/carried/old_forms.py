"""Lines of the forms that rows had before there was one, each turned into rows of today's; nothing in them is lost.

Until schema 2 the kernels' benchmark, sweeps, the sanitizer and the gates' history each had a form of their own. The
first three carried the machine in every line, and neither moment nor fingerprint: a carried-over row has None and
"unknown" for those, and its machine is written once a run, as every command writes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.rows.environment import UNKNOWN, Environment
from lab.rows.gpus import Gpu
from lab.rows.maker import RowMaker
from lab.rows.store import SCHEMA, Row, block, of_today

_ABOUT = ("kind", "gpu", "versions", "commit", "timer")
_CLOCKS = {
    "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "power_w", "temperature.gpu": "temperature_c",
}  # fmt: skip
_TIME = {"us": "time_us", "us_p10": "time_us_p10", "us_p90": "time_us_p90", "us_samples": "time_us_samples"}


@dataclass(frozen=True)
class Form:
    """How lines of one kind become rows.

    Attributes:
        title: for people. job, kind: of the rows. name: the key whose value is the row's name.
        parameters, blocks: keys that become parameters, and blocks of them.
        values: keys of values with their names of today.
    """

    title: str
    job: str
    kind: str
    name: str
    values: Mapping[str, str]
    parameters: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


FORMS = {
    "ceiling": Form("ceiling of the kernels' benchmark", "kernels", "ceiling", "op", _same("gb_per_s", "clocks")),
    "proof": Form(
        "proof of the kernels' benchmark", "kernels", "kernel_proof", "op",
        {"cases": "n_cases", "of": "n_cases_wanted", **_same("faults", "verdict")},
    ),
    "kernel": Form(
        "timed shape of the kernels' benchmark", "kernels", "kernel", "op",
        {**_TIME, "bytes": "n_bytes", "flops": "n_flops", "peer": "library", "peer_us": "library_us",
         "peers": "libraries_us", "missing_peers": "missing_libraries", "status": "is_complete",
         **_same("floor_us", "dependent_passes", "predicted_us", "quoted_us", "clocks")},
        blocks=("shape",),
    ),
    "sweep": Form(
        "cell of a sweep", "sweep", "sweep_cell", "regime",
        {**_TIME, "bytes": "n_bytes", "count": "n_launches",
         **_same("is_default", "over_default", "bits_equal", "floor_us", "tags", "clocks", "default_us", "default",
                 "ratios", "error", "allowed", "passes", "tiles", "tokens_per_s", "acceptance_length", "n_wrong")},
        parameters=("op", "phase"), blocks=("key", "shape", "setting"),
    ),
    "sanitizer": Form(
        "card under the sanitizer", "sanitizer", "sanitizer", "op",
        {"cases": "n_cases", "launches": "n_launches", "in_form": "n_in_form", "errors": "n_errors",
         "hazards": "n_hazards", "warnings": "n_warnings", "seconds": "took_s", **_same("verdict", "reasons")},
        parameters=("tool",),
    ),
}  # fmt: skip
GATE_RUN = frozenset({"time", "mode", "result", "code", "config", "gpu", "geometry", "why"})
KNOWN = f"rows of schema {SCHEMA} or older; {', '.join(form.title for form in FORMS.values())}; a run of the gates"


@dataclass
class Carrier:
    """Carries the lines of one file over.

    Attributes:
        stem: of the file's name; names the runs of its lines.
        rows: made so far. changes: what was changed, in words, and in how many lines.
    """

    stem: str
    rows: list[Row] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    _makers: dict[str, RowMaker] = field(default_factory=dict)

    def take(self, line: Mapping[str, Any]) -> None:
        """One more line.

        Raises:
            ValueError: it is of no known form, or holds what its form does not have.
        """
        form = FORMS.get(str(line.get("kind")))
        if "schema_version" in line:
            self._row(line)
        elif set(line) == GATE_RUN:
            self._gate_run(line)
        elif form is not None and form.name in line and "gpu" in line:
            self._line(form, line)
        else:
            raise ValueError(f"no known form has the keys {', '.join(line)}"[:300])

    def _row(self, line: Mapping[str, Any]) -> None:
        now = of_today(dict(line))
        if now["schema_version"] != line["schema_version"]:
            self.changes[f"row of schema {line['schema_version']} -> row of schema {SCHEMA}"] += 1
        if now.get("timer") != line.get("timer"):
            self.changes[f"timer {line['timer']!r} -> {now['timer']!r}"] += 1
        self.rows.append(Row.model_validate(now))

    def _gate_run(self, line: Mapping[str, Any]) -> None:
        key = {name: line[name] for name in ("code", "config", "gpu", "geometry")}
        values = {"result": line["result"], "why": line["why"]}
        row = RowMaker("gates", "gates", UNKNOWN).measured("gate_run", str(line["mode"]), values, key)
        self.rows.append(row.model_copy(update={"recorded_at": line["time"]}))
        self.changes[f"run of the gates -> row of kind gate_run, schema {SCHEMA}"] += 1

    def _line(self, form: Form, line: Mapping[str, Any]) -> None:
        known = {*_ABOUT, "op", form.name, *form.parameters, *form.blocks, *form.values}
        if unknown := [key for key in line if key not in known]:
            raise ValueError(f"a {form.title} has no {', '.join(unknown)}")
        parameters = {key: line[key] for key in form.parameters if key in line}
        for key in form.blocks:
            parameters |= block(key, line.get(key) or {})
        values: dict[str, Any] = {}
        for key, name in form.values.items():
            if key in line:
                values |= _value(name, line[key])
        timer = line.get("timer")
        now = of_today({"schema_version": 1, "timer": timer})["timer"]
        row = self._maker(form, line).measured(form.kind, str(line[form.name]), values, parameters, timer=now)
        self.rows.append(row.model_copy(update={"recorded_at": None}))
        self.changes[f"{form.title} -> row of kind {form.kind}, schema {SCHEMA}"] += 1
        if now != timer:
            self.changes[f"timer {timer!r} -> {now!r}"] += 1

    def _maker(self, form: Form, line: Mapping[str, Any]) -> RowMaker:
        """The maker of the run that the line is of; a run's first line has the machine's row put before it."""
        about = json.dumps([form.job, line["gpu"], line.get("versions"), line.get("commit")])
        if about not in self._makers:
            run = f"{self.stem}-{len(self._makers) + 1}"
            self._makers[about] = RowMaker(run, form.job, UNKNOWN, shared={"gpu": line["gpu"]})
            machine = self._makers[about].machine(_machine(line))
            self.rows.append(machine.model_copy(update={"recorded_at": None, "parameters": {}}))
            self.changes["machine's record, repeated in every line -> one row of kind environment a run"] += 1
        return self._makers[about]


def _machine(line: Mapping[str, Any]) -> Environment:
    """What a line said of its machine; None for the rest."""
    versions = dict(line.get("versions") or {})
    driver, python = versions.pop("driver", None), versions.pop("python", None)
    return Environment(
        fingerprint=UNKNOWN, system=None, machine=None, cpu=None, n_cores=None, python=python, packages=versions,
        cuda=None, gpus=[Gpu(name=str(line["gpu"]), driver=driver)] if driver else [], no_gpu_reason=None,
        commit=line.get("commit"), dirty=None, source=None, argv=[],
    )  # fmt: skip


def _value(name: str, value: Any) -> dict[str, Any]:
    """One value of an old line as values of a row."""
    if name == "clocks":
        return block(name, {_CLOCKS.get(key, key): _without_unit(text) for key, text in value.items()})
    if name == "is_complete":
        if value not in ("measured", "incomplete"):
            raise ValueError(f"status {value!r} is neither 'measured' nor 'incomplete'")
        return {name: value == "measured"}
    return block(name, value) if isinstance(value, Mapping) else {name: value}


def _without_unit(text: Any) -> Any:
    """`1980.0` of "1980 MHz", whose unit is in the name now; what is no number stays as it is."""
    try:
        return float(str(text).partition(" ")[0])
    except ValueError:
        return text
