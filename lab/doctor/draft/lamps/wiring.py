"""Whether the head is wired as it was trained: taps, norms, residual, vocabulary map."""

from __future__ import annotations

from lab.doctor.draft.lamp import Lamp

WIRING: tuple[Lamp, ...] = ()
