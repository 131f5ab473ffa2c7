"""`pytorch_model.bin` of a draft: damaged bytes, odd contents, packed entries, and pickles that are programs."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open

from lab.probes.fuzz.damage import damaged_bytes
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.pairs import SmallPair, copied, open_pair, prepare_pair
from lab.probes.fuzz.watch import CANARY

WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"
Stored = dict[Any, Any]


class _Calls:
    """What a pickle makes by calling a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _prepare(folder: Path) -> tuple[SmallPair, Stored]:
    pair = prepare_pair(folder)
    with safe_open(pair.draft / WEIGHTS, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    copied(pair.draft, folder / "pickled")
    (folder / "pickled" / WEIGHTS).unlink()
    torch.save(weights, folder / "pickled" / PICKLE)
    open_pair(pair.target, folder / "pickled")
    return pair, weights


def _make(prepared: tuple[SmallPair, Stored], random: Random, folder: Path) -> None:
    pair, weights = prepared
    copied(pair.draft.parent / "pickled", folder)
    path = folder / PICKLE
    kind = random.randrange(7)
    if kind == 0:
        path.write_bytes(damaged_bytes(path.read_bytes(), random))
    elif kind == 1:
        _rezip(path, random)
    elif kind == 2:
        _bend_pickle(path, random)
    elif kind == 3:
        program = random.choice(PROGRAMS)(folder.parent / CANARY)
        path.write_bytes(pickle.dumps({"a": 1, "fc.weight": program}, protocol=random.choice((0, 1, 2, 3, 4, 5))))
    else:
        stored = dict(weights)
        if kind == 4:
            stored[random.choice(list(stored))] = random.choice(PROGRAMS)(folder.parent / CANARY)
        else:
            random.choice(_ODD)(stored, random)
        torch.save(stored, path, _use_new_zipfile_serialization=random.random() < 0.85)


def _rezip(path: Path, random: Random) -> None:
    """The same entries packed, renamed, doubled, left out, or with a huge one beside them."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name, kind = random.choice(list(entries)), random.randrange(6)
    method = zipfile.ZIP_DEFLATED if kind in (0, 5) else zipfile.ZIP_STORED
    if kind == 1:
        entries[random.choice(("../../canary", "/canary", "a" * 5000, "\x01", "draft/data.pkl"))] = entries.pop(name)
    elif kind == 2:
        entries.pop(name)
    elif kind == 3:
        entries[name] = entries[name] * 2 if random.random() < 0.5 else entries[name][:-1]
    elif kind == 5:
        entries[name] = b"\0" * (64 << 20)
    with zipfile.ZipFile(path, "w", method) as archive:
        for each, data in entries.items():
            archive.writestr(each, data)
        if kind == 4:
            archive.writestr(f"{name}2", b"")


def _bend_pickle(path: Path, random: Random) -> None:
    """A damaged pickle in a whole archive."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = next(name for name in entries if name.endswith(".pkl"))
    entries[name] = damaged_bytes(entries[name], random)
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in entries.items():
            archive.writestr(each, data)


def _rename(stored: Stored, random: Random) -> None:
    name = random.choice(list(stored))
    stored[random.choice((0, 1.5, None, b"fc", ("fc",), True, "a" * 5000, "\ud800", "", "\x1b[2J"))] = stored.pop(name)


def _retype(stored: Stored, random: Random) -> None:
    name = random.choice(list(stored))
    value = stored[name]
    stored[name] = random.choice(TYPES)(value)


def _nest(stored: Stored, random: Random) -> None:
    inner = dict(stored)
    stored.clear()
    stored.update(random.choice(({"model": inner}, {0: inner}, {"a": [inner]}, {})))


def _alias(stored: Stored, random: Random) -> None:
    """Tensors that share or stretch one storage."""
    names = list(stored)
    stored[random.choice(names)] = stored[random.choice(names)]
    stored[random.choice(names)] = torch.zeros(1).expand(random.choice(((10**10,), (2**31, 2**31), (24, 16))))


def _bits(stored: Stored, random: Random) -> None:
    name = random.choice([name for name, value in stored.items() if value.is_floating_point()])
    stored[name] = stored[name].clone()
    stored[name].view(-1)[random.randrange(stored[name].numel())] = random.choice((float("nan"), float("inf"), 1e38))


_ODD = (_rename, _retype, _retype, _nest, _alias, _bits)
TYPES: tuple[Callable[[Any], Any], ...] = (
    lambda value: value.to("meta"),
    lambda value: value.to_sparse(),
    lambda value: value.float().to_sparse_csr() if value.dim() == 2 else value.to_sparse(),
    lambda value: torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8),
    lambda value: value.to(torch.complex64),
    lambda value: value.to(torch.float8_e4m3fn),
    lambda value: torch.nn.Parameter(value.float()),
    lambda value: torch.nested.nested_tensor([value.float()]),
    lambda value: value.t() if value.dim() == 2 else value,
    lambda value: value.to(torch.bool),
    lambda value: value[None],
    lambda value: value.tolist(),
    lambda value: value.float().numpy(),
    lambda value: value.shape,
    lambda value: None,
    lambda value: "text",
    lambda value: torch.float32,
    lambda value: value.conj() if value.is_complex() else torch.complex(value.float(), value.float()).conj(),
    lambda value: torch._neg_view(value.float()),
)
# Each would leave the canary, or take all memory, were it run.
PROGRAMS: tuple[Callable[[Path], Any], ...] = (
    lambda canary: _Calls(os.system, f"touch {canary}"),
    lambda canary: _Calls(open, str(canary), "w"),
    lambda canary: _Calls(eval, f"open({str(canary)!r}, 'w')"),
    lambda canary: _Calls(Path.touch, canary),
    lambda canary: _Calls(os.mkdir, str(canary)),
    lambda canary: _Calls(bytearray, 8 << 30),
    lambda canary: _Calls(torch.zeros, 4 << 30),
    lambda canary: _Calls(torch.Tensor, 4 << 30),
    lambda canary: _Calls(torch.FloatTensor, 4 << 30),
    lambda canary: _Calls(torch.FloatStorage, 4 << 30),
    lambda canary: _Calls(pow, 10, 10**9),
)


GROUPS = (
    Group(
        "pickles",
        "pytorch_model.bin of a draft, to the engine",
        _prepare,
        _make,
        lambda prepared, folder: open_pair(prepared[0].target, folder),
    ),
)
