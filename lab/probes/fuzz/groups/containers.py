"""TurboMind directories and GGUF files of a draft: damaged bytes, counts and settings, to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import yaml

from eagle3core.checkpoint import convert_draft
from lab.probes.fuzz.damage import as_bytes, damaged_bytes, damaged_value
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.pairs import SmallPair, copied, open_pair, prepare_pair

SETTINGS = "config.yaml"
COUNTS = (0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


@dataclass(frozen=True)
class Containers:
    """The small pair, and its draft in both containers."""

    pair: SmallPair
    turbomind: Path
    gguf: Path


def _prepare(folder: Path) -> Containers:
    pair = prepare_pair(folder)
    made = Containers(pair, folder / "turbomind", folder / "gguf")
    for place in (made.turbomind, made.gguf):
        dtype = torch.bfloat16 if place == made.turbomind else None
        # The pair's scaling of the rotary embedding is lost to TurboMind, whose config has no word for it.
        convert_draft(pair.draft, place, place.name, target=pair.target, dtype=dtype, drop=("rope_scaling",))
        open_pair(pair.target, place)
    return made


def _make_turbomind(made: Containers, random: Random, folder: Path) -> None:
    copied(made.turbomind, folder)
    path = random.choice(sorted(folder.iterdir())) if random.random() < 0.4 else folder / SETTINGS
    data = path.read_bytes()
    kind = random.randrange(4)
    if path.name != SETTINGS or kind == 0:
        path.write_bytes(damaged_bytes(data, random))
    elif kind == 1:
        bomb = "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 12))
        path.write_text(random.choice((f"a0: &a0 [1]\n{bomb}", "!!python/object/apply:os.system ['true']", "[" * 3000)))
    else:  # JSON is YAML
        path.write_bytes(as_bytes(damaged_value(yaml.safe_load(data), random)))


def _make_gguf(made: Containers, random: Random, folder: Path) -> None:
    copied(made.gguf, folder)
    [path] = folder.iterdir()
    data = bytearray(path.read_bytes())
    kind, head = random.randrange(5), data.index(b"output_norm")
    if kind == 0:
        path.write_bytes(damaged_bytes(bytes(data), random))
    elif kind == 1:
        path.write_bytes(damaged_bytes(bytes(data[:head]), random) + data[head:])
    elif kind == 2:
        path.write_bytes(data[: random.randrange(len(data))])
    else:
        width = random.choice((4, 8))
        at = random.choice((8, 16, random.randrange(head)))
        data[at : at + width] = (random.choice(COUNTS) % 2 ** (8 * width)).to_bytes(width, "little")
        path.write_bytes(data)


def _open(made: Containers, folder: Path) -> None:
    open_pair(made.pair.target, folder)


GROUPS = (
    Group("turbomind", "a draft as a TurboMind directory, to the engine", _prepare, _make_turbomind, _open),
    Group("gguf", "a draft as a GGUF file, to the engine", _prepare, _make_gguf, _open),
)
