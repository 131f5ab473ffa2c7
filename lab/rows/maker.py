"""Makes the rows of one run: each says where it was made, on which machine, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.rows.environment import Environment
from lab.rows.store import Row, utc_now

ENVIRONMENT_KIND, MACHINE = "environment", "machine"


@dataclass(frozen=True)
class RowMaker:
    """Makes rows of one run.

    Attributes:
        run: name of the run. job: the command or the night's job that makes them.
        environment: fingerprint of the machine.
        notebook: the notebook, where there is one; else the job stands for it.
        shared: parameters of every row.
    """

    run: str
    job: str
    environment: str
    notebook: str = ""
    shared: Mapping[str, Any] = field(default_factory=dict)

    def measured(
        self,
        kind: str,
        name: str,
        values: Mapping[str, Any],
        parameters: Mapping[str, Any] | None = None,
        *,
        timer: str | None = None,
        warmup: int | None = None,
        repeats: int | None = None,
    ) -> Row:
        """A measured row."""
        place = self._place(kind, name, parameters or {})
        return Row(**place, values=dict(values), timer=timer, warmup=warmup, repeats=repeats)

    def missing(self, kind: str, name: str, reason: str, parameters: Mapping[str, Any] | None = None) -> Row:
        """A row that says why there is no measurement."""
        return Row(**self._place(kind, name, parameters or {}), status="missing", reason=reason)

    def not_asked(self, kind: str, name: str, reason: str, parameters: Mapping[str, Any] | None = None) -> Row:
        """A row that says the settings left a measurement out: nothing is wrong, and nothing was proven either."""
        return Row(**self._place(kind, name, parameters or {}), status="not asked", reason=reason)

    def machine(self, environment: Environment) -> Row:
        """The run's one row of kind "environment": the whole record as JSON text."""
        return self.measured(ENVIRONMENT_KIND, MACHINE, {"record": [environment.model_dump_json()]})

    def _place(self, kind: str, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "run": self.run, "job": self.job, "notebook": self.notebook or self.job, "kind": kind, "name": name,
            "parameters": {**parameters, **self.shared}, "environment": self.environment, "recorded_at": utc_now(),
        }  # fmt: skip


def machines_of(rows: Iterable[Row]) -> dict[str, Environment]:
    """The machine's record of every run among `rows` that wrote one, by the run's name."""
    found = {}
    for row in rows:
        record = row.values.get("record") if row.kind == ENVIRONMENT_KIND else None
        if isinstance(record, list) and record:
            found[row.run] = Environment.model_validate_json(str(record[0]))
    return found
