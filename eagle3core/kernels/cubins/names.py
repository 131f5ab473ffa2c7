"""Names of kernels on disk, by a digest of what their machine code is made from."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from eagle3core.kernels.card import Variant
from eagle3core.kernels.compile import compiler_versions

_DOOR = Path(__file__).parents[1]  # its files run on the host, all but `compile` without a say in machine code


def cubin_name(variant: Variant, arch: str) -> str:
    """Names a cubin in an ahead-of-time folder, which whoever made it did with compilers of their choice."""
    return f"{variant.name}.{arch}.{digest(variant, arch)}"


def cache_name(variant: Variant, arch: str) -> str:
    """Names it in the cache, where a new compiler compiles anew."""
    return f"{cubin_name(variant, arch)}.{_compilers_digest()}"


@cache
def _compilers_digest() -> str:
    return hashlib.sha256(repr(sorted(compiler_versions().items())).encode()).hexdigest()[:8]


def digest(variant: Variant, arch: str) -> str:
    """Digest of the target, the factory, its constants and bounds, and the sources it is made from."""
    parts = [arch, variant.make.__qualname__, repr(sorted(variant.constants.items())), repr(variant.parameters)]
    module = inspect.getmodule(variant.make)
    assert module is not None, f"the factory of {variant.name} is in no module"
    parts += [repr((variant.threads, variant.blocks_per_sm)), source_digest(module)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@cache
def source_digest(module: ModuleType) -> str:
    """Digest of every source that shapes a kernel module's machine code (`source_files`)."""
    files = source_files(Path(inspect.getfile(module)))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def source_files(module: Path) -> list[Path]:
    """The files whose change makes another cubin: a kernel module, what it imports in turn, instructions, compiler.

    Followed are imports of a package's own modules, at the top of a file or in a function, whatever room they lie in:
    a number taken from another module may be a constant of the kernel. The files at the kernels' door and outside the
    kernels' rooms run on the host alone, so they are left out, all but `compile`, whose options change code.
    """
    found: set[Path] = set()
    waiting = [module, _DOOR / "isa" / "ptx.py"]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [file for file in _imported_files(path) if _shapes_code(file, module)]
    return [_DOOR / "compile.py", *sorted(found)]


def _shapes_code(file: Path, module: Path) -> bool:
    """Whether an imported file may hold a piece of a kernel: it lies in a room of the kernels, or beside the module."""
    is_in_a_room = _DOOR in file.parent.parents
    return is_in_a_room or (_DOOR.parent not in file.parents and file.parent == module.parent)


def _imported_files(path: Path) -> Iterator[Path]:
    """Files of this repository's packages that a source imports, wherever in it the import stands."""
    for name in _imported_names(path.read_text(encoding="utf-8"), path):
        yield from _files_of(name, path)


@cache
def _imported_names(text: str, path: Path) -> list[str]:
    """Modules, and what may be modules, that a source names; kernels share most sources, so each is parsed once."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, path)
            found += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    return found


def _origin(node: ast.ImportFrom, path: Path) -> str:
    """The module that a `from` statement names; for a relative one the whole name."""
    if not node.level:
        return node.module or ""
    package = _package_of(path)
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _package_of(path: Path) -> list[str]:
    """The names of the packages that a file lies in, outermost first."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _files_of(name: str, path: Path) -> Iterator[Path]:
    """The file of the module `name`, if it belongs to the package of `path` or to this one."""
    for known in (path, Path(__file__)):
        package = _package_of(known)
        if package and name.split(".")[0] == package[0]:
            base = known.parents[len(package)].joinpath(*name.split("."))
            yield from (file for file in (base.with_suffix(".py"), base / "__init__.py") if file.exists())
            return
