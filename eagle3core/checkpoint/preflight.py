"""Target and draft looked at together before anything is loaded: every finding at once, in a fraction of a second.

Configs, headers and the vocabulary map are read, and no weight. What is found here is what loading would stop at, one
after the other; values that are no numbers show only there. Source: docs/requirements.md R-18, R-22.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3core.checkpoint.fp8 import dequantised, find_fp8
from eagle3core.checkpoint.objections import Objections, name_objections
from eagle3core.checkpoint.plan import METHODS, Given, plan_draft, plan_eagle
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.target import (
    BESIDE_WEIGHTS,
    HEAD,
    read_target_geometry,
    require_counts,
    require_directory,
    target_shapes,
)
from eagle3core.checkpoint.tensors import TensorFiles
from eagle3core.checkpoint.variants import NORM_OUTPUT
from eagle3core.checks import require_choice
from eagle3core.errors import CheckpointError
from eagle3core.geometry import Decision, TargetGeometry


@dataclass(frozen=True)
class Preflight:
    """What a look at a pair found.

    Attributes:
        errors: all that keeps the pair from being loaded, the target's first.
        decisions: how the draft's files were read where they leave room.
    """

    errors: tuple[CheckpointError, ...]
    decisions: tuple[Decision, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing keeps the pair from being loaded."""
        return not self.errors

    @property
    def lines(self) -> list[str]:
        """Errors and decisions for people."""
        return [*(str(error) for error in self.errors), *(decision.line for decision in self.decisions)]


def preflight(
    target: str | Path,
    draft: str | Path,
    *,
    capture_layers: tuple[int, ...] | None = None,
    capture_convention: str | None = None,
    norm_output: str | None = None,
    method: str = "eagle3",
) -> Preflight:
    """Check the files of a pair against each other.

    Args:
        target, draft: directories. The rest as of `load_draft`.

    Raises:
        ConfigError: a path, a method or a meaning of norm_output that there is not.
    """
    require_choice("method", method, METHODS)
    if norm_output is not None:
        require_choice("norm_output", norm_output, NORM_OUTPUT)
    objecting, decisions = Objections(keeps=True), tuple[Decision, ...]()
    geometry = objecting.of(_target_geometry, target, objecting, instead=None)
    if geometry is None:
        return Preflight(tuple(objecting.found), decisions)  # what a draft should fit is not known
    given = Given(capture_layers, capture_convention, norm_output)
    try:
        directory = require_directory(draft, "draft")
        if method == "eagle":
            plan = plan_eagle(directory, geometry, objecting)
        else:
            plan = plan_draft(directory, geometry, given, objecting)
        decisions = plan.geometry.decisions
    except CheckpointError as last:
        objecting.add(last)
    return Preflight(tuple(objecting.found), decisions)


def _target_geometry(path: str | Path, objecting: Objections) -> TargetGeometry:
    """Shapes of a target whose tensors were compared with them.

    Raises:
        CheckpointError: something without which nothing further can be told.
    """
    directory = require_directory(path, "target")
    config = Settings.read(directory / "config.json")
    geometry = read_target_geometry(config, directory)
    files = dequantised(TensorFiles(directory), find_fp8(config, directory))
    require_counts(config, geometry, len(files.names))
    shapes = dict(target_shapes(geometry))
    given = {name: name for name in files.names if not name.endswith(BESIDE_WEIGHTS)}
    for objection in name_objections(files, shapes, given, [HEAD] if geometry.tie_word_embeddings else []):
        objecting.add(objection)
    for name, shape in shapes.items():
        if name in files:
            objecting.of(files.check_shape, name, shape, instead=None)
    return geometry
