"""The house rules that a machine can check: names, docstrings, rings, folders. Who may import whom: `test_rooms`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import eagle3core

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "eagle3core" / "kernels"
CORE = sorted((ROOT / "eagle3core").rglob("*.py"))
SOURCES = CORE + sorted((ROOT / "lab").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
RINGS = {"reference", "emulated", "compiled", "gpu"}
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}

PUBLIC = {
    "AsyncEngine",
    "AsyncTextStream",
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "DecodeError",
    "Eagle3Error",
    "EagleMetricsSummary",
    "Engine",
    "EngineConfig",
    "ForcedAcceptance",
    "GenerationConfig",
    "InvariantViolated",
    "KernelLimit",
    "MedusaAcceptance",
    "Pipeline",
    "RejectionAcceptance",
    "RelaxedAcceptance",
    "RequestHandle",
    "RequestMetrics",
    "Response",
    "SpecInfo",
    "SpeculationState",
    "SpeculativeConfig",
    "SpeculativeDecodingStats",
    "StepRecord",
    "TextStream",
    "TokenLogprob",
    "TokenStream",
    "check_engine_spec_alignment",
    "pipeline",
    "to_engine_spec_dict",
    "validate_eagle_runtime_config",
}


def relative(path: Path) -> str:
    """Path as an offender is named."""
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    """A source file as a tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_file_is_named_for_what_is_in_it() -> None:
    named = {relative(path): set(path.relative_to(ROOT).with_suffix("").parts) for path in [*SOURCES, *TESTS]}
    wrong = [path for path, words in named.items() if words & EMPTY_NAMES]
    assert not wrong, "\n".join(wrong)


def test_no_folder_holds_more_than_20_source_files() -> None:
    n_files = Counter(relative(path.parent) for path in [*SOURCES, *TESTS])
    wrong = [f"{folder} holds {n}" for folder, n in n_files.items() if n > 20]
    assert not wrong, "\n".join(wrong)


def test_every_test_is_in_one_ring() -> None:
    wrong = [f"{relative(path)}::{name}" for path in TESTS for name in misplaced_tests(parsed(path))]
    assert not wrong, "\n".join(wrong)


def misplaced_tests(module: ast.Module) -> list[str]:
    """Tests of a file that have no ring, or several, by their own marks or else by the file's."""
    marks = [n.value for n in module.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    tests = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return [test.name for test in tests if len(rings_in(test.decorator_list) or rings_in(marks)) != 1]


def rings_in(nodes: list[ast.expr]) -> set[str]:
    """Rings that marks such as `pytest.mark.gpu` name anywhere in `nodes`."""
    return {part.attr for node in nodes for part in ast.walk(node) if isinstance(part, ast.Attribute)} & RINGS


def test_every_skip_has_a_reason() -> None:
    wrong = [f"{relative(path)}: {skip}" for path in TESTS for skip in skips_without_a_reason(parsed(path))]
    assert not wrong, "\n".join(wrong)


def skips_without_a_reason(module: ast.Module) -> list[str]:
    """Calls of `skip` and `skipif` that say no reason, as they are written."""
    calls = [n for n in ast.walk(module) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    needed = {"skip": 1, "skipif": 2}
    return [
        ast.unparse(call)
        for call in calls
        if len(call.args) + sum(k.arg == "reason" for k in call.keywords)
        < needed.get(ast.unparse(call.func).split(".")[-1], 0)
    ]


def test_a_test_without_a_ring_and_a_skip_without_a_reason_are_found() -> None:
    text = """
@pytest.mark.gpu
def test_marked(): ...
@pytest.mark.gpu
@pytest.mark.compiled
def test_marked_twice(): ...
def test_unmarked():
    pytest.skip()
    pytest.skip(reason="no GPU")
    pytest.mark.skipif(True)
"""
    assert misplaced_tests(ast.parse(text)) == ["test_marked_twice", "test_unmarked"]
    assert misplaced_tests(ast.parse("pytestmark = pytest.mark.reference" + text)) == ["test_marked_twice"]
    assert skips_without_a_reason(ast.parse(text)) == ["pytest.skip()", "pytest.mark.skipif(True)"]


def test_public_names_are_pinned_and_exist() -> None:
    assert set(eagle3core.__all__) == PUBLIC
    assert all(hasattr(eagle3core, name) for name in PUBLIC)


def test_every_file_and_everything_public_in_the_core_says_what_it_gives() -> None:
    # The CPU twin of an instruction has the name under which the instruction itself is defined and explained.
    instructions = set[str]().union(*(names_defined_in(path) for path in (KERNELS / "isa").glob("*.py")))
    wrong = [relative(path) for path in SOURCES if not ast.get_docstring(parsed(path))]
    for path in CORE:
        explained = instructions if path.parent == KERNELS / "emulator" else set()
        wrong += [f"{relative(path)}::{name}" for name in sorted(silent_names(path) - explained)]
    assert not wrong, "\n".join(wrong)


def silent_names(path: Path) -> set[str]:
    """Public functions and classes of a file that have no docstring."""
    defined = [n for n in parsed(path).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return {n.name for n in defined if not n.name.startswith("_") and not ast.get_docstring(n)}


def names_defined_in(path: Path) -> set[str]:
    """Names that the top level of a file defines or assigns."""
    names = set()
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_the_core_imports_without_a_gpu_and_without_what_only_the_pipeline_needs() -> None:
    check = (
        "import sys, eagle3core\n"
        "import torch\n"
        "late = {'transformers', 'tokenizers', 'numba', 'pandas', 'matplotlib', 'lab'} & set(sys.modules)\n"
        "assert not late, late\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    result = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
