"""How a head was read: everything that a misreading could have changed, as one value that lamps alter and measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.checkpoint import DraftCheckpoint, draft_shapes, load_draft, read_refused_draft
from eagle3core.errors import CheckpointError
from eagle3core.geometry import DraftGeometry, EagleGeometry, RopeGeometry, TargetGeometry


@dataclass(frozen=True, eq=False)
class Reading:
    """A head, and one way to read it.

    Attributes:
        geometry: taps in input numbering, window, variant, and of its block the rotary settings and epsilon.
        weights: the head's own, fp32, by SafeAILab name (as of `eagle3core.checkpoint.DraftCheckpoint`).
        draft_to_target: `[Vd]` int64 target ids of the logits; None: draft id = target id.
        normed_last: tap n is what leaves the target's final norm, not what enters it.
        most_positions: positions from here on are rotated as the last one before; 0: none are.
        session: tokens of the longest session, which rotary kinds of several frequency sets choose by.
    """

    geometry: DraftGeometry
    weights: dict[str, Tensor]
    draft_to_target: Tensor | None
    normed_last: bool = False
    most_positions: int = 0
    session: int = 0

    @property
    def is_eagle1(self) -> bool:
        """Whether it is read as an EAGLE-1 head."""
        return isinstance(self.geometry, EagleGeometry)

    @property
    def rope(self) -> RopeGeometry:
        """Its rotary settings."""
        return self.geometry.block.rope

    def with_taps(self, taps: tuple[int, ...], *, normed_last: bool = False) -> Reading:
        """Read with other taps, in input numbering."""
        return replace(self, geometry=replace(self.geometry, taps=taps), normed_last=normed_last)

    def with_variant(self, **changes: Any) -> Reading:
        """Read with other fields of `eagle3core.geometry.HeadVariant`."""
        return replace(self, geometry=replace(self.geometry, variant=replace(self.geometry.variant, **changes)))

    def with_rope(self, rope: RopeGeometry) -> Reading:
        """Read with another rotary embedding."""
        return replace(self, geometry=replace(self.geometry, block=replace(self.geometry.block, rope=rope)))

    def with_window(self, window: int) -> Reading:
        """Read with another window; 0: none."""
        return replace(self, geometry=replace(self.geometry, window=window))

    def with_map(self, ids: Tensor | None) -> Reading:
        """Read with another vocabulary map, absolute ids."""
        return replace(self, draft_to_target=ids)

    def with_weights(self, **changes: Tensor) -> Reading:
        """With other tensors; of a name, each "." is written "__"."""
        return replace(self, weights={**self.weights, **{k.replace("__", "."): v for k, v in changes.items()}})


@dataclass(frozen=True, eq=False)
class Opened:
    """A draft folder as it was opened.

    Attributes:
        reading: what the engine would run; where it refuses the files, as far as they could be read.
        refusals: what the engine refuses the files for; empty where it takes them.
        method: "eagle3" or "eagle", the `SpeculativeConfig.method` that opened it.
    """

    reading: Reading
    refusals: tuple[CheckpointError, ...]
    method: str


def open_draft(
    draft: Path, target: TargetGeometry, device: torch.device, session: int = 0, *, norm_output: str | None = None
) -> Opened:
    """A draft folder, as an EAGLE-3 head or else as an EAGLE-1 head, with weights in fp32.

    Args:
        norm_output: what an EAGLE-3 head's key of that name means, as of `load_draft`.

    Raises:
        CheckpointError: it can be read as neither, or lacks a tensor; the error is that of an EAGLE-3 head.
    """
    as_fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}

    def reading(loaded: DraftCheckpoint) -> Reading:
        return Reading(loaded.geometry, loaded.weights, loaded.draft_to_target, session=session)

    try:
        loaded, refusals = read_refused_draft(draft, target, norm_output=norm_output, **as_fp32)
    except CheckpointError as refused:
        try:
            return Opened(reading(load_draft(draft, target, method="eagle", **as_fp32)), (), "eagle")
        except CheckpointError:
            raise refused from None
    lacking = [name for name, _ in draft_shapes(loaded.geometry) if name not in loaded.weights]
    if lacking:  # no forward pass without them
        raise refusals[0]
    return Opened(reading(loaded), refusals, "eagle3")
