"""Processes that have just begun, one after the other, and a row of each kind of start.

On a GPU a kind is also what there is of its kernels: *empty*, no cache; *kept*, the cache that such a process left;
*archive*, no cache and one file of them. Elsewhere no kernels run, and there is one kind. A process that only imports
goes first, so that Python's own files are in memory alike for all.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3core.backend import processors
from eagle3core.kernels import cubins
from lab.errors import LabError, RunFailed
from lab.probes.start.parts import BEFORE_A_TOKEN, PARTS
from lab.rows.maker import RowMaker
from lab.rows.store import Row, block

KIND, FILE, TIMER = "start", "start.jsonl", "monotonic"
PLAIN_TORCH, EMPTY, KEPT, ARCHIVE = "plain torch", "empty", "kept", "archive"
_PATIENCE_S = 600.0  # for one process
_IMPORTS_ALONE = ("-c", "import lab.probes.start.parts")


@dataclass(frozen=True)
class StartPlan:
    """What is started.

    Attributes:
        ks: drafts a step, one kind of start each. context: tokens of the prompt. batch: slots of the engine.
        rounds: processes of each kind.
    """

    geometry: str
    ks: tuple[int, ...]
    context: int
    batch: int
    rounds: int
    dtype: str
    device: str

    def asked(self, k: int) -> dict[str, Any]:
        """What a process is told."""
        shape = {"geometry": self.geometry, "context": self.context, "batch": self.batch}
        return {**shape, "k": k, "device": self.device, "dtype": self.dtype}


def name_of(geometry: str, k: int, kernels: str) -> str:
    """A row's name."""
    return f"{geometry}/{f'spec-{k}' if k else 'plain'}/{kernels}"


def measure_starts(
    plan: StartPlan, maker: RowMaker, keep: Callable[[Row], None], tell: Callable[[str], None]
) -> list[Row]:
    """A row a kind of start, each kept as soon as it is made; one that failed is missing, with its reason."""
    _process([*_IMPORTS_ALONE], {})
    rows = []
    for k in plan.ks:
        for kernels, environments in _kinds(plan, k):
            name, parameters = name_of(plan.geometry, k, kernels), {**plan.asked(k), "kernels": kernels}
            try:
                runs = [one_start(plan.asked(k), environment) for environment in environments]
            except LabError as error:
                row = maker.missing(KIND, name, str(error), parameters)
            else:
                values = values_of(runs)
                row = maker.measured(KIND, name, values, parameters, timer=TIMER, warmup=0, repeats=len(runs))
                tell(line_of(name, values))
            keep(row)
            rows.append(row)
    return rows


def one_start(asked: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """What a process of its own says of its first request.

    Raises:
        RunFailed: it ended without an answer, or took longer than ten minutes.
    """
    command = ["-m", "lab.probes.start.first_request", repr(time.monotonic()), json.dumps(dict(asked))]
    answer: dict[str, Any] = json.loads(_process(command, environment).splitlines()[-1])
    return answer


def _process(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True,
            check=False, timeout=_PATIENCE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunFailed(
            "a process took longer than ten minutes to its first token", "a start", "look at it by itself"
        ) from error
    if done.returncode:
        words = done.stderr.strip().splitlines()[-3:]
        raise RunFailed(
            f"a process ended with {done.returncode}: {' '.join(words)}", "a first token", "run the same command again"
        )
    return done.stdout


def _kinds(plan: StartPlan, k: int) -> Iterator[tuple[str, Iterator[dict[str, str]]]]:
    """Kinds of start by what there is of kernels, with the environment of each process of that kind."""
    if plan.device != "cuda":
        yield PLAIN_TORCH, iter([{}] * plan.rounds)
        return
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        without = {cubins.CUBINS_VARIABLE: ""}
        caches = [{**without, cubins.CACHE_VARIABLE: str(folder / f"cache{i}")} for i in range(plan.rounds)]
        yield EMPTY, iter(caches)
        yield KEPT, iter(caches)
        archive = _archive(plan, k, folder, caches[0])
        nowhere = [str(folder / f"none{i}") for i in range(plan.rounds)]
        yield ARCHIVE, iter([{cubins.CUBINS_VARIABLE: str(archive), cubins.CACHE_VARIABLE: each} for each in nowhere])


def _archive(plan: StartPlan, k: int, folder: Path, environment: Mapping[str, str]) -> Path:
    """The kernels of a start in one file, made by `eagle3lab warm` of what such a start left in its cache."""
    path = folder / "kernels.zip"
    wanted = {"--geometry": plan.geometry, "--spec": k, "--batch": plan.batch, "--archive": path}
    _process(["-m", "lab", "warm", *(str(word) for pair in wanted.items() for word in pair)], environment)
    return path


def values_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Row values of a kind: medians of the parts, of the moment of the first token and of the second."""
    first = [sum(run["parts"].get(part, 0.0) for part in BEFORE_A_TOKEN) for run in runs]
    second = [sum(run["parts"].values()) for run in runs]
    parts = {
        part: statistics.median(run["parts"][part] for run in runs)
        for part in PARTS
        if all(part in run["parts"] for run in runs)
    }
    facts = {name: runs[0][name] for name in ("n_kernels", "n_compiled", "n_compilers", "compilers_s", "path")}
    return {
        "first_token_s": statistics.median(first), "first_token_s_samples": first,
        "second_token_s": statistics.median(second), **block("part_s", parts), **facts,
        "n_processors": processors(),
    }  # fmt: skip


def line_of(name: str, values: Mapping[str, Any]) -> str:
    """A row for people."""
    parts = {key.removeprefix("part_s."): value for key, value in values.items() if key.startswith("part_s.")}
    longest = sorted(parts, key=lambda part: parts[part], reverse=True)[:3]
    told = ", ".join(f"{part} {parts[part]:.2f} s" for part in longest)
    return f"{name}: first token after {values['first_token_s']:.2f} s; {told}"
