"""Pairs as folders: found and named here, read and checked in full by `eagle3core.checkpoint`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Pair:
    """A target and its draft on disk.

    Attributes:
        target, draft: folders in Hugging Face and SafeAILab/SpecForge (or speculators) layout.
        prompts: JSON lines to measure with; None if none came with the pair.
        card: what is known about how it was made; empty if nothing is.
    """

    target: Path
    draft: Path
    prompts: Path | None = None
    card: dict[str, Any] = field(default_factory=dict, repr=False)


def shipped_folder() -> Path:
    """Where the pair that comes with the lab lies, in a checkout and in an installed package alike."""
    return Path(__file__).resolve().parent / "shipped"


def shipped_pair() -> Pair:
    """The pair that comes with the lab.

    Raises:
        ExperimentError: a part of it is missing.
    """
    folder = shipped_folder()
    return pair_on_disk(folder / "target", folder / "draft", folder / "prompts.jsonl")


def pair_on_disk(target: str | Path, draft: str | Path, prompts: str | Path | None = None) -> Pair:
    """A pair given by its folders; a `card.json` beside both of them is read with it.

    Args:
        target: folder of the target.
        draft: folder of the draft.
        prompts: JSON lines; None takes `prompts.jsonl` beside both folders where there is one.

    Raises:
        ExperimentError: a folder or file is missing, is not the kind it should be, or is unreadable.
    """
    places = {"target": Path(target), "draft": Path(draft)}
    for role, folder in places.items():
        _require_checkpoint(folder, role)
    beside = places["target"].resolve().parent
    together = beside == places["draft"].resolve().parent
    file = Path(prompts) if prompts is not None else beside / "prompts.jsonl" if together else None
    if prompts is not None and file is not None and not file.is_file():
        raise ExperimentError(
            f"prompts file {file} does not exist",
            'a file of JSON lines: {"text": ...} or {"messages": [...]}, optionally with "category"',
            "correct the path, or leave it out to use the pair's own prompts",
        )
    card = _read_card(beside / "card.json") if together else {}
    return Pair(places["target"], places["draft"], file if file is not None and file.is_file() else None, card)


def _require_checkpoint(folder: Path, role: str) -> None:
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if "config.json" in present and any(name in present for name in _WEIGHTS):
        return
    if role == "draft" and ("config.yaml" in present or any(name.endswith(".gguf") for name in present)):
        return  # the core says what is wrong with a container
    if not folder.exists():
        what = f"{role} folder {folder} does not exist"
    elif not folder.is_dir():
        what = f"{role} {folder} is a file"
    else:
        what = f"{role} folder {folder} holds {', '.join(present[:8]) or 'nothing'}"
    raise ExperimentError(
        what,
        f"a folder with config.json and one of {', '.join(_WEIGHTS)}",
        f"point --{role} at the folder of a downloaded checkpoint, or make a pair with eagle3lab train",
    )


def _read_card(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as reason:
        raise ExperimentError(
            f"{path} is not a card: {reason}", "a JSON object, as eagle3lab train writes it", "restore or remove it"
        ) from reason
