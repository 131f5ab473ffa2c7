"""What `-p NAME=VALUE` changes: parameters of the notebooks of a night, or of a single one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.errors import ExperimentError
from lab.night import jobs
from lab.night.jobs import NightConfig
from lab.night.parameters import check_parameters, find_notebook, parse_value, read_parameters


def one_notebook(notebook: str, settings: Sequence[str], timeout_s: float) -> NightConfig:
    """The configuration of a night with a single job; `settings` are `name=value` texts.

    Raises:
        ExperimentError: a setting is not `name=value`, or its name or type is wrong.
    """
    specs = {spec.name: spec for spec in read_parameters(find_notebook(notebook))}
    given: dict[str, Any] = {}
    for setting in settings:
        name, text = split_setting(setting)
        given[name] = parse_value(specs[name], text) if name in specs else text
    check_parameters(list(specs.values()), given)
    return NightConfig(job=[jobs.JobConfig(notebook=notebook, parameters=given, timeout_s=timeout_s)])


def with_settings(entries: list[jobs.JobConfig], settings: tuple[str, ...]) -> list[jobs.JobConfig]:
    """The jobs, each `name=value` in the place of that parameter wherever a notebook declares it.

    `notebook.name=value` is for the jobs of that notebook alone.

    Raises:
        ExperimentError: a setting that no notebook of the night declares, or that a job's grid already varies.
    """
    specs = [{spec.name: spec for spec in read_parameters(find_notebook(entry.notebook))} for entry in entries]
    given: list[dict[str, Any]] = [{} for _ in entries]
    for setting in settings:
        where, dot, name = setting.partition("=")[0].rpartition(".")
        name, text = split_setting(setting.removeprefix(where + dot))
        takers = [i for i, known in enumerate(specs) if name in known and where in ("", entries[i].notebook)]
        varied = [entries[i].notebook for i in takers if name in entries[i].grid]
        if not takers or varied:
            what = f"the grid of {varied[0]} varies it" if varied else "no notebook of this night has it"
            known = ", ".join(sorted(set().union(*specs) - set(jobs.PLACE_PARAMETERS) - set(jobs.PAIR_PARAMETERS)))
            raise ExperimentError(f"-p {setting}: {what}", known, "correct the name; nothing was started")
        for i in takers:
            given[i][name] = parse_value(specs[i][name], text)
    return [
        entry.model_copy(update={"parameters": {**entry.parameters, **own}})
        for entry, own in zip(entries, given, strict=True)
    ]


def split_setting(setting: str) -> tuple[str, str]:
    """Name and text of `name=value`.

    Raises:
        ExperimentError: another form, or one of the pair, which has options of its own.
    """
    name, equals, text = setting.partition("=")
    if not equals:
        raise ExperimentError(f"-p {setting!r} has no '='", "-p name=value", "write the name, =, and the value")
    if name in jobs.PAIR_PARAMETERS:
        raise ExperimentError(f"-p {name}=... was given", f"--{name} PATH", f"use --{name} instead")
    return name, text
