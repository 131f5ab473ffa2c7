"""Cubins are found again by what they are made from, and compiled anew when any of that has changed."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from eagle3core.kernels import card as card_module
from eagle3core.kernels import cubins, registry
from eagle3core.kernels.card import Variant, parameters
from eagle3core.kernels.compile import compiler_versions
from eagle3core.kernels.cubins import lookup, many, names
from eagle3core.kernels.emulator import instructions as emulator

KERNELS = Path(card_module.__file__).parent
PARAMETERS = parameters("x:in y:out n:i32")
ARCH = "sm_90a"


def make_double(isa: Any, *, width: int) -> Any:
    def kernel(x: Any, y: Any, n: Any) -> None:
        i = isa.cuda.blockIdx.x * width + isa.cuda.threadIdx.x
        if i < n:
            value = isa.load_f32(x + isa.i64(i) * 4)
            isa.store_f32(y + isa.i64(i) * 4, value + value)

    return kernel


def make_same(isa: Any, *, width: int) -> Any:
    def kernel(x: Any, y: Any, n: Any) -> None:
        i = isa.cuda.blockIdx.x * width + isa.cuda.threadIdx.x
        if i < n:
            isa.store_f32(y + isa.i64(i) * 4, isa.load_f32(x + isa.i64(i) * 4))

    return kernel


DOUBLE = Variant("double", make_double, {"width": 64}, PARAMETERS, 64)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv(cubins.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(cubins.CUBINS_VARIABLE, str(tmp_path / "ahead"))
    return tmp_path / "cache", tmp_path / "ahead"


@pytest.fixture
def other_compilers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretends that another version of one compiler is installed."""

    def install(name: str) -> None:
        versions = {**compiler_versions(), name: "another"}
        for module in (names, lookup, many):
            monkeypatch.setattr(module, "compiler_versions", lambda: versions)
        monkeypatch.setattr(names, "_compilers_digest", names._compilers_digest.__wrapped__)

    return install


@pytest.mark.compiled
def test_a_cubin_is_compiled_once_and_then_found(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = folders
    assert not cubins.is_stored(DOUBLE, ARCH)
    code, about = cubins.cubin(DOUBLE, ARCH)
    assert code[:4] == b"\x7fELF"
    assert about["arch"] == ARCH
    assert len(list(cache.iterdir())) == 2
    assert cubins.is_stored(DOUBLE, ARCH)
    monkeypatch.setattr(lookup, "compile_variant", lambda *a: pytest.fail("compiled again"))
    assert cubins.cubin(DOUBLE, ARCH) == (code, about)


@pytest.mark.compiled
def test_cubins_built_ahead_are_used_and_not_built_twice(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, ahead = folders
    told: list[str] = []
    assert cubins.build_cubins([DOUBLE], "sm_120", ahead, tell=told.append) == 1
    assert told[0].startswith("double.sm_120.")
    monkeypatch.setattr(lookup, "compile_variant", lambda *a: pytest.fail("compiled again"))
    assert cubins.build_cubins([DOUBLE], "sm_120", ahead) == 0
    assert cubins.cubin(DOUBLE, "sm_120")[1]["variant"] == "double"
    assert not cache.exists()


@pytest.mark.compiled
@pytest.mark.parametrize("compiler", ["numba-cuda", "llvmlite", "nvidia-nvvm", "ptxas"])
def test_another_version_of_a_compiler_compiles_anew(
    compiler: str, folders: tuple[Path, Path], other_compilers: Callable[[str], None]
) -> None:
    cache, ahead = folders
    cubins.build_cubins([DOUBLE], "sm_120", ahead)
    cubins.cubin(DOUBLE, ARCH)
    other_compilers(compiler)
    assert cubins.build_cubins([DOUBLE], "sm_120", ahead) == 1
    assert cubins.cubin(DOUBLE, "sm_120")[1]["compilers"][compiler] == "another"
    assert not cubins.is_stored(DOUBLE, ARCH)
    cubins.cubin(DOUBLE, ARCH)
    assert len(list(cache.glob("*.cubin"))) == 2


@pytest.mark.compiled
def test_a_half_written_cubin_is_never_taken(folders: tuple[Path, Path]) -> None:
    cache, _ = folders
    name = names.cache_name(DOUBLE, ARCH)
    cache.mkdir()
    (cache / f"{name}.cubin").write_bytes(b"torn")  # the description, written last, is missing
    code, _ = cubins.cubin(DOUBLE, ARCH)
    assert code[:4] == b"\x7fELF"
    assert json.loads((cache / f"{name}.json").read_text())["spill_bytes"] == 0


@pytest.mark.reference
def test_a_digest_changes_with_everything_that_a_variant_says() -> None:
    others = [
        replace(DOUBLE, constants={"width": 128}),
        replace(DOUBLE, threads=128),
        replace(DOUBLE, blocks_per_sm=2),
        replace(DOUBLE, parameters=parameters("x:in y:out n:i64")),
        replace(DOUBLE, make=make_same),  # another factory of this file
    ]
    digests = {cubins.digest(v, ARCH) for v in (DOUBLE, *others)} | {cubins.digest(DOUBLE, "sm_100")}
    assert len(digests) == 7


def files_run_by(kernel: Any, seen: set[int]) -> set[Path]:
    """Files in which the functions lie that a kernel holds, found by walking what it closes over."""
    if id(kernel) in seen:
        return set()
    seen.add(id(kernel))
    found = set()
    if isinstance(kernel, FunctionType):
        found.add(Path(kernel.__code__.co_filename))
        for cell in kernel.__closure__ or ():
            found |= files_run_by(cell.cell_contents, seen)
    elif isinstance(kernel, tuple | list):
        for part in kernel:
            found |= files_run_by(part, seen)
    return found


@pytest.mark.reference
def test_every_file_whose_functions_a_kernel_runs_is_among_its_sources() -> None:
    absent, on_the_host = [], set((KERNELS / "cubins").glob("*.py"))
    for card in registry().values():
        for variant in [*card.variants(ARCH), *card.slow_variants(ARCH)]:
            run = files_run_by(variant.make(emulator, **variant.constants), set())
            ours = {file for file in run if KERNELS in file.parents and file.parent.name != "emulator"}
            assert ours
            sources = names.source_files(Path(variant.make.__code__.co_filename))
            absent += [(variant.name, file.name) for file in ours - set(sources)]
            assert not on_the_host & set(sources), "a change of how kernels are kept is none of a kernel"
    assert absent == []


@pytest.mark.reference
def test_of_the_files_at_the_door_only_the_compilers_options_are_sources_of_a_kernel() -> None:
    for card in registry().values():
        for variant in card.variants(ARCH):
            sources = names.source_files(Path(variant.make.__code__.co_filename))
            assert [file.name for file in sources if file.parent == KERNELS] == ["compile.py"]
            assert {KERNELS / "isa" / name for name in ("ptx.py", "instruction.py", "inlined.py")} <= set(sources)


@pytest.mark.reference
def test_rooms_of_kernels_take_nothing_of_the_core_but_errors_and_one_another() -> None:
    """What they took from elsewhere could be a constant of a kernel, and no digest would see it change."""
    taken = set()
    on_the_host = KERNELS / "cubins"
    for path in set(KERNELS.glob("*/*.py")) - set(on_the_host.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            taken |= {
                (path.name, name)
                for name in names
                if name.split(".")[0] == "eagle3core" and not name.startswith("eagle3core.kernels")
            }
    assert {name for _, name in taken} == {"eagle3core.errors"}


FILES = {
    "__init__": "",
    "kernel": "import toy.plain\nfrom toy import named\nfrom . import relative\ndef f():\n    from .inside import x\n",
    "plain": "from toy.second import y\n",
    "named": "from toy import (\n    bracketed as other,\n)\n",
    "relative": "",
    "inside": "",
    "second": "",
    "bracketed": "import toy.kernel\n",  # a circle ends
    "unused": "",
}  # fmt: skip


@pytest.mark.reference
def test_imports_of_every_kind_are_followed_wherever_they_stand(tmp_path: Path) -> None:
    toy = tmp_path / "toy"
    toy.mkdir()
    for name, text in FILES.items():
        (toy / f"{name}.py").write_text(text)
    sources = {file.stem for file in names.source_files(toy / "kernel.py") if file.parent == toy}
    assert sources == set(FILES) - {"unused"}


@pytest.mark.reference
def test_a_digest_follows_the_bytes_of_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3core.kernels.gemm.ring import kernel

    def digest() -> str:
        return names.source_digest.__wrapped__(kernel)

    sources, before, original = names.source_files(Path(kernel.__file__)), digest(), Path.read_bytes
    for changed in (*sources, KERNELS / "card.py", KERNELS / "launch.py", KERNELS / "gemm" / "launcher.py"):
        edited = {changed: original(changed) + b"# edited\n"}
        monkeypatch.setattr(Path, "read_bytes", lambda self, edited=edited: edited.get(self) or original(self))
        assert (digest() != before) == (changed in sources), changed.name
