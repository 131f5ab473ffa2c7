"""Whether the weights are the trained ones, of this kind of head, for this target."""

from __future__ import annotations

from lab.doctor.draft.lamp import Lamp

WEIGHTS: tuple[Lamp, ...] = ()
