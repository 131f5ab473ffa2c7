"""The house rules that a machine can check: rooms, names, docstrings, rings, notebooks, imports."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import eagle3core

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for room in ("eagle3core", "lab") for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RINGS = {"reference", "emulated", "compiled", "gpu"}
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}

# Lower rooms first: a module may import its own room and those above it in this list.
ROOMS = (
    ("errors",),
    ("config", "geometry", "trace"),
    ("backend",),
    ("kernels",),
    ("checkpoint",),
    ("model",),
    ("tree",),
    ("decode",),
    ("memory", "metrics"),
    ("request", "step_log"),
    ("engine",),
    ("pipeline",),
)
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}

PUBLIC = {
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "Eagle3Error",
    "EagleMetricsSummary",
    "Engine",
    "EngineConfig",
    "GenerationConfig",
    "InvariantViolated",
    "KernelLimit",
    "Pipeline",
    "RequestMetrics",
    "Response",
    "SpecInfo",
    "SpeculationState",
    "SpeculativeConfig",
    "SpeculativeDecodingStats",
    "StepRecord",
    "check_engine_spec_alignment",
    "pipeline",
    "to_engine_spec_dict",
    "validate_eagle_runtime_config",
}


def imports(path: Path) -> list[str]:
    """Dotted names of everything a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def room_of(path: Path) -> str:
    """Top-level room of a core file: its folder, or its own name."""
    return path.relative_to(ROOT / "eagle3core").parts[0].removesuffix(".py")


def relative(path: Path) -> str:
    """Path as a test id shows it."""
    return str(path.relative_to(ROOT))


CORE = [path for path in SOURCES if path.is_relative_to(ROOT / "eagle3core") and path.name != "__init__.py"]


@pytest.mark.parametrize("path", CORE, ids=relative)
def test_a_room_imports_itself_and_lower_rooms_alone(path: Path) -> None:
    room = room_of(path)
    for name in imports(path):
        assert name.split(".")[0] != "lab", "the engine knows nothing of the lab"
        if name.startswith("eagle3core."):
            other = name.split(".")[1]
            assert other == room or LEVEL[other] < LEVEL[room], f"{room} imports {other}"


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=relative)
def test_a_file_is_named_for_what_is_in_it(path: Path) -> None:
    assert not EMPTY_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", TESTS, ids=relative)
def test_every_test_is_in_one_ring(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    marks = [n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    whole_file = rings_in(marks)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert len(rings_in(node.decorator_list) or whole_file) == 1, node.name


def rings_in(nodes: list[ast.expr]) -> set[str]:
    """Rings that marks such as `pytest.mark.gpu` name anywhere in `nodes`."""
    return {part.attr for node in nodes for part in ast.walk(node) if isinstance(part, ast.Attribute)} & RINGS


@pytest.mark.parametrize("path", TESTS, ids=relative)
def test_every_skip_has_a_reason(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("skip", "skipif"):
            needed = 1 if node.func.attr == "skip" else 2
            assert len(node.args) + sum(k.arg == "reason" for k in node.keywords) >= needed, ast.unparse(node)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] is not None for cell in code)


def test_public_names_are_pinned_and_exist() -> None:
    assert set(eagle3core.__all__) == PUBLIC
    assert all(hasattr(eagle3core, name) for name in PUBLIC)


@pytest.mark.parametrize("path", [ROOT / "eagle3core" / "__init__.py", *CORE], ids=relative)
def test_everything_public_in_the_core_says_what_it_gives(path: Path) -> None:
    module = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(module)
    # The CPU twin of a PTX instruction has the name under which the instruction itself is defined and explained.
    twins = ("ptx.py", "ptx_group.py") if path.name.startswith("emulator") else ()
    explained = set[str]().union(*(names_defined_in(path.with_name(twin)) for twin in twins))
    silent = {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    }
    assert silent - explained == set()


def names_defined_in(path: Path) -> set[str]:
    """Names that the top level of a file defines or assigns."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
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
