"""`eagle3lab export ROWS --as flashinfer-bench --out DIR`: cards and sweeps as a data set of FlashInfer-Bench.

Folders are those that its `TraceSet.from_path` reads: definitions, solutions, workloads, traces, and the integer inputs
of workloads, such as tables and masks, in `blob`. Nothing is run, and no GPU is needed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lab.ending import tell_summary
from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.exchange import ExportOptions
from lab.probes.flashinfer_bench.definitions import AUTHOR, Definition, Workload
from lab.probes.flashinfer_bench.traces import Measured, Reading, identity, read_traces, unwritable
from lab.rows.carried.upgrade import files_of
from lab.rows.maker import machines_of
from lab.rows.store import read_rows


def run(options: ExportOptions) -> int:
    """Writes the folder and says what is in it; 0.

    Raises:
        ExperimentError: a folder that is there, or no row of a card or a sweep.
    """
    if options.out.exists():
        raise ExperimentError(
            f"{options.out.name} exists", "a folder that does not", "name another, or remove it: an export is whole"
        )
    found = Reading()
    files = files_of(options.paths)
    for path in files:
        rows = read_rows(path)
        one = read_traces(rows, machines_of(rows))
        found.measured += one.measured
        for reason, n in one.left_out.items():
            found.left_out[reason] = found.left_out.get(reason, 0) + n
    groups = grouped(found)
    if not groups:
        raise ExperimentError(
            f"no timed kernel in {len(files)} files", "rows of the kernels' benchmark or of sweeps",
            "name such a file, as kernels.jsonl or sweep_gemm.jsonl under reports/reference/",
        )  # fmt: skip
    part = options.out.with_name(f"{options.out.name}.{os.getpid()}.part")
    try:
        for group in groups:
            _write(part, group)
        part.replace(options.out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    tell(groups, found, options.out.name)
    return EXIT_PASSED


def grouped(found: Reading) -> list[list[Measured]]:
    """Times by definition; those that the schema cannot hold are left out with their reason."""
    groups: dict[str, list[Measured]] = {}
    for each in found.measured:
        reason = unwritable(each.workload)
        if reason:
            found.leave_out(reason)
        else:
            groups.setdefault(each.workload.definition, []).append(each)
    return list(groups.values())


def tell(groups: Sequence[Sequence[Measured]], found: Reading, out: str) -> None:
    """Says what was left out and why, and what was written."""
    for reason, n in found.left_out.items():
        print(f"left out: {n} rows: {reason}")
    n_solutions = len({each.solution for group in groups for each in group})
    counts = {"definitions": len(groups), "solutions": n_solutions, "traces": sum(map(len, groups))}
    tell_summary({"command": "export", **counts, "out": out})


def _write(root: Path, group: Sequence[Measured]) -> None:
    """One definition, with its solutions, workloads and traces."""
    workloads = {identity(each.workload): each.workload for each in group}
    definition = Definition(list(workloads.values()))
    name, op_type = definition.first.definition, definition.op_type
    _write_json(root / "definitions" / op_type / f"{name}.json", [definition.to_json()])
    for solution, setting in {each.solution: each.setting for each in group}.items():
        path = root / "solutions" / AUTHOR / op_type / name / f"{solution}.json"
        _write_json(path, [definition.solution(solution, setting)])
    told_of = {key: _workload(root, definition, key, each) for key, each in workloads.items()}
    bare = {"definition": name, "solution": None, "evaluation": None}
    _write_json(root / "workloads" / op_type / f"{name}.jsonl", [{**bare, "workload": one} for one in told_of.values()])
    traces = [
        {"definition": name, "workload": told_of[identity(each.workload)], "solution": each.solution,
         "evaluation": each.evaluation()}
        for each in group
    ]  # fmt: skip
    _write_json(root / "traces" / AUTHOR / op_type / f"{name}.jsonl", traces)


def _workload(root: Path, definition: Definition, key: str, workload: Workload) -> dict[str, Any]:
    """A workload, whose integer inputs are written beside."""
    inputs: dict[str, Any] = {name: {"type": "random"} for name in workload.shapes.inputs}
    structure = workload.structure()
    if structure:
        place = Path("blob", "workloads", definition.op_type, definition.first.definition, f"{key}.safetensors")
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in structure.items()}, root / place)
        inputs |= {name: {"type": "safetensors", "path": str(place), "tensor_key": name} for name in structure}
    return {"axes": definition.workload(workload), "inputs": inputs, "uuid": key}


def _write_json(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """A JSON object a line, or one over several lines where the name ends in .json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    indent = 2 if path.suffix == ".json" else None
    path.write_text("".join(json.dumps(one, indent=indent) + "\n" for one in objects), encoding="utf-8")
