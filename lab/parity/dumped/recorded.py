"""Files of recorded stages (docs/engine.md), draft and target, held against this engine by `inspect states`.

Such a file says itself which tokens, depth and steps it holds, so the engine runs those; compared is what it recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lab.errors import ExperimentError
from lab.options.exchange import InspectStatesOptions
from lab.parity import inputs
from lab.parity.names import split_name
from lab.parity.stages import StageReport, run_stage_parity

KEYS = {"schema", "prompts", "k", "steps"}  # what `lab.parity.taps` asks of a file


def is_recorded(path: Path) -> bool:
    """Whether a file is one of recorded stages; what cannot be read is none."""
    try:
        with safe_open(path, framework="pt") as opened:
            return set(opened.metadata() or {}) >= KEYS
    except (OSError, SafetensorError):
        return False


def recorded_report(path: Path, options: InspectStatesOptions) -> StageReport:
    """The stages that the file holds against this engine's, each at the tolerance of two systems.

    Raises:
        ExperimentError, NotComparable: as `lab.parity.taps.read_taps`; a target without its draft.
    """
    target, draft = inputs.chosen_pair(options.target, options.draft)
    with safe_open(path, framework="pt") as opened:
        metadata, names = opened.metadata(), list(opened.keys())
    try:
        prompts = [[int(token) for token in prompt] for prompt in json.loads(metadata["prompts"])]
        k, steps = int(metadata["k"]), int(metadata["steps"])
    except (TypeError, ValueError) as error:
        raise ExperimentError(
            f"{path.name} has metadata that cannot be read: {error}",
            "prompts as JSON lists of token ids, k and steps as whole numbers",
            "record it again",
        ) from error
    return run_stage_parity(
        target,
        draft,
        prompts=prompts,
        dtype=options.dtype or metadata.get("dtype", "float32"),
        device=options.device,
        k=k,
        steps=steps,
        reference=path,
        stages=sorted({split_name(name)[1] for name in names}),
        capture_layers=options.capture_layers or None,
        capture_convention=options.capture_convention,
    )
