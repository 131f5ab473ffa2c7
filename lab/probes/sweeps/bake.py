"""Writes the tuned file: one entry a regime, with where its numbers come from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3core.kernels import tuned
from lab.errors import ExperimentError, NotComparable
from lab.probes.sweeps.choose import WITHIN, Choice, choose
from lab.probes.sweeps.rows import SCREEN, Cell, SweepFile
from lab.rows.environment import checkout


def bake(path: Path, choices: Sequence[Choice], sweep: SweepFile, rows: Path, arch: str) -> dict[str, Any]:
    """Adds entries to a tuned file, in place of those of the same keys, and gives its content back.

    Args:
        rows: the sweep's file, referred to relative to the checkout.

    Raises:
        NotComparable: the file is of another GPU than the rows.
        ConfigError: an entry would set what has to stay as it is.
        ExperimentError: there is nothing to write, or the file is none of these.
    """
    if not choices:
        raise ExperimentError(f"no choice in {sweep.name}", "a complete sweep", "run the sweep again: it goes on")
    fresh: dict[str, Any] = {"schema": tuned.SCHEMA, "gpu": sweep.gpu, "arch": arch}
    content = _existing(path) if path.exists() else fresh
    if (content["gpu"], content["arch"]) != (sweep.gpu, arch):
        raise NotComparable(
            f"{path.name} is of {content['gpu']} ({content['arch']}), the rows are of {sweep.gpu} ({arch})",
            "one kind of GPU a file", "name another file with --bake",
        )  # fmt: skip
    for choice in choices:
        entry = entry_of(choice, _relative(rows))
        tuned.checked_entry(choice.op, entry, choice.regime)
        others = [one for one in content.get(choice.op, []) if one["key"] != entry["key"]]
        content[choice.op] = sorted([*others, entry], key=lambda one: json.dumps(one["key"]))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return content


def entry_of(choice: Choice, rows: str) -> dict[str, Any]:
    """A choice as the tuned file holds it."""
    return {
        "key": dict(choice.key),
        "setting": dict(choice.setting),
        "rows": rows,
        "baked_us": round(choice.baked_us, 3),
        "best_us": round(choice.best_us, 3),
        "default_us": round(choice.default_us, 3),
        "is_rule": choice.is_default,
        "reason": choice.reason,
        "shapes": [_short(shape) for shape in choice.shapes],
    }


def complaints(choices: Sequence[Choice], missing: Mapping[str, str]) -> list[str]:
    """Regimes without an entry, and entries further from the best found than allowed."""
    far = [
        f"{one.regime}: {one.within:.3f} of the best found, allowed {WITHIN}; {one.reason}"
        for one in choices if not one.holds
    ]  # fmt: skip
    return [*(f"{name}: no entry: {reason}" for name, reason in missing.items()), *far]


def faults_of(content: Mapping[str, Any], rows_of: Callable[[str], Sequence[Cell]]) -> list[str]:
    """What is wrong with the entries of a tuned file by the rows they refer to.

    Each must be what the rows give: measured, with the default's bits, and as near to the best found as allowed.

    Args:
        rows_of: rows of a file by its path in the checkout.
    """
    found = []
    for op in tuned.NEUTRAL:
        for entry in content.get(op, []):
            own = [row for row in rows_of(entry["rows"]) if row["op"] == op and row["key"] == entry["key"]]
            if not own:
                found.append(f"{op} {entry['key']}: no rows in {entry['rows']}")
                continue
            choice, name = choose(own), own[0]["regime"]
            if dict(choice.setting) != entry["setting"]:
                found.append(f"{name}: {entry['setting']} is not what its rows give, {dict(choice.setting)}")
            if not choice.holds or entry["baked_us"] > WITHIN * entry["best_us"] + 0.002:  # both are rounded
                found.append(f"{name}: further from the best found than {WITHIN}")
            measured = [row for row in own if row["phase"] == SCREEN and row["setting"] == entry["setting"]]
            if not measured or not all(row["bits_equal"] for row in measured):
                found.append(f"{name}: other bits than the default's")
    return found


def _short(shape: Mapping[str, Any]) -> str:
    names = ("kind", "m", "step", "context") if "m" in shape else ("batch", "kv", "tokens")
    return " ".join(f"{name}={shape[name]}" for name in names if name in shape)


def _relative(rows: Path) -> str:
    """A path that means the same on every machine."""
    root = checkout()
    whole = rows.resolve()
    return whole.relative_to(root).as_posix() if root and whole.is_relative_to(root) else rows.name


def _existing(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] == tuned.SCHEMA and content["gpu"] and content["arch"]:
            return dict(content)
        reason = f"schema {content['schema']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ExperimentError(
        f"{path.name} is no tuned file: {reason}", f"schema {tuned.SCHEMA}, gpu, arch", "name another file with --bake"
    )
