"""Containers of a draft: each gives a config in the published keys, and tensors by SafeAILab name.

A container is a `NamedTensors` beside the settings it maps to keys that `keys` knows; what it means is judged behind
the same door for all. Only `checkpoint` imports this; a further container is a file here and a row of
`open_container`.
"""

from __future__ import annotations

from pathlib import Path

from eagle3core.checkpoint.containers.gguf import open_gguf
from eagle3core.checkpoint.containers.turbomind import SETTINGS_FILE, open_turbomind
from eagle3core.checkpoint.fp8 import dequantised, find_fp8, without_fp8
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.tensors import NamedTensors, TensorFiles
from eagle3core.errors import CheckpointError


def open_container(directory: Path) -> tuple[Settings, NamedTensors]:
    """Config and tensors of a draft's directory.

    Raises:
        CheckpointError: a directory that holds no container, or a damaged one.
    """
    if (directory / "config.json").is_file():
        config, tensors = Settings.read(directory / "config.json"), TensorFiles(directory)
        scheme = find_fp8(config, directory)
        return (config, tensors) if scheme is None else (without_fp8(config), dequantised(tensors, scheme))
    if (directory / SETTINGS_FILE).is_file():
        return open_turbomind(directory)
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(
            f"{directory} holds {len(files)} GGUF files, {', '.join(path.name for path in files[:6])}",
            "one file: a head in its own directory",
            "move the file that is meant to a directory of its own",
        )
    if files:
        return open_gguf(files[0])
    return Settings.read(directory / "config.json"), TensorFiles(directory)  # says what is missing


__all__ = ["open_container"]
