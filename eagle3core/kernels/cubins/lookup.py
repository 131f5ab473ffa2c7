"""One kernel: looked for where machine code lies, compiled where it is missing.

A cubin is looked for in the ahead-of-time folders and archives (made by `build_cubins` or `write_archive` on any
machine), then in this machine's cache, then compiled and kept there. In the cache the compilers' versions are part of
its name; in an ahead-of-time folder they stand in the description, since its user may have no compiler.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from eagle3core.kernels.card import Variant
from eagle3core.kernels.compile import compile_variant, compiler_versions
from eagle3core.kernels.cubins.names import cache_name, cubin_name
from eagle3core.kernels.cubins.places import Cubin, check_writable, read_from, write_to

log = logging.getLogger("eagle3core")

CUBINS_VARIABLE = "EAGLE3_CUBINS"  # folders and archives of ahead-of-time cubins, separated like PATH
CACHE_VARIABLE = "EAGLE3_KERNEL_CACHE"  # where kernels compiled on this machine are kept
_own_folders: list[Path] = []  # of this process, where the cache cannot be written


def cubin(variant: Variant, arch: str) -> Cubin:
    """The machine code of a variant and its description, compiled now if no folder has it.

    Raises:
        BackendUnavailable: no folder has it, and there is no compiler, or it failed.
    """
    return _found(variant, arch) or _kept(variant, arch)


def is_stored(variant: Variant, arch: str) -> bool:
    """Whether `cubin` would find the machine code without compiling."""
    return _found(variant, arch) is not None


def build(variant: Variant, arch: str, folder: Path, name: str) -> Cubin:
    """Compile a variant now and put it into a folder under a name.

    Raises:
        BackendUnavailable: there is no compiler, or it failed.
        OSError: the folder cannot be written.
    """
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
    return write_to(folder, name, made.cubin, about)


def cache_folder() -> Path:
    """Where kernels compiled on this machine are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base, "eagle3core", "kernels")


def kept_folder() -> Path:
    """The cache, or where that cannot be written a folder of this process alone."""
    try:
        check_writable(cache_folder())
    except OSError as error:
        return _own_folder(cache_folder(), str(error.strerror))
    return cache_folder()


def _found(variant: Variant, arch: str) -> Cubin | None:
    """A cubin, where there is one that is whole."""
    name = cubin_name(variant, arch)
    for text in os.environ.get(CUBINS_VARIABLE, "").split(os.pathsep):
        if text and (ahead := read_from(Path(text), name)):
            return ahead
    kept = (read_from(folder, cache_name(variant, arch)) for folder in (cache_folder(), *_own_folders))
    return next((each for each in kept if each), None)


def _kept(variant: Variant, arch: str) -> Cubin:
    name = cache_name(variant, arch)
    try:
        return build(variant, arch, kept_folder(), name)
    except OSError as error:  # such as a disk that is full
        return build(variant, arch, _own_folder(cache_folder(), str(error.strerror)), name)


@cache
def _own_folder(instead_of: Path, reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="eagle3core-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _own_folders.append(folder)
    log.warning(
        "[EAGLE] kernels are compiled, and not kept for later: %s cannot be written (%s); name another folder in %s",
        instead_of, reason, CACHE_VARIABLE,
    )  # fmt: skip
    return folder
