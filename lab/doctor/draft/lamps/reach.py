"""Whether the head sees positions and distances as it was trained to: rotary embedding, window, length."""

from __future__ import annotations

from lab.doctor.draft.lamp import Lamp

REACH: tuple[Lamp, ...] = ()
