"""Index files of a sharded target, and headers of its shards, through the engine's door."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from safetensors.torch import load_file, save_file

from lab.probes.fuzz.damage import as_bytes, damaged_text
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.groups.headers import INDEX, WEIGHTS, damaged_file
from lab.probes.fuzz.pairs import SmallPair, copied, open_pair, prepare_pair


def _make_index(pair: SmallPair, random: Random, folder: Path) -> None:
    copied(pair.target, folder)
    index = json.loads((folder / INDEX).read_text())
    weight_map = index["weight_map"]
    if random.random() < 0.4:
        shards = _split(folder, weight_map, random.choice((2, 3, 7)))
        if random.random() < 0.6:
            (folder / INDEX).write_bytes(as_bytes(index))
            path = folder / random.choice(shards)
            path.write_bytes(damaged_file(path.read_bytes(), random))
            return
    if random.random() < 0.5:
        names = list(weight_map)
        for name in random.sample(names, random.choice((1, 1, 3, len(names)))):
            weight_map[name] = random.choice(_SHARDS)
        (folder / INDEX).write_bytes(as_bytes(index))
    else:
        (folder / INDEX).write_bytes(damaged_text(index, random))
    if random.random() < 0.2:
        (folder / "loop.safetensors").symlink_to("loop.safetensors")
        (folder / "dir.safetensors").mkdir()


def _split(folder: Path, weight_map: dict[str, str], n: int) -> list[str]:
    """The single file as `n` shards, which the map names from now on; their names."""
    weights = load_file(folder / WEIGHTS)
    names, shards = sorted(weights), [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    for i, shard in enumerate(shards):
        save_file({name: weights[name] for name in names[i::n]}, folder / shard)
        weight_map.update(dict.fromkeys(names[i::n], shard))
    (folder / WEIGHTS).unlink()
    return shards


_SHARDS: tuple[object, ...] = (
    "../target/model.safetensors", "/etc/passwd", "/dev/zero", "/dev/stdin", "..", ".", "", "config.json", INDEX,
    "loop.safetensors", "dir.safetensors", "model.safetensors/", "./model.safetensors", "a" * 300 + ".safetensors",
    "\ud800.safetensors", "\x00.safetensors", "gone.safetensors", "gone.bin",
    "model-00001-of-00002.safetensors", "model-00002-of-00003.safetensors", "é" * 200 + ".bin",
    None, 3, ["a"], {}, True,
)  # fmt: skip


GROUPS = (
    Group(
        "indexes",
        "the index of a target's shards, to the engine",
        prepare_pair,
        _make_index,
        lambda pair, folder: open_pair(folder, pair.draft),
    ),
)
