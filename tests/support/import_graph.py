"""Who imports whom: every import of a tree of sources, wherever in a file it stands, and what may be asked of it.

An import inside a function or under `TYPE_CHECKING` counts like any other: it ties the two files together all the same.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One name that one line of a file imports.

    Attributes:
        importer: dotted name of the file that imports, or its path where it is no module.
        module: dotted name after `from`, or of the whole `import`.
        name: what is taken from it; None for `import module`.
    """

    importer: str
    line: int
    module: str
    name: str | None

    def target(self, modules: Iterable[str]) -> str:
        """The module it leads to: `from lab.pairs import prompts` leads to `lab.pairs.prompts`, a file."""
        whole = f"{self.module}.{self.name}"
        return whole if self.name is not None and whole in modules else self.module


def modules_of(root: Path, *packages: str) -> dict[str, Path]:
    """Dotted name and path of every source file of some packages; a package's own name is its `__init__`."""
    paths = (path for package in packages for path in sorted((root / package).rglob("*.py")))
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports_in(text: str, importer: str) -> list[Import]:
    """Everything that a source text imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [Import(importer, node.lineno, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import is told by its dots, so that it fits no list of allowed ones.
            module = "." * node.level + (node.module or "")
            found += [Import(importer, node.lineno, module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            written = [word.value for word in node.args if isinstance(word, ast.Constant)]
            found += [Import(importer, node.lineno, str(word), None) for word in written]
    return found


@cache
def module_imports(name: str, path: Path) -> list[Import]:
    """Everything that one file imports."""
    return imports_in(path.read_text(encoding="utf-8"), name)


def all_imports(modules: Mapping[str, Path]) -> list[Import]:
    """Everything that some modules import."""
    return [each for name, path in modules.items() for each in module_imports(name, path)]


def notebook_imports(path: Path) -> list[Import]:
    """Everything that a notebook's cells import."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [each for text in texts for each in imports_in(text, path.name)]


def circles(modules: Mapping[str, Path]) -> list[list[str]]:
    """Sets of modules that import each other, directly or through others, each in alphabetical order."""
    reached = {name: set[str]() for name in modules}
    for each in all_imports(modules):
        if each.target(modules) in modules:
            reached[each.importer].add(each.target(modules))
    waiting = True
    while waiting:  # until nothing new is reached
        waiting = False
        for seen in reached.values():
            further = set().union(*(reached[name] for name in seen)) - seen
            seen |= further
            waiting = waiting or bool(further)
    rings = {tuple(sorted({name, *(n for n in seen if name in reached[n])})) for name, seen in reached.items()}
    return [list(ring) for ring in sorted(rings) if len(ring) > 1]


def room_of(module: str, rooms: Sequence[str]) -> str | None:
    """The room of the list that a module belongs to; None for none.

    That is the longest name its own begins with. A package whose rooms are listed one by one stands for its
    `__init__` alone, so that a new file in it has to be given a place.
    """
    packages = {package for room in rooms for package in rooms if room.startswith(package + ".")}
    around = [room for room in rooms if module == room or (room not in packages and module.startswith(room + "."))]
    return max(around, key=len, default=None)


def out_of_order(modules: Mapping[str, Path], rooms: Sequence[str]) -> list[str]:
    """Imports of a room that comes later in `rooms`, and files that belong to none, in words."""
    levels = {room: level for level, room in enumerate(rooms)}
    homes = {name: room_of(name, rooms) for name in modules}
    wrong = [f"{name} belongs to no room of the list" for name, room in homes.items() if room is None]
    for each in all_imports(modules):
        target = each.target(modules)
        here, there = homes[each.importer], homes.get(target)
        if here is not None and there is not None and levels[there] > levels[here]:
            wrong.append(f"{each.importer}:{each.line} imports {target}, of the later room {there}")
    return list(dict.fromkeys(wrong))
