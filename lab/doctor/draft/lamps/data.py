"""Whether what the head was trained on is what it is asked."""

from __future__ import annotations

from lab.doctor.draft.lamp import Lamp

DATA: tuple[Lamp, ...] = ()
