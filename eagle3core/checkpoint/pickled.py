"""Tensors out of a `pytorch_model.bin`: a pickle is a program, so it is read before it is run.

What `torch.save` makes of a state dict is a zip of plain entries: one pickle that names a handful of functions, and the
bytes of the tensors. Anything else is refused: other functions, other entries, packed ones, wrong checksums.
Source: pytorch, torch/serialization.py and torch/_utils.py.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

import torch
from torch import Tensor

from eagle3core.errors import CheckpointError, shown

MOST_PICKLE_BYTES = 16 << 20  # of the pickle, without the tensors; that of a head takes some 10 KiB
MOST_ENTRIES = 100_000
# All that a state dict of plain tensors names; torch's own list also has what makes objects of any size.
GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch.storage UntypedStorage",
    *(
        f"torch {kind}Storage"
        for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
    ),
}
_PIECE = 1 << 20
_AGAIN = "download or export the checkpoint again, best as safetensors"


def load_pickled(path: Path, *, with_lists: bool = False) -> dict[str, Tensor]:
    """A `.bin` file's tensors by name, mapped from the file; never code.

    Args:
        with_lists: also take files with lists of tensors, as `<name>.<index>`, and with texts and numbers, which are
            left out: what tools that write training data save.

    Raises:
        CheckpointError: a file that is no whole zip of plain entries, a pickle of anything but plain tensors by name.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_entries(archive, path)
            _check_pickle(archive, path)
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as reason:  # torch and zipfile raise whatever a damaged file makes them stumble over
        raise _unreadable(path, _first_line(reason)) from reason
    return _plain(_without_lists(values) if with_lists else values, path)


def _check_entries(archive: zipfile.ZipFile, path: Path) -> None:
    """That entries are stored as they are, once each, and that their checksums hold."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(entries) > MOST_ENTRIES or len(set(names)) < len(names):
        raise _unreadable(path, f"{len(entries)} entries of {len(set(names))} names")
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise _unreadable(path, f"entries that are packed, first {packed[0]}" if packed else "entries that overlap")
    for entry in entries:
        with archive.open(entry) as file:
            _read_through(file)


def _read_through(file: IO[bytes]) -> None:
    while file.read(_PIECE):  # raises where the checksum is another
        pass


def _check_pickle(archive: zipfile.ZipFile, path: Path) -> None:
    """That the pickle names nothing but what makes plain tensors."""
    pickles = [entry for entry in archive.infolist() if PurePosixPath(entry.filename).suffix == ".pkl"]
    if len(pickles) != 1 or pickles[0].file_size > MOST_PICKLE_BYTES:
        raise _unreadable(path, f"{len(pickles)} pickles of {[entry.file_size for entry in pickles][:3]} bytes")
    for code, argument, _ in pickletools.genops(archive.read(pickles[0])):
        if code.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4") or (
            code.name == "GLOBAL" and argument not in GLOBALS
        ):
            raise _unreadable(path, f"the pickle names {shown(argument or code.name, 100)}, which is no plain tensor")


def _without_lists(values: object) -> object:
    """A mapping with lists taken apart, and without texts and numbers; anything else as it is."""
    if not isinstance(values, dict):
        return values
    flat: dict[object, object] = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            flat |= {f"{name}.{i}": part for i, part in enumerate(value)}
        elif not isinstance(value, (str, int, float, type(None))):
            flat[name] = value
    return flat


def _plain(values: object, path: Path) -> dict[str, Tensor]:
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise CheckpointError(f"{path} holds no mapping of names to tensors", "a plain state dict", _AGAIN)
    for name, tensor in values.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path} holds a tensor named {shown(name, 100)}", "names that are texts", _AGAIN)
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(
                f"{path}: tensor {name} is {tensor.layout} on {tensor.device}",
                "dense tensors with their values",
                _AGAIN,
            )
        if tensor.numel() * tensor.element_size() > path.stat().st_size:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(tensor.shape)} over {tensor.untyped_storage().nbytes()} bytes",
                "tensors whose values are stored, each once",
                _AGAIN,
            )
    return {name: tensor.detach() for name, tensor in values.items()}  # parameters are stored as such


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} ({path.stat().st_size} bytes) cannot be read with weights_only=True: {reason}",
        "a complete file of plain tensors, as torch.save writes it",
        _AGAIN,
    )


def _first_line(reason: BaseException) -> str:
    return (str(reason).splitlines() or [type(reason).__name__])[0]
