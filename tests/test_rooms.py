"""The order of rooms: who may import whom, and how the lab reaches the core."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from import_graph import Import, all_imports, circles, modules_of, notebook_imports, out_of_order, room_of

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parent.parent
CORE = modules_of(ROOT, "eagle3core")
LAB = modules_of(ROOT, "lab")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# A module may import its own room and those before it in this list; its room is the longest name its own begins with.
# A package whose rooms are listed stands for its `__init__` alone, which imports what it offers and so comes last.
ORDER = (
    "eagle3core.errors",
    "eagle3core.checks",
    "eagle3core.stored_json",
    "eagle3core.stored_yaml",
    "eagle3core.cache",
    "eagle3core.sampling",
    "eagle3core.trees",
    "eagle3core.lookup",
    "eagle3core.acceptance",
    "eagle3core.adaptive",
    "eagle3core.speculative",
    "eagle3core.config",
    "eagle3core.arguments",
    "eagle3core.alignment",
    "eagle3core.geometry",
    "eagle3core.trace",
    "eagle3core.backend",
    "eagle3core.kernels.card",
    "eagle3core.kernels.tensor_map",
    "eagle3core.kernels.isa",
    "eagle3core.kernels.compile",
    "eagle3core.kernels.cubins",
    "eagle3core.kernels.launch",
    "eagle3core.kernels.tuned",
    "eagle3core.kernels.proof",
    "eagle3core.kernels.layer",
    "eagle3core.kernels.tree",
    "eagle3core.kernels.slots",
    "eagle3core.kernels.choice",
    "eagle3core.kernels.gemm",
    "eagle3core.kernels.experts",
    "eagle3core.kernels.attention",
    "eagle3core.kernels.emulator",
    "eagle3core.kernels",
    "eagle3core.checkpoint",
    "eagle3core.weights",
    "eagle3core.step",
    "eagle3core.metrics",
    "eagle3core.stop",
    "eagle3core.request",
    "eagle3core.fit",
    "eagle3core.loading",
    "eagle3core.performance",
    "eagle3core.memory",
    "eagle3core.batching",
    "eagle3core.engine",
    "eagle3core.async_engine",
    "eagle3core.chat",
    "eagle3core.pipeline",
    "eagle3core",
    "lab.errors",
    "lab.ending",
    "lab.options",
    "lab.rows",
    "lab.figures",
    "lab.widgets",
    "lab.pairs",
    "lab.night",
    "lab.page",
    "lab.parity",
    "lab.acceptance",
    "lab.serve",
    "lab.training",
    "lab.probes.ceilings",
    "lab.probes.sanitizer",
    "lab.probes.kernels",
    "lab.vocabulary",
    "lab.probes.bench",
    "lab.probes.bits",
    "lab.probes.proofs",
    "lab.probes.start",
    "lab.probes.speed",
    "lab.probes.profiles",
    "lab.probes.sweeps",
    "lab.probes.flashinfer_bench",
    "lab.probes.gates",
    "lab.probes.ab",
    "lab.probes",
    "lab.doctor",
    "lab.nightly",
    "lab.cli",
    "lab.probes.fuzz",
    "lab.__main__",
    "lab",
)

# The doors of the core: all that the lab and its notebooks may import of it. A room offers what its `__init__` names in
# `__all__`; a file at the core's own door offers whatever has no underscore.
DOORS = (
    "eagle3core",
    "eagle3core.errors",
    "eagle3core.config",
    "eagle3core.speculative",
    "eagle3core.lookup",
    "eagle3core.adaptive",
    "eagle3core.trees",
    "eagle3core.geometry",
    "eagle3core.trace",
    "eagle3core.request",
    "eagle3core.metrics",
    "eagle3core.pipeline",
    "eagle3core.chat",
    "eagle3core.backend",
    "eagle3core.loading",
    "eagle3core.memory",
    "eagle3core.checkpoint",
    "eagle3core.weights",
    "eagle3core.step",
    "eagle3core.performance",
    "eagle3core.kernels",
    "eagle3core.kernels.attention",
    "eagle3core.kernels.choice",
    "eagle3core.kernels.experts",
    "eagle3core.kernels.gemm",
    "eagle3core.kernels.layer",
    "eagle3core.kernels.slots",
    "eagle3core.kernels.tree",
)


def past_the_face(imports: list[Import]) -> list[str]:
    """Imports of the core that do not take a public name from one of its doors, in words."""
    wrong = []
    for each in imports:
        if each.module.split(".")[0] != "eagle3core":
            continue
        if each.module not in DOORS:
            wrong.append(f"{each.importer}:{each.line} {each.module} is no door (it takes {each.name})")
        elif each.name not in public_names(each.module):
            wrong.append(f"{each.importer}:{each.line} {each.name} is no public name of {each.module}")
    return sorted(wrong)


def public_names(door: str) -> set[str]:
    """What a door offers: its `__all__`, or what a file defines without an underscore."""
    if CORE[door].name != "__init__.py":
        return {name for name in names_at_the_top(CORE[door], imported=False) if not name.startswith("_")}
    body = ast.parse(CORE[door].read_text(encoding="utf-8")).body
    listed = [n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return {name for names in listed for name in ast.literal_eval(names)}


@cache
def names_at_the_top(path: Path, *, imported: bool) -> set[str]:
    """Names that a file defines or assigns, and with `imported` those that it imports."""
    names = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom) and imported:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_a_room_imports_itself_and_earlier_rooms_alone() -> None:
    wrong = out_of_order({**CORE, **LAB}, ORDER)
    assert not wrong, f"{len(wrong)} imports are out of order:\n" + "\n".join(wrong)


def test_the_order_names_no_room_that_is_gone() -> None:
    homes = {room_of(name, ORDER) for name in (*CORE, *LAB)}
    assert [room for room in ORDER if room not in homes] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = circles({**CORE, **LAB})
    assert not found, "\n".join(", ".join(ring) for ring in found)


def test_the_core_knows_nothing_of_the_lab() -> None:
    wrong = [f"{each.importer}:{each.line}" for each in all_imports(CORE) if each.module.split(".")[0] == "lab"]
    assert not wrong, "\n".join(wrong)


def test_the_lab_and_its_notebooks_reach_the_core_through_its_doors_alone() -> None:
    notebooks = [each for path in NOTEBOOKS for each in notebook_imports(path)]
    wrong = past_the_face([*all_imports(LAB), *notebooks])
    assert not wrong, f"{len(wrong)} imports go past the doors:\n" + "\n".join(wrong)


def test_what_tests_and_notebooks_import_of_the_house_is_there() -> None:
    house = {**CORE, **LAB}
    tests = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("*.py")}
    imports = [*all_imports(tests), *(each for path in NOTEBOOKS for each in notebook_imports(path))]
    wrong = [
        f"{each.importer}:{each.line} {each.module} has no {each.name}"
        for each in imports
        if each.module.split(".")[0] in ("eagle3core", "lab") and not is_there(each, house)
    ]
    assert not wrong, "\n".join(wrong)


def is_there(wanted: Import, house: dict[str, Path]) -> bool:
    """Whether a module exists, and its name as one of its files or at its top level."""
    if wanted.name is None or wanted.target(house) != wanted.module:
        return wanted.target(house) in house
    return wanted.module in house and wanted.name in names_at_the_top(house[wanted.module], imported=True)


def planted(folder: Path, **texts: str) -> dict[str, Path]:
    """A package `house` whose files hold the given texts."""
    (folder / "house").mkdir()
    for name, text in {"__init__": "", **texts}.items():
        (folder / "house" / f"{name}.py").write_text(text, encoding="utf-8")
    return modules_of(folder, "house")


def test_a_circle_and_a_wrong_order_are_found_where_they_are_hidden_in_functions(tmp_path: Path) -> None:
    modules = planted(
        tmp_path,
        cellar="def dig():\n    from house import hall\n",
        hall="from house.stairs import climb\n",
        stairs="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.cellar\n",
        roof="import importlib\nhall = importlib.import_module('house.hall')\n",
    )
    assert circles(modules) == [["house.cellar", "house.hall", "house.stairs"]]
    rooms = ("house.cellar", "house.roof", "house.hall", "house.stairs")
    assert out_of_order(modules, rooms) == [
        "house belongs to no room of the list",
        "house.cellar:2 imports house.hall, of the later room house.hall",
        "house.hall:1 imports house.stairs, of the later room house.stairs",
        "house.roof:2 imports house.hall, of the later room house.hall",
    ]


def test_an_import_past_a_door_is_found_by_its_module_and_by_its_name() -> None:
    good = Import("lab.a", 1, "eagle3core.kernels", "Card")
    inside = Import("lab.a", 2, "eagle3core.kernels.card", "Card")
    private = Import("lab.a", 3, "eagle3core.kernels", "_DECLARES_A_CARD")
    whole = Import("lab.a", 4, "eagle3core.kernels", None)
    wrong = past_the_face([good, inside, private, whole, Import("lab.a", 5, "torch", None)])
    assert [line.split()[0] for line in wrong] == ["lab.a:2", "lab.a:3", "lab.a:4"]
