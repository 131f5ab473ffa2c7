"""Launches on a GPU: cubins from disk or compiled once, kernels prebound, programmatic dependent launch.

`bind(launches)` gives a callable that only enqueues: no allocation, no check, no host read, fit for CUDA-graph capture.
Cubins are looked for by a digest of the kernel's source and constants: first in the ahead-of-time folders (made by
`build_cubins` on any machine), then in the cache folder, then compiled and kept there. Neither Numba nor a compiler is
needed on a GPU machine whose cubins were all built ahead.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from eagle3core.errors import BackendUnavailable, KernelLimit
from eagle3core.kernels.card import SHARED_BYTES, Card, Launch, Variant, arch_of
from eagle3core.kernels.compile import compile_variant, compiler_versions

CUBINS_VARIABLE = "EAGLE3_CUBINS"  # extra folders of ahead-of-time cubins, separated like PATH
CACHE_VARIABLE = "EAGLE3_KERNEL_CACHE"  # where kernels compiled on this machine are kept
_DEFAULT_SHARED = 48 * 1024  # a block may have this much without asking
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
_lock = threading.Lock()


def device_arch(device: torch.device | None = None) -> str:
    """Compile target of a CUDA device, the current one by default.

    Raises:
        BackendUnavailable: torch sees no CUDA device.
        KernelLimit: its compute capability is below 8.0.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "GPU kernels were asked for and torch sees no CUDA device", "a GPU of compute capability 8.0 or later",
            "use device='cpu' (the reference backend) or the emulator",
        )  # fmt: skip
    return arch_of(torch.cuda.get_device_capability(device))


def bind(launches: Sequence[Launch]) -> Callable[[], None]:
    """A callable that enqueues `launches` on torch's current stream; operands keep their addresses.

    The callable holds references to the operand tensors. Kernels are loaded here, so that nothing is compiled or
    loaded later, inside a graph capture.

    Raises:
        BackendUnavailable: no GPU, or a kernel that has no cubin here and no compiler to make one.
        KernelLimit: a launch asks for more shared memory than a block of this device has.
    """
    arch = device_arch()
    from cuda.core import Stream, launch  # type: ignore[import-untyped]

    bound = [(_config(item), _kernel(item.variant, arch), _arguments(item)) for item in launches]
    operands = [value for item in launches for value in item.values]

    def enqueue() -> None:
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        for config, kernel, arguments in bound:
            launch(stream, config, kernel, *arguments)

    enqueue.operands = operands  # type: ignore[attr-defined]
    return enqueue


def execute(launches: Sequence[Launch]) -> None:
    """Enqueue `launches` once: `emulator.execute`'s twin on the GPU."""
    bind(launches)()


def _config(item: Launch) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(
        grid=item.grid,
        block=item.variant.threads,
        shmem_size=item.variant.shared_bytes,
        programmatic_stream_serialization=item.variant.dependent and item.overlap,
    )


def _arguments(item: Launch) -> list[Any]:
    arguments = []
    for parameter, value in zip(item.variant.parameters, item.values, strict=True):
        if parameter.is_address:
            arguments.append(ctypes.c_int64(0 if value is None else value.data_ptr()))  # type: ignore[union-attr]
        else:
            arguments.append(_SCALARS[parameter.kind](value))
    return arguments


def _kernel(variant: Variant, arch: str) -> Any:
    with _lock:
        return _load(_Key(variant, arch), torch.cuda.current_device())


class _Key:
    """A variant and its target, equal when their digests are: what the loaded-kernel cache is indexed by."""

    def __init__(self, variant: Variant, arch: str) -> None:
        self.variant, self.arch = variant, arch
        self.digest = digest(variant, arch)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.digest == other.digest


@cache
def _load(key: _Key, device: int) -> Any:
    from cuda.bindings import driver  # type: ignore[import-untyped]
    from cuda.core import Device, ObjectCode

    variant = key.variant
    if variant.shared_bytes > SHARED_BYTES[key.arch]:
        raise KernelLimit(
            f"{variant.name} asks for {variant.shared_bytes} bytes of shared memory",
            f"at most {SHARED_BYTES[key.arch]} on {key.arch}",
            "choose fewer stages or rows per block for this architecture",
        )
    Device(device).set_current()
    code, about = cubin(variant, key.arch)
    kernel = ObjectCode.from_cubin(code, name=variant.name).get_kernel(about["entry"])
    if variant.shared_bytes > _DEFAULT_SHARED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, variant.shared_bytes, kernel.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelLimit(
                f"{variant.name}: the driver refused {variant.shared_bytes} bytes of shared memory ({status})",
                f"what compute capability {torch.cuda.get_device_capability(device)} offers",
                "report the device and driver version",
            )
    return kernel


# ---- cubins on disk


def digest(variant: Variant, arch: str) -> str:
    """Names one cubin: the target, the factory, its constants and bounds, and the source it is made from."""
    parts = [arch, variant.make.__qualname__, repr(sorted(variant.constants.items())), repr(variant.parameters)]
    parts += [repr((variant.threads, variant.blocks_per_sm)), source_digest(inspect.getmodule(variant.make))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@cache
def source_digest(module: Any) -> str:
    """Digest of every source that shapes a kernel module's machine code.

    Sources are its own file, the kernel files that it imports in turn, the instructions, and `compile`, whose options
    change code. The other files at the kernels' door run on the host alone, so a change there keeps cubins.
    """
    folder = Path(__file__).parent
    files: set[Path] = set()
    waiting = [folder / "isa" / "ptx.py", Path(inspect.getfile(module))]
    while waiting:
        path = waiting.pop()
        files.add(path)
        waiting += [found for found in _kernel_files(path.read_text(encoding="utf-8"), folder) if found not in files]
    return hashlib.sha256(b"".join(path.read_bytes() for path in [folder / "compile.py", *sorted(files)])).hexdigest()


def _kernel_files(source: str, folder: Path) -> Iterator[Path]:
    """Files of the kernels' rooms that a source imports."""
    for room, names in _IMPORT.findall(source):
        path = folder.joinpath(*room.split("."))
        candidates = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else []
        if path.is_dir():
            candidates += [path / f"{name.split()[0]}.py" for name in names.strip("() \n").split(",") if name.split()]
        yield from (candidate for candidate in candidates if candidate.exists() and candidate.parent != folder)


_IMPORT = re.compile(r"^\s*from eagle3core\.kernels\.([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)


def cubin(variant: Variant, arch: str) -> tuple[bytes, dict[str, Any]]:
    """The machine code of a variant and its description, compiled now if no folder has it."""
    name = cubin_name(variant, arch)
    ahead = [Path(folder) for folder in os.environ.get(CUBINS_VARIABLE, "").split(os.pathsep) if folder]
    for folder in ahead:
        if (folder / f"{name}.json").exists():
            return _stored(folder, name)
    kept, name = cache_folder(), f"{name}.{_compilers_digest()}"
    return _stored(kept, name) if (kept / f"{name}.json").exists() else _build(variant, arch, kept, name)


def cubin_name(variant: Variant, arch: str) -> str:
    """Names a cubin in an ahead-of-time folder, which whoever made it did with compilers of their choice.

    In the cache the versions of this machine's compilers follow, so that a new compiler compiles anew.
    """
    return f"{variant.name}.{arch}.{digest(variant, arch)}"


@cache
def _compilers_digest() -> str:
    return hashlib.sha256(repr(sorted(compiler_versions().items())).encode()).hexdigest()[:8]


def _stored(folder: Path, name: str) -> tuple[bytes, dict[str, Any]]:
    return (folder / f"{name}.cubin").read_bytes(), json.loads((folder / f"{name}.json").read_text())


def cache_folder() -> Path:
    """Where kernels compiled on this machine are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base, "eagle3core", "kernels")


def _build(variant: Variant, arch: str, folder: Path, name: str) -> tuple[bytes, dict[str, Any]]:
    made = compile_variant(variant, arch)
    about = {
        "variant": variant.name,
        "arch": arch,
        "entry": made.entry,
        "registers": made.registers,
        "spill_bytes": made.spill_bytes,
        "compilers": compiler_versions(),
        "constants": {key: str(value) for key, value in variant.constants.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    # The description is written last and by renaming, so that another process never sees half a kernel.
    for suffix, data in ((".cubin", made.cubin), (".json", json.dumps(about, indent=1).encode())):
        part = folder / f"{name}{suffix}.{os.getpid()}.part"
        part.write_bytes(data)
        part.replace(folder / f"{name}{suffix}")
    return made.cubin, about


def build_cubins(
    wanted: Sequence[Card] | Sequence[Variant], arch: str, out: Path, *, tell: Callable[[str], None] = lambda line: None
) -> int:
    """Compile variants, or all variants of cards, for `arch` into `out`, skipping those already there. Needs no GPU.

    Returns:
        How many were compiled now.
    """
    variants: list[Variant] = []
    for item in wanted:
        variants += [item] if isinstance(item, Variant) else [*item.variants(arch), *item.slow_variants(arch)]
    made = 0
    for variant in variants:
        name = cubin_name(variant, arch)
        if not (out / f"{name}.json").exists():
            _, about = _build(variant, arch, out, name)
            tell(f"{name}: {about['registers']} registers, {about['spill_bytes']} bytes of spills")
            made += 1
    return made
