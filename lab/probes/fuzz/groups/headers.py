"""Headers of safetensors files, a target's and a draft's, through the engine's door."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from lab.probes.fuzz.damage import ODD_TEXTS, as_bytes, damaged_bytes, damaged_text, long_text, odd_value
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.pairs import SmallPair, copied, open_pair, prepare_pair

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Header = dict[str, Any]


def _make_header(pair: SmallPair, random: Random, folder: Path) -> None:
    """The file of either model with another header."""
    copied(random.choice((pair.target, pair.draft)), folder)
    (folder / INDEX).unlink(missing_ok=True)
    (folder / WEIGHTS).write_bytes(damaged_file((folder / WEIGHTS).read_bytes(), random))


def damaged_file(data: bytes, random: Random) -> bytes:
    """A safetensors file whose header is damaged in form, in structure, or by its offsets."""
    length = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = random.randrange(8)
    if kind == 0:
        return damaged_bytes(data, random)
    if kind == 1:
        length = random.choice((0, 1, length + 1, length - 1, 2**63, 2**64 - 1, len(data), len(data) - 8, 10**8))
        return length.to_bytes(8, "little") + data[8:]
    if kind < 6:
        for _ in range(random.choice((1, 1, 2))):
            random.choice(_HEADER_DAMAGES)(header, random)
        head = as_bytes(header)
    else:
        head = damaged_text(header, random) if random.random() < 0.9 else long_text(random)
    cut = tensors if random.random() < 0.8 else tensors[: random.randrange(len(tensors))]
    return len(head).to_bytes(8, "little") + head + cut


def _shift(header: Header, random: Random) -> None:
    entry = _entry(header, random)
    a, b = entry["data_offsets"]
    entry["data_offsets"] = random.choice(
        ([a + 1, b + 1], [a - 8, b - 8], [b, a], [a, b + 4], [-b, -a], [a, b, b], [a], [str(a), str(b)], [0, b], a,
         [2**63, 2**63 + b - a], [a + 2**64, b + 2**64], [float(a), float(b)], [None, b], [a, True], {"0": a, "1": b})
    )  # fmt: skip


def _share(header: Header, random: Random) -> None:
    """Two names for one tensor's bytes."""
    name = random.choice(_names(header))
    header[random.choice((*ODD_TEXTS, f"{name}.copy", _names(header)[0]))] = header[name]


def _reshape(header: Header, random: Random) -> None:
    entry = _entry(header, random)
    shape = entry["shape"]
    entry["shape"] = random.choice(
        (shape[::-1], [*shape, 1], [1] * 70 + shape, [-n for n in shape], [0], [], [2**40, 2**40], [2**62, 4], "shape",
         [str(n) for n in shape], [n + 0.5 for n in shape], None, [*shape, 0], [10**400], [True, *shape])
    )  # fmt: skip


def _retype(header: Header, random: Random) -> None:
    kinds = (
        "F32",
        "F16",
        "BF16",
        "F64",
        "I8",
        "BOOL",
        "F8_E4M3",
        "F4",
        "C64",
        "U64",
        "E8M0",
        "f32",
        "",
        None,
        3,
        ["F32"],
    )
    _entry(header, random)["dtype"] = random.choice(kinds)


def _halve(header: Header, random: Random) -> None:
    """Another type of another width, whose shape fits the bytes."""
    entry = _entry(header, random)
    entry["dtype"] = random.choice(("U8", "I8", "F8_E4M3", "F8_E5M2", "BOOL"))
    entry["shape"] = [entry["data_offsets"][1] - entry["data_offsets"][0]]


def _many(header: Header, random: Random) -> None:
    end = max((header[name]["data_offsets"][1] for name in _names(header)), default=0)
    for i in range(random.choice((1, 1000, 20000))):
        header[f"more.{i}"] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}


def _metadata(header: Header, random: Random) -> None:
    header["__metadata__"] = odd_value(random)


def _entry(header: Header, random: Random) -> dict[str, Any]:
    entry: dict[str, Any] = header[random.choice(_names(header))]
    return entry


def _names(header: Header) -> list[str]:
    """Names whose entries are still whole."""
    return [n for n, e in header.items() if n != "__metadata__" and isinstance(e.get("data_offsets"), list)
            and len(e["data_offsets"]) == 2 and isinstance(e.get("shape"), list)
            and all(type(v) is int for v in (*e["data_offsets"], *e["shape"]))]  # fmt: skip


_HEADER_DAMAGES: tuple[Callable[[Header, Random], None], ...] = (
    _shift, _shift, _share, _reshape, _retype, _halve, _many, _metadata,
)  # fmt: skip


def _open(pair: SmallPair, folder: Path) -> None:
    is_draft = "draft_vocab_size" in json.loads((folder / "config.json").read_text())
    open_pair(pair.target if is_draft else folder, folder if is_draft else pair.draft)


GROUPS = (Group("headers", "headers of safetensors files, to the engine", prepare_pair, _make_header, _open),)
