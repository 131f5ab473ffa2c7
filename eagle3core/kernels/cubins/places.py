"""Where machine code lies: folders, which are written to, and archives, which are only read.

A kernel is two files, `NAME.cubin` and its description `NAME.json`, which holds a digest of the first. What does not
agree with its digest is as good as absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger("eagle3core")

Cubin = tuple[bytes, dict[str, Any]]  # machine code and its description
MANIFEST = "manifest.json"  # of an archive
_DATE = (
    1980,
    1,
    1,
    0,
    0,
    0,
)  # the first that an archive can say: of every file in it, so that its bytes are its files'


def read_from(place: Path, name: str) -> Cubin | None:
    """The kernel of that name in a folder or an archive; None where it is not, or not whole."""
    get = _from_archive(place) if place.suffix == ".zip" else _from_folder(place)
    text = get(f"{name}.json")
    if text is None:  # the description is written last
        return None
    code = get(f"{name}.cubin")
    try:
        about = json.loads(text)
    except ValueError:
        about = {}
    if code is None or not isinstance(about, dict) or about.get("sha256") != hashlib.sha256(code).hexdigest():
        _tell_damage(place, name)
        return None
    return code, about


def write_to(folder: Path, name: str, code: bytes, about: Mapping[str, Any]) -> Cubin:
    """Put a kernel into a folder, which is made if need be; another process never sees half of it.

    Returns:
        What `read_from` then gives.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = {**about, "sha256": hashlib.sha256(code).hexdigest()}
    for suffix, data in ((".cubin", code), (".json", json.dumps(described, indent=1).encode())):
        part = folder / f"{name}{suffix}.{os.getpid()}.{secrets.token_hex(4)}.part"
        try:
            part.write_bytes(data)
            part.replace(folder / f"{name}{suffix}")
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return code, described


def check_writable(folder: Path) -> None:
    """Make the folder, and a file in it for a moment.

    Raises:
        OSError: one of them was refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / f"{os.getpid()}.{secrets.token_hex(4)}.part"
    trial.write_bytes(b"")
    trial.unlink()


def write_archive(path: Path, kernels: Mapping[str, Cubin], about: Mapping[str, Any]) -> None:
    """Kernels by name in one file, with a manifest of their digests; the same kernels give the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    digests = {name: hashlib.sha256(code).hexdigest() for name, (code, _) in sorted(kernels.items())}
    files = {MANIFEST: json.dumps({**about, "kernels": digests}, indent=1).encode()}
    for name, (code, description) in sorted(kernels.items()):
        described = {**description, "sha256": digests[name]}
        files |= {f"{name}.cubin": code, f"{name}.json": json.dumps(described, indent=1).encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(part, "w") as archive:
            for name, data in files.items():
                entry = zipfile.ZipInfo(name, _DATE)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, data, compresslevel=9)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _from_folder(folder: Path) -> Callable[[str], bytes | None]:
    def get(name: str) -> bytes | None:
        try:
            return (folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _tell_refusal(folder, str(error.strerror))
            return None

    return get


def _from_archive(path: Path) -> Callable[[str], bytes | None]:
    archive = _opened(path, _stamp(path))

    def get(name: str) -> bytes | None:
        if archive is None:
            return None
        try:
            return archive.read(name)
        except KeyError:
            return None
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
            log.warning("[EAGLE] %s in %s cannot be read (%s)", name, path.name, error)
            return b""  # which agrees with no digest

    return get


def _stamp(path: Path) -> tuple[int, int]:
    """What changes when a file is replaced."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


@cache
def _opened(path: Path, stamp: tuple[int, int]) -> zipfile.ZipFile | None:
    """An archive as it was at `stamp`; None, said once, if it is none."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        log.warning("[EAGLE] %s holds no kernels that can be read (%s); they are compiled", path.name, error)
        return None


@cache
def _tell_damage(place: Path, name: str) -> None:
    log.warning("[EAGLE] kernel %s in %s is damaged: it does not agree with its digest", name, place.name)


@cache
def _tell_refusal(place: Path, reason: str) -> None:
    log.warning("[EAGLE] kernels in %s cannot be read (%s)", place, reason)
