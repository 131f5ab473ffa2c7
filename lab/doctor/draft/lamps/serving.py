"""Whether speculation with this head pays where it is served."""

from __future__ import annotations

from lab.doctor.draft.lamp import Lamp

SERVING: tuple[Lamp, ...] = ()
