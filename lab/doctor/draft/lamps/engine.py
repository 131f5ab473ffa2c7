"""Whether the engine does with the head what it should."""

from __future__ import annotations

from lab.doctor.draft.lamp import Lamp

ENGINE: tuple[Lamp, ...] = ()
