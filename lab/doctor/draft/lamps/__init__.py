"""The lamps by family, and `LAMPS`, their one table in the order in which they are looked at.

A new cause is a value in one of these files; the command, the rows and the notebook follow the table.
"""

from lab.doctor.draft.lamp import Lamp
from lab.doctor.draft.lamps.data import DATA
from lab.doctor.draft.lamps.engine import ENGINE
from lab.doctor.draft.lamps.reach import REACH
from lab.doctor.draft.lamps.serving import SERVING
from lab.doctor.draft.lamps.weights import WEIGHTS
from lab.doctor.draft.lamps.wiring import WIRING

LAMPS: tuple[Lamp, ...] = (*WIRING, *REACH, *WEIGHTS, *DATA, *ENGINE, *SERVING)
