"""Compile a kernel variant for any architecture with no GPU: PTX, cubin, and what the assembler says of them.

Numba writes the PTX, `ptxas` assembles it, `nvdisasm` shows the machine code. The checks that CI asserts (no local
memory, no spills, no double precision, expected tensor-core instructions, register bound) are `Compiled.faults`.
Source: numba-cuda documentation (compile_ptx); CUDA binary utilities.
"""

from __future__ import annotations

import gc
import importlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels.card import SHARED_BYTES, Variant


@dataclass(frozen=True)
class Compiled:
    """A variant for one architecture.

    Attributes:
        entry: the kernel's name in the cubin.
        spill_bytes: spill stores and loads together.
        has_local: the PTX declares local memory.
        has_double: the PTX computes in f64, which here is always an unintended promotion.
        merged: products that the compiler merged with an addition by its own choice.
        serialized: the assembler waits for each product of a warpgroup before it makes the next.
        sass: machine instructions by opcode, e.g. {"HMMA": 4}; empty unless asked for.
    """

    arch: str
    entry: str
    ptx: str
    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    has_local: bool
    has_double: bool
    merged: int
    serialized: bool
    sass: Counter[str]

    def faults(self, variant: Variant) -> list[str]:
        """What breaks the variant's promises, in words; empty when all is well."""
        found = []
        if self.registers > variant.max_registers:
            found.append(f"{self.registers} registers, bound {variant.max_registers}")
        if self.registers * variant.threads * variant.blocks_per_sm > 65536:
            found.append(f"{self.registers} registers do not leave room for {variant.blocks_per_sm} blocks a processor")
        found += [
            f"{n} bytes of {what}" for n, what in ((self.spill_bytes, "spills"), (self.stack_bytes, "stack")) if n
        ]
        if self.has_local:
            found.append("local memory in the PTX")
        if self.has_double:
            found.append("f64 arithmetic in the PTX")
        if variant.rounds_itself and self.merged:
            found.append(f"{self.merged} products merged with an addition by the compiler")
        if self.serialized:
            found.append("products of a warpgroup made one after the other")
        shared = variant.shared_bytes + self.static_shared_bytes
        if shared > SHARED_BYTES[self.arch]:
            found.append(f"{shared} bytes of shared memory, {SHARED_BYTES[self.arch]} exist")
        for opcode, least in variant.instructions.items():
            if self.sass and self.sass[opcode] < least:
                found.append(f"{self.sass[opcode]} {opcode}, at least {least} expected")
        if self.sass["LDL"] or self.sass["STL"]:
            found.append(f"{self.sass['LDL']} local loads, {self.sass['STL']} local stores")
        return found


def compile_variant(variant: Variant, arch: str, *, disassemble: bool = False) -> Compiled:
    """`variant` compiled for `arch` ("sm_90a"), with no GPU.

    Raises:
        BackendUnavailable: Numba's CUDA compiler, `ptxas` or (with `disassemble`) `nvdisasm` is missing, or has failed;
            then with its message.
    """
    ptx = _ptx(variant, arch)
    entry = _match(r"\.visible \.entry (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        log = _run([tool("ptxas"), "-v", f"-arch={arch}", str(source), "-o", str(cubin)])
        # Without a walk over the data flow, which names branch targets and takes a quarter of the time.
        sass = opcodes(_run([tool("nvdisasm"), "-c", "-ndf", str(cubin)])) if disassemble else Counter()
        code = cubin.read_bytes()
    return Compiled(
        arch=arch,
        entry=entry,
        ptx=ptx,
        cubin=code,
        registers=int(_match(r"Used (\d+) registers", log)),
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        stack_bytes=int(_match(r"(\d+) bytes stack frame", log, "0")),
        static_shared_bytes=int(_match(r"(\d+) bytes smem", log, "0")),
        has_local=".local" in ptx,
        has_double=bool(re.search(r"\.f64\b", re.sub(r"\.reg \.f64.*", "", ptx))),
        merged=merged_products(ptx),
        serialized="wgmma.mma_async instructions are serialized" in log,
        sass=sass,
    )


@cache
def compiler_versions() -> dict[str, str]:
    """Versions of all that turn a kernel into machine code: Python's bytecode, front end, LLVM, NVVM, assembler.

    What is missing, or comes with a toolkit and not as a package, is "none".
    """
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    try:
        versions["ptxas"] = _match(r"release [\d.]+, V([\d.]+)", _run([tool("ptxas"), "--version"]))
    except BackendUnavailable:
        versions["ptxas"] = "none"
    return versions


def merged_products(ptx: str) -> int:
    """Multiply-adds in fp32 that the front end made of a product and an addition: those outside inline statements."""
    own = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)
    return len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32\b", own))


def compute_capability(arch: str) -> tuple[int, int] | tuple[int, int, str]:
    """("sm_90a") -> (9, 0, "a")."""
    major, minor, feature = re.fullmatch(r"sm_(\d+)(\d)([a-z]?)", arch).groups()  # type: ignore[union-attr]
    return (int(major), int(minor), feature) if feature else (int(major), int(minor))


@contextmanager
def _uncollected() -> Iterator[None]:
    """The front end makes millions of objects, most of which stay until it ends: looking for garbage takes a fifth."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_uncollected()
def _ptx(variant: Variant, arch: str) -> str:
    capability = compute_capability(arch)
    front_end = getattr(_compiler(), "_compile_pyfunc_with_fixup", None)
    if front_end is None:  # another release of numba-cuda: the public way, which types the kernel anew for each target
        from eagle3core.kernels.isa import ptx as isa

        kernel = variant.make(isa, **variant.constants)
        public: Any = isa.cuda
        text, _ = public.compile_ptx(kernel, _signature(variant), cc=capability, launch_bounds=_bounds(variant))
        return _numbered_within(str(text))
    return _numbered_within(str(_library(_Typed(variant)).get_asm_strs(cc=capability)[0]))


def _numbered_within(ptx: str) -> str:
    """The text with functions numbered from 1: Numba counts those of the process, and names them by it, so that a
    kernel's bytes would tell what was compiled before it."""
    numbers: dict[str, int] = {}

    def own(found: re.Match[str]) -> str:
        tag = f"v{numbers.setdefault(found[0], len(numbers) + 1)}"
        return f"B{len(tag)}{tag}"

    return re.sub(r"B\d+v\d+", own, ptx)


class _Typed:
    """A variant as the front end sees it: equal for all targets whose constants and bounds agree."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.key = (variant.make, repr(sorted(variant.constants.items())), variant.parameters, _bounds(variant))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Typed) and self.key == other.key


@lru_cache(maxsize=4)
def _library(typed: _Typed) -> Any:
    """The typed and lowered kernel, from which PTX of any target is quickly made."""
    from eagle3core.kernels.isa import ptx as isa
    from eagle3core.kernels.isa.inlined import CAPABILITY

    variant = typed.variant
    library, _ = _compiler()._compile_pyfunc_with_fixup(
        variant.make(isa, **variant.constants), _signature(variant), device=False, abi="numba", cc=CAPABILITY,
        launch_bounds=_bounds(variant),
    )  # fmt: skip
    return library


def _bounds(variant: Variant) -> tuple[int, int]:
    return variant.threads, variant.blocks_per_sm


def _signature(variant: Variant) -> Any:
    from numba import types

    kinds = {"i32": types.int32, "i64": types.int64, "f32": types.float32}
    return types.void(*(kinds[p.kind] for p in variant.parameters))


def _compiler() -> Any:
    try:
        from eagle3core.kernels.isa import ptx  # noqa: F401  first, for the names it restores in numpy

        return importlib.import_module("numba.cuda.compiler")
    except ImportError as error:
        raise BackendUnavailable(
            f"the CUDA compiler cannot be imported: {error}",
            "numba and numba-cuda with the CUDA 13 toolkit wheels",
            "pip install 'numba-cuda[cu13]'",
        ) from error


def opcodes(sass: str) -> Counter[str]:
    """Instructions of a disassembly by opcode without its suffixes."""
    found = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", sass, re.MULTILINE)
    return Counter(found)


def tool(name: str) -> str:
    """Path of a CUDA binary: beside this Python's packages, in CUDA_HOME, in PATH, or in /usr/local/cuda.

    Raises:
        BackendUnavailable: it is in none of them.
    """
    wheels = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin")
    homes = [Path(os.environ[key], "bin") for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
    for folder in [wheels, *homes]:
        if (folder / name).exists():
            return str(folder / name)
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found is None:
        raise BackendUnavailable(
            f"{name} was not found", "a CUDA 13.0 toolkit, or its wheels", f"pip install the wheel that holds {name}"
        )
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendUnavailable(
            f"{Path(command[0]).name} failed: {done.stdout}{done.stderr}",
            "a CUDA 13.0 toolkit that knows every target of the kernels",
            "install its wheels, or set CUDA_HOME to one; report kernels that it refuses",
        )
    return done.stdout + done.stderr


def _match(pattern: str, text: str, otherwise: str | None = None) -> str:
    found = re.search(pattern, text)
    if found is None and otherwise is None:
        raise BackendUnavailable(
            f"the compiler's output has no {pattern!r}: {text[:2000]}",
            "the output of CUDA 13.0's tools",
            "install their wheels, or set CUDA_HOME to such a toolkit",
        )
    return found.group(1) if found else str(otherwise)
