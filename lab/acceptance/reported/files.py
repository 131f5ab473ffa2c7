"""Reported acceptance found in a file: JSON, JSON lines, or Prometheus' text as scraped from `/metrics`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from lab.acceptance.reported.forms import Acceptance, read_documents
from lab.errors import ExperimentError
from lab.rows.stored.files import decoded, read_bytes

FORMATS = (
    "vllm bench serve --save-result, vLLM's counters (JSON, or the text of /metrics), SGLang's bench_serving lines, "
    "/server_info or responses (meta_info), TensorRT-LLM's iteration statistics, trtllm-bench report or responses"
)
METRIC = re.compile(r"^((?:vllm|sglang):spec_\w+?)(?:\{([^}]*)\})? +([0-9.eE+-]+)(?: \d+)?$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def read_acceptance(path: Path) -> list[Acceptance]:
    """What a file reports: pooled over its requests or iterations, else one entry an object that reports any.

    Raises:
        ExperimentError: it is none of `FORMATS`, or reports no acceptance, or one that cannot be.
    """
    try:
        found = read_documents(_documents(path))
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # a share or count that is null, or a word
        raise ExperimentError(
            f"{path.name} holds a value that is no number, or no possible one: {error}", FORMATS,
            "give the file as it was saved",
        ) from error  # fmt: skip
    if not found:
        raise ExperimentError(
            f"{path.name} reports no acceptance",
            FORMATS,
            "run the server with speculative decoding and save its result",
        )
    for one in found:
        _check(one, path)
    return found


def _check(one: Acceptance, path: Path) -> None:
    # Not a number is not below 1 either, so what is allowed is asked for.
    if not 1 <= one.length < math.inf or (one.rate is not None and not 0 <= one.rate <= 1):
        raise ExperimentError(
            f"{path.name}: {one.system} says {one.length} tokens a step at rate {one.rate}",
            "at least 1 token a step, the bonus included, and a rate of 0 to 1",
            "check that the file is of a speculative run and was not edited",
        )


def _documents(path: Path) -> list[Any]:
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{path.name} cannot be read: {error}", FORMATS, "check the path") from error
    scraped = METRIC.findall(text)
    if scraped:
        return [_counters(path, scraped)]
    try:
        whole = decoded(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return [decoded(line) for line in lines]
        except ValueError as error:
            raise ExperimentError(
                f"{path.name} is no JSON: {error}", FORMATS, "give the file as it was saved"
            ) from error
    return whole if isinstance(whole, list) else [whole]


def _counters(path: Path, scraped: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Metrics by name: vLLM's counters added up over engines, those by position as a list; of SGLang's means the mean.

    Raises:
        ExperimentError: metrics of several models.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    positions: defaultdict[int, float] = defaultdict(float)
    models: set[str] = set()
    for name, labels, value in scraped:
        named = dict(LABEL.findall(labels))
        models.update({named["model_name"]} if "model_name" in named else ())
        if name == BY_POSITION:
            positions[int(named["position"])] += float(value)
        elif not name.endswith("_created"):
            values[name].append(float(value))
    if len(models) > 1:
        raise ExperimentError(
            f"{path.name} has metrics of {', '.join(sorted(models))}", "those of one model",
            "keep the lines of one model",
        )  # fmt: skip
    totals = {
        name.removeprefix("sglang:"): sum(every) / (len(every) if name.startswith("sglang:") else 1)
        for name, every in values.items()
    }
    return {**totals, BY_POSITION: [positions[i] for i in range(max(positions, default=-1) + 1)]}
