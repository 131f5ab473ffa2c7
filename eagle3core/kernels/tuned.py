"""Tuned settings: order-neutral parameters that measurements chose, one data file for each kind of GPU.

`choose_tiling` and `choose_plan` ask here first, when programs are built, and follow their rule where nothing is known.
A file is made by `eagle3lab sweep gemm|fmha --bake`; it lies in `tuned/` beside this module, or is named by the
environment variable EAGLE3_GEMM_TUNED ("none": the rule alone). On a machine with a GPU the file of that GPU counts; on
one without, which compiles ahead, the first by name of the architecture.

An entry cannot change a bit: it may hold the parameters in `NEUTRAL` and nothing else.
Source: docs/requirements.md R-101 to R-103, R-106, R-111.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eagle3core.errors import ConfigError, KernelLimit
from eagle3core.kernels.card import arch_of

log = logging.getLogger("eagle3core")

TUNED_VARIABLE = "EAGLE3_GEMM_TUNED"
NO_FILE = "none"
FOLDER = Path(__file__).parent / "tuned"
SCHEMA = 1

Setting = Mapping[str, Any]

# What an entry has to give, and what it must not: the first changes time, the second bits.
NEUTRAL: dict[str, frozenset[str]] = {
    "gemm": frozenset(
        {
            "kernel", "x_tiles", "w_tiles", "units", "stages", "warps_x", "warps_w", "split", "together", "cluster",
            "held", "resident", "paced",
        }
    ),
    "attention": frozenset({"row_warps", "groups", "units", "stages", "run", "grouped", "by_split"}),
}  # fmt: skip
BEFORE: dict[str, Setting] = {
    "gemm": {"cluster": 1, "held": False, "resident": 0, "paced": 0},
    "attention": {"grouped": False, "by_split": False},
}  # what older files do not name, and what it was
ORDER: dict[str, frozenset[str]] = {
    "gemm": frozenset({"streams", "unit"}),
    "attention": frozenset({"key unit", "splits", "streams", "bundle"}),
}
SOURCE = ("rows", "baked_us", "best_us", "default_us")  # what every entry says of its origin
# Keys of a session from which on attention is another regime (docs/requirements.md R-111): from the first on a stream
# has several units; sessions of 2,048 tokens, with what is in flight, are below it. The second counts as long.
MIDDLE_KEYS, LONG_KEYS = 3072, 8192


class GemmKey(NamedTuple):
    """What a tiling is tuned for; `rows` is the regime's largest number (`rows_regime`)."""

    dtype: str
    rows: int
    weight_rows: int
    k: int
    packed: bool

    @property
    def text(self) -> str:
        """On one line, for rows and errors."""
        layout = "packed" if self.packed else "by rows"
        return f"{self.dtype} rows<={self.rows} {self.weight_rows}x{self.k} {layout}"


class AttentionKey(NamedTuple):
    """What a plan is tuned for: a head's work, the order of its sums, and the regime.

    `rows` is tokens times heads of a group, up to the regime's largest; `keys` the fewest of the regime, 0,
    `MIDDLE_KEYS` or `LONG_KEYS`.
    """

    dtype: str
    dim: int
    group: int
    splits: int
    streams: int
    rows: int
    batch: int
    kv_heads: int
    keys: int

    @property
    def text(self) -> str:
        """On one line, for rows and errors."""
        heads = f"{self.kv_heads}x{self.group} heads of {self.dim}"
        return (
            f"{self.dtype} {heads} rows<={self.rows} batch {self.batch} keys>={self.keys} {self.splits}x{self.streams}"
        )


Key = GemmKey | AttentionKey
_KEYS: dict[str, type[GemmKey] | type[AttentionKey]] = {"gemm": GemmKey, "attention": AttentionKey}


def rows_regime(rows: int) -> int:
    """The most rows of a regime: a tiling that suits one number of them suits all."""
    return next((most for most in (8, 16, 24, 32, 48, 64) if rows <= most), -(-rows // 64) * 64)


def attention_rows_regime(rows: int) -> int:
    """The same for rows of a key head: those of half a tile, of one, of two, then as warps share them."""
    return next((most for most in (8, 16, 32, 64, 128) if rows <= most), -(-rows // 256) * 256)


def keys_regime(keys: int) -> int:
    """The fewest keys of the regime of sessions of up to `keys` tokens."""
    return next((least for least in (LONG_KEYS, MIDDLE_KEYS) if keys >= least), 0)


@dataclass(frozen=True)
class Artifact:
    """Settings of one kind of GPU.

    Attributes:
        name: of the file. gpu: as the driver names it. arch: compile target.
        settings: by operation ("gemm", "attention") and key.
    """

    name: str
    gpu: str
    arch: str
    settings: Mapping[str, Mapping[Key, Setting]] = field(default_factory=dict)

    @property
    def n_entries(self) -> int:
        return sum(len(known) for known in self.settings.values())


def find(arch: str, op: str, key: Key) -> Setting | None:
    """The tuned setting of a launch for `arch`, or None where the rule decides."""
    known = active(arch)
    return known.settings.get(op, {}).get(key) if known else None


def active(arch: str) -> Artifact | None:
    """The settings that count for `arch` on this machine; read once, with one line in the log either way.

    Raises:
        ConfigError: the file is unusable, or was made for another GPU than this machine's.
    """
    return _active(os.environ.get(TUNED_VARIABLE, ""), arch, gpu_kind(arch))


@cache
def gpu_kind(arch: str) -> str | None:
    """The name of this machine's GPU, or None if it has none or `arch` is not its own."""
    if not torch.cuda.is_available():
        return None
    try:
        if arch_of(torch.cuda.get_device_capability()) != arch:
            return None
    except KernelLimit:  # a GPU that the kernels have no target for
        return None
    return torch.cuda.get_device_name()


@cache
def _active(named: str, arch: str, kind: str | None) -> Artifact | None:
    if named == NO_FILE:
        return None
    found = [read_artifact(Path(named))] if named else [read_artifact(path) for path in sorted(FOLDER.glob("*.json"))]
    if named and kind and found[0].gpu != kind:
        raise ConfigError(
            f"{TUNED_VARIABLE} names {found[0].name}, tuned on {found[0].gpu}; this is {kind}",
            f"a file of {kind}, or {NO_FILE!r}",
            "unset it, or make one here with `eagle3lab sweep gemm --bake`",
        )
    fitting = [one for one in found if (one.gpu == kind if kind else one.arch == arch)]
    if not fitting:
        log.info("[EAGLE3][GEMM_TUNED] no file for device=%s; the rule decides", kind or arch)
        return None
    log.info("[EAGLE3][GEMM_TUNED] loaded entries=%d device=%s", fitting[0].n_entries, fitting[0].gpu)
    return fitting[0]


def read_artifact(path: Path) -> Artifact:
    """The settings in a file.

    Raises:
        ConfigError: there is no such file, it is no such file, or an entry holds what would change bits.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tuned settings {path.name} cannot be read: {error}",
            "a file that `eagle3lab sweep gemm|fmha --bake` wrote",
            f"make it again, or set {TUNED_VARIABLE}={NO_FILE}",
        ) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        schema = content.get("schema") if isinstance(content, dict) else None
        raise ConfigError(
            f"tuned settings {path.name} of schema {schema!r}", f"schema {SCHEMA}", "make the file again with --bake"
        )
    lists = {op: content.get(op, []) for op in _KEYS}
    wrong = [name for name in ("gpu", "arch") if not isinstance(content.get(name), str)]
    wrong += [op for op, entries in lists.items() if not isinstance(entries, list)]
    if wrong:
        raise ConfigError(
            f"tuned settings {path.name} lack {', '.join(wrong)}, or give it as something else",
            "the name of a GPU, its architecture, and lists of entries",
            "make the file again with --bake",
        )
    settings: dict[str, dict[Key, Setting]] = {}
    for op in _KEYS:
        for number, entry in enumerate(lists[op]):
            key, setting = checked_entry(op, entry, f"{path.name}, {op} entry {number}")
            settings.setdefault(op, {})[key] = setting
    return Artifact(path.name, content["gpu"], content["arch"], settings)


def checked_entry(op: str, entry: Any, where: str) -> tuple[Key, Setting]:
    """The key and the setting of an entry `{"key": {...}, "setting": {...}, "rows": ..., "baked_us": ...}`.

    Raises:
        ConfigError: no such entry, a parameter that sets the order of sums, one that does not exist, or one that is not
            there.
    """
    setting, given = _parts_of(entry, where)
    setting = {**BEFORE[op], **setting}
    for name in setting:
        if name in ORDER[op]:
            raise ConfigError(
                f"{where} sets {name!r} to {setting[name]!r}, which is part of the order of sums",
                f"order-neutral parameters: {', '.join(sorted(NEUTRAL[op]))}",
                "remove the entry: one order holds for all launches of an engine and is changed in the source alone",
            )
    wanted: list[tuple[str, Any, Any]] = [
        ("parameters", set(setting), set(NEUTRAL[op])),
        ("parts of a key", set(given), set(_KEYS[op]._fields)),
    ]
    for what, got, allowed in wanted:
        if got != allowed:
            raise ConfigError(
                f"{where} has {what} {sorted(got ^ allowed)} too many or too few",
                ", ".join(sorted(allowed)),
                "make the file again with --bake",
            )
    missing = [name for name in SOURCE if name not in entry]
    odd = {name: value for name, value in setting.items() if not _is_fine(value)}
    if missing or odd:
        raise ConfigError(
            f"{where} lacks {missing} or has {odd}",
            f"counts of 0 and more, and its origin: {', '.join(SOURCE)}",
            "make the file again with --bake",
        )
    key = _KEYS[op](**given)
    return key, setting


def _parts_of(entry: Any, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The setting and the key of what a file gives as an entry."""
    parts = [entry.get(name) if isinstance(entry, Mapping) else None for name in ("setting", "key")]
    setting, given = (dict(part) if isinstance(part, Mapping) else None for part in parts)
    if setting is None or given is None or not all(isinstance(value, str | int) for value in given.values()):
        raise ConfigError(
            f"{where} is {entry!r}",
            "an object with a setting and a key, each an object of names and plain values",
            "make the file again with --bake",
        )
    return setting, given


def _is_fine(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and value >= 0)
